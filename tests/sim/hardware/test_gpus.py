"""sim/hardware/gpus.py: GPUs by name."""

import pytest

from minifsdp.sim.hardware.gpus import GPUS, preset

A100 = GPUS["a100-40"]


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are():
    assert preset("a100-40") is A100
    with pytest.raises(ValueError, match=r"gpu='a1000' is not known\. There are: a100-40, a100-80"):
        preset("a1000")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_newer_gpu_is_not_slower(gpu):
    assert gpu.bandwidth >= A100.bandwidth and gpu.flops >= A100.flops
    named = {"a100-40": 40, "a100-80": 80, "h100": 80, "h100-96": 96, "h200": 141}[gpu.name]
    assert 0.98 * named < gpu.memory / 1024**3 < named or named == 141
    assert gpu.memory >= A100.memory and gpu.links >= A100.links
    assert gpu.flops * gpu.products >= A100.flops * A100.products
    assert gpu.flops * gpu.attention >= A100.flops * A100.attention
    assert 0 < gpu.error < 0.3
    assert 0 < gpu.products < 1 and 0 < gpu.attention < 1 and 0 < gpu.passes < 1
