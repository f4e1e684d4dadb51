"""sim/calibration/kernels.py: samples of what a device computes."""

import pytest
import torch

from minifsdp.sim import cluster
from minifsdp.sim.calibration import kernels
from minifsdp.sim.calibration.kernels import kernels_of
from minifsdp.sim.calibration.machine import Device
from minifsdp.sim.hardware.kernels import PASS, PRODUCT
from minifsdp.sim.tape import Op

CPU, FP32 = torch.device("cpu"), torch.float32
DEVICE = Device("cpu", 2**30, 2)
GROUP = object()  # of all ranks, which do it together


@pytest.fixture(autouse=True)
def second(monkeypatch):
    """Nothing is waited for: each piece of work is done once, and takes a second."""

    def seconds(work, here, group) -> float:
        assert group is GROUP
        work()
        return 1.0

    monkeypatch.setattr(kernels, "seconds", seconds)


def step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
    model(torch.ones(4, 8)).view(64)[:7].sum().backward()


def test_a_piece_of_work_asks_for_what_it_is_charged_on_the_virtual_gpu():
    """The same kernels, in the same order; none for what only looks at memory in another way."""
    with cluster(gpus_per_node=1) as gpu:
        step()
    charged = [op for op in gpu.tape if isinstance(op, Op)]
    asked = kernels_of(step)
    assert len(asked) == len(charged) > 10
    assert [k.flops for k in asked] == [op.flops for op in charged]


def test_a_kernels_bytes_are_what_it_reads_and_writes():
    x, y = torch.ones(1000), torch.ones(1000)
    (out_of_place,) = kernels_of(lambda: x + y)
    (in_place,) = kernels_of(lambda: x.add_(y))
    assert (out_of_place.moved, in_place.moved) == (12_000, 8_000)
    assert not kernels_of(lambda: (x.view(10, 100)[3].t(), torch.empty(7)))


def test_products_are_sampled_in_many_shapes():
    samples = kernels.products(CPU, FP32, DEVICE, GROUP)
    sizes = kernels.sizes(CPU, FP32)
    assert len({inner for _, inner, _ in sizes}) > 2
    for sample, (rows, inner, columns) in zip(samples, sizes, strict=True):
        assert sample.first == 2 * rows * inner * columns
        assert sample.second == 2 * rows * columns
        assert sample.seconds == 1 / kernels.LAYERS  # a call does so many
    assert len(kernels.sizes(CPU, torch.bfloat16)) == 2


def test_attention_is_sampled_at_many_lengths():
    samples = kernels.attentions(CPU, FP32, GROUP)
    lengths = [round(sample.first / sample.second) for sample in samples]
    assert lengths == [64, 128, 256]
    heads, width, length = 16 * 8, 64, 64  # as many tokens each time
    causal = 2.0 * heads * length * length * width / 2
    speeds = 2 / 0.85, 5 / (0.85 * 0.85)  # forward and backward, with small heads
    assert samples[0].first == pytest.approx(causal * sum(speeds))


def test_passes_are_sampled_by_their_number_and_bytes():
    small, middle, large = kernels.passes(CPU, FP32, GROUP)
    assert small.first == middle.first == large.first >= 6 * kernels.LAYERS
    assert large.second == pytest.approx(4 * small.second, rel=0.05)
    (gelu,) = kernels_of(lambda: torch.nn.functional.gelu(torch.ones(1024, 256)))[-1:]
    assert gelu.kind == PASS and small.second > 2 * kernels.LAYERS * gelu.moved
    assert all(k.kind != PRODUCT for k in kernels_of(lambda: torch.ones(3) + 1))


def test_copies_are_bytes_a_second():
    assert kernels.copies(CPU, GROUP) == 4 * 2**24
