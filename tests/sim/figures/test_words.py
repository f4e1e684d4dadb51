"""sim/figures/words.py: figures in words."""

from minifsdp.sim.figures.words import in_words, page

FIGURES = {
    "fits": True,
    "step": 0.2204,
    "peak allocated": 3 * 2**30,
    "flops": 34.69e12,
    "peak allocated is": {"parameters": 2**30, "activations": 2**31},
    "MFU": 0.5043,
    "tokens/s per GPU": 18582.3,
    "samples/s per GPU": 18.13,
    "tokens/s, range": (2123.0, 2468.0),
    "dollars per billion tokens": 37.371,
    "advice": "it waits",
}


def test_every_figure_has_its_unit():
    assert list(in_words(FIGURES).items()) == [
        ("fits", "True"),
        ("step", "220.4 ms"),
        ("peak allocated", "3,072 MiB"),
        ("  parameters", "1,024 MiB"),
        ("  activations", "2,048 MiB"),
        ("flops", "34.69 T"),
        ("MFU", "50.4%"),
        ("tokens/s per GPU", "18,582"),
        ("samples/s per GPU", "18.1"),
        ("tokens/s, probably", "2,100 to 2,500"),
        ("dollars per billion tokens", "37.37 $"),
        ("advice", "it waits"),
    ]


def test_sentences_come_last():
    lines = page(FIGURES).splitlines()
    assert lines[1].split() == ["step", "220.4", "ms"] and lines[-1] == "it waits"
    assert page({"fits": False, "why": "CUDA out"}).splitlines()[-1] == "CUDA out"
