"""sim/figures/likely.py: the range of a prediction, by how far it is from published runs."""

from dataclasses import replace

import pytest

from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.likely import doublings, likely
from minifsdp.sim.figures.words import in_words
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GB, GPUS
from tests.sim.cli.test_run import SMALL, options

USUAL = Cluster(GPUS["h100"], nodes=16, gpus_per_node=8, network=400 * GB)


def far(cluster=USUAL, length=2048, precision="bf16") -> float:
    return sum(doublings(cluster, length, precision).values())


def test_the_range_is_by_the_error_of_the_gpu_either_way():
    gpu = replace(GPUS["h100"], error=0.25)
    assert likely(100.0, gpu) == (80.0, 125.0)
    assert likely(100.0, gpu, far=2) == pytest.approx((100 / 1.25**3, 100 * 1.25**3))


def test_runs_like_those_that_were_published_are_not_far_away():
    assert doublings(USUAL, 8192, "bf16-fp32") == {} == doublings(USUAL, 512, "bf16")
    assert far(replace(USUAL, nodes=1, network=1 * GB)) == 0  # which is not used


@pytest.mark.parametrize(
    ("changed", "length", "precision", "expected"),
    [
        ({"nodes": 64}, 2048, "bf16", {"64 nodes": 2}),
        ({"gpus_per_node": 4, "network": 100 * GB}, 2048, "bf16", {"4 GPUs in a node": 1}),
        ({"network": 25 * GB}, 2048, "bf16", {"25 Gbit/s for each GPU": 1}),
        ({"network": 1600 * GB}, 2048, "bf16", {"1600 Gbit/s for each GPU": 2}),
        ({}, 32768, "bf16", {"texts of 32,768 tokens": 2}),
        ({}, 128, "bf16", {"texts of 128 tokens": 2}),
        ({}, 2048, "fp32", {"fp32": 2}),
        ({"nodes": 32}, 2048, "fp32", {"32 nodes": 1, "fp32": 2}),
        ({}, 2048, "tf32", {"tf32": 2}),
    ],
)
def test_what_was_not_published_widens_it_and_is_named(changed, length, precision, expected):
    assert doublings(replace(USUAL, **changed), length, precision) == pytest.approx(expected)


def test_it_is_wider_for_compiled_models():
    assert doublings(USUAL, 2048, "bf16", compiled=True) == {"a compiled model": 1}


def test_a_run_says_its_range_and_why_it_is_wide():
    near, _ = measure(options(f"{SMALL} --seq 512"))
    wide, _ = measure(options(f"{SMALL} --seq 512 --precision fp32"))
    low, high = near["tokens/s, range"]
    assert "range is wider for" not in near and wide["range is wider for"] == "fp32"
    ratio = wide["tokens/s, range"][1] / wide["tokens/s, range"][0]
    assert ratio == pytest.approx((high / low) ** 3)


def test_of_what_is_no_text_it_is_of_samples():
    assert doublings(USUAL, None, "fp32") == {"fp32": 2}
    figures, _ = measure(options("--model tests.sim.training.test_plain:floats --input 588"))
    low, high = figures["samples/s, range"]
    assert low < figures["samples/s per GPU"] < high and "samples/s, probably" in in_words(figures)
    assert not [name for name in in_words(figures) if "token" in name]
