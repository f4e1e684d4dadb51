"""sim/hardware/gpus.py: GPUs by name."""

import pytest

from minifsdp.sim.hardware.gpus import GPUS, like, preset

A100 = GPUS["a100-40"]


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are():
    assert preset("a100-40") is A100
    with pytest.raises(
        ValueError, match=r"gpu='a1000' is not known\. There are: a100-40, a100-64, a100-80"
    ):
        preset("a1000")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_newer_gpu_is_not_slower(gpu):
    assert gpu.bandwidth >= A100.bandwidth and gpu.flops >= A100.flops
    named = {"h100": 80, "h200": 141, "b200": 180, "gb200": 186, "mi300x": 192}
    size = named.get(gpu.name) or int(gpu.name.split("-")[1])
    assert 0.98 * size < gpu.memory / 1024**3 < size or gpu.name == "h200"
    assert gpu.memory >= A100.memory and gpu.links >= A100.links and gpu.pcie >= A100.pcie
    assert gpu.flops * gpu.products >= A100.flops * A100.products
    assert gpu.flops * gpu.attention >= A100.flops * A100.attention
    assert 0 < gpu.error < 0.3
    assert gpu.flops > gpu.flops_tf32 > gpu.flops_fp32 >= A100.flops_fp32
    assert (
        0 < gpu.products_tf32 < gpu.products_fp32 < 1
        and 0 < gpu.attention < 1
        and 0 < gpu.passes < 1
    )


def test_a_device_is_known_by_its_name_and_its_memory():
    for name, memory, found in (
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"), ("NVIDIA H100 64GB", 63, "h100-64"),
        ("NVIDIA A100-SXM-64GB", 63, "a100-64"), ("NVIDIA B200", 178, "b200"),
        ("NVIDIA GB200", 184, "gb200"), ("AMD Instinct MI300X", 191, "mi300x"),
        ("NVIDIA H200", 140, "h200"),
    ):  # fmt: skip
        gpu = like(name, int(memory * 2**30))
        assert gpu is not None and gpu.name == found
    assert like("Tesla T4", 2**34) is None
