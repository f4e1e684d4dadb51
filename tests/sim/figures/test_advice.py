"""sim/figures/advice.py: what is advised helps, where it is tried."""

import pytest

from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.advice import WORTH, Advice, advice
from tests.sim.cli.test_run import options

BASE = "--model gpt-1.3b --layers 8 --batch 4 --seq 512 --nodes 2 --steps 2"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "words, expected",
    [
        (f"{BASE} --limit 1", "limit true"),
        (f"{BASE} --unit model", "unit block"),
        (f"{BASE} --network 100", "strategy hybrid_shard"),
        (f"{BASE} --nodes 1 --batch 1 --memory 2.7 --limit 2", "limit true"),
        (f"{BASE} --nodes 1 --batch 1 --memory 2.7 --unit part", "limit 4"),
        (f"{BASE} --recompute full --nodes 1 --batch 8", "recompute none"),
        (f"{BASE} --offload yes --nodes 1", "offload no"),
        (f"{BASE} --precision fp32", "precision bf16"),
        ("--model gpt-125m --batch 1 --seq 512 --steps 2", "batch 2"),
    ],
)
def test_it_is_tried_and_helps(words, expected):
    figures, gpu = measure(options(words))
    assert gpu is not None
    found = advice(gpu, figures, options(words))
    assert (f"{found.name} {found.value}", str(found)) == (expected, figures["advice"])
    tried, _ = measure(options(f"{words} --{expected}"))
    assert tried["fits"]
    saved = 1 - figures["tokens/s per GPU"] / tried["tokens/s per GPU"]
    assert saved > found.saves / 4 > WORTH / 4


@pytest.mark.parametrize("batch", [1, 2])
def test_twice_the_samples_also_hide_more_of_what_is_sent(batch):
    """Where a network binds, they save more than half of the time that it keeps the GPU waiting."""
    words = f"{BASE} --network 100 --strategy hybrid_shard --seq 2048 --batch {batch}"
    figures, gpu = measure(options(words))
    assert gpu is not None and figures["exposed communication"] > 0.2 * figures["step"]
    found = advice(gpu, figures, options(words))
    assert (found.name, found.value) == ("batch", str(2 * batch))
    tried, _ = measure(options(f"{words} --batch {2 * batch}"))
    saved = 1 - figures["tokens/s per GPU"] / tried["tokens/s per GPU"]
    waiting = (figures["exposed communication"] + figures["idle"]) / figures["step"]
    assert 1.2 * waiting / 2 < found.saves < 1.1 * saved


def test_what_there_is_no_memory_for_is_not_advised():
    words = f"{BASE} --nodes 4 --network 100 --batch 1"
    figures, gpu = measure(options(words))
    assert gpu is not None
    assert advice(gpu, figures, options(words)).name
    full = {**figures, "peak reserved": gpu.cluster.capacity}
    assert advice(gpu, full, options(words)).name not in ("strategy", "batch")


def test_where_nothing_helps_it_says_so():
    words = "--model gpt-1.3b --gpus 1 --gpu h200 --batch 8 --steps 2"
    figures, gpu = measure(options(words))
    assert gpu is not None
    assert not advice(gpu, figures, options(words)).name
    assert figures["advice"].startswith("It computes 100%")


def test_a_limit_that_an_engine_has_not_is_not_advised():
    words = f"{BASE} --nodes 1 --batch 1 --memory 2.7"
    ours, theirs = (measure(options(f"{words} {more}"))[0] for more in ("", "--engine fsdp1"))
    assert ours["step"] == pytest.approx(theirs["step"], rel=1e-3)
    assert "--limit 4" in ours["advice"] and "--limit" not in theirs["advice"]


def test_it_is_a_sentence_with_a_setting():
    assert str(Advice("it waits", "limit", "2", 0.25)) == (
        "It waits: --limit 2, for about 25% less time"
    )
