"""sim/views/spans.py: who was busy when."""

from minifsdp.sim.tape import Buffer, Mark, Memory, Note, Op, Phase, Wait
from minifsdp.sim.views.spans import spans, text

GATHERED = {name: Buffer(f"all-gather '{name}'", "unshard", 100) for name in ("a", "b")}
OTHER = Buffer("", "compute", 100)


def op(stream: str, start: float, end: float, label: str = "", reads: tuple = ()) -> Op:
    return Op("name", label, stream, start, start, end, [*reads], [])


STEP = [
    op("unshard", 0.0, 2.0, "all-gather 'a'"),
    op("unshard", 2.0, 4.0, "all-gather 'b'"),
    op("compute", 2.0, 3.0, reads=(GATHERED["a"],)),
    op("compute", 3.0, 4.0, reads=(OTHER,)),
    Wait("host", Mark("compute", 4.0), 1.0, 4.0, "limiter.py:1"),
    op("compute", 4.0, 6.0, reads=(OTHER, GATHERED["b"])),
    Wait("host", None, 5.0, 8.0, "train.py:1"),
    op("reduce", 6.0, 8.0, "reduce 'b'"),
    Memory(OTHER, False, 2.0, 10, 20, 40),
    Memory(OTHER, True, 6.0, 5, 20, 40),
    Note(8.0),
]


def test_work_of_one_unit_is_one_span():
    assert [(s.lane, s.start, s.end, s.name) for s in sorted(spans(STEP))] == [
        ("compute", 2.0, 4.0, "a"),
        ("compute", 4.0, 6.0, "b"),
        ("host", 1.0, 4.0, "limiter"),
        ("host", 5.0, 8.0, "host waits"),
        ("reduce", 6.0, 8.0, "b"),
        ("unshard", 0.0, 2.0, "a"),
        ("unshard", 2.0, 4.0, "b"),
    ]


def test_a_gap_parts_what_is_the_same_units():
    found = spans([op("reduce", 0.0, 1.0, "reduce 'a'"), op("reduce", 2.0, 3.0, "reduce 'a'")])
    assert [(s.start, s.end) for s in found] == [(0.0, 1.0), (2.0, 3.0)]


def test_where_no_unit_says_whose_work_it_is_the_phase_does():
    b = (GATHERED["b"],)
    steps = [
        ("forward", [op("compute", 0, 1), op("compute", 2, 3, reads=b), op("compute", 4, 5)]),
        ("backward", [op("compute", 6, 7), op("compute", 8, 9, reads=b), op("compute", 10, 11)]),
        ("optimizer", [op("compute", 12, 13), op("compute", 14, 15)]),
        ("forward", [op("compute", 16, 17)]),
    ]
    tape = [e for name, ops in steps for e in (Phase(name, ops[0].start, ops[0].start), *ops)]
    names = ["", "b", "b", "loss", "b", "b", "optimizer", "optimizer", ""]
    assert [span.name for span in spans(tape)] == names
    assert {s.name: s.number for s in spans(tape)} == {"": -1, "b": 0, "loss": -1, "optimizer": -1}


def test_units_are_numbered_by_their_names_whatever_comes_first():
    names = ["blocks.10", "blocks.9", "<root>"]
    found = spans([op("reduce", i, i + 1.0, f"reduce '{n}'") for i, n in enumerate(names)])
    assert [span.number for span in found] == [2, 1, 0]


def test_as_text_it_is_a_row_for_each_lane():
    assert text(STEP, width=16).splitlines() == [
        "     host --LLLLLL--wwwwww",
        "  compute ....00001111....",
        "  unshard 00001111........",
        "   reduce ............1111",
        "          0       8e+03 ms",
    ]
