"""sim/training/optimizers.py: states have the bits that their names say."""

import pytest
import torch
from torch import nn

from minifsdp.sim import cluster
from minifsdp.sim.tape import Op
from minifsdp.sim.training.optimizers import BLOCK, OPTIMIZERS, SMALL
from tests.sim.cli.test_run import options, simulate

NUMEL = 64 * 1024


def stepped(name: str, numel: int = NUMEL):
    """Bytes of states for each parameter, and the kernels of a second step."""
    with cluster(taken=0) as gpu:
        params = [nn.Parameter(torch.empty(numel)) for _ in range(3)]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(2):
            for param in params:
                param.grad = torch.empty(numel)
            began = len(gpu.tape)
            with torch.device("cpu"):
                optimizer.step()
        states = [
            tensor
            for state in optimizer.state.values()
            for value in state.values()
            for tensor in (value if isinstance(value, list) else [value])
            if tensor.is_meta
        ]
    kernels = [op for op in gpu.tape[began:] if isinstance(op, Op) and op.stream == "compute"]
    return sum(t.numel() * t.itemsize for t in states) / (3 * numel), kernels


@pytest.mark.parametrize(
    "name, size",
    [("sgd", 0), ("adam", 8), ("adamw", 8), ("adamw-8bit", 2 + 8 / BLOCK), ("adamw-bf16", 4)],
)
def test_what_the_states_of_a_parameter_take(name, size):
    assert stepped(name)[0] == size


def test_a_fused_adamw_is_one_kernel_that_goes_through_memory_once():
    """Reads a value, a gradient and two averages, and writes all but the gradient."""
    taken, kernels = stepped("adamw-fused", 64 * NUMEL)
    _, foreach = stepped("adamw", 64 * NUMEL)
    assert taken == pytest.approx(8, rel=1e-4)  # and a step, counted there
    kernel = max(kernels, key=lambda op: op.end - op.start)
    assert kernel.name == "_fused_adamw_" and len(kernels) <= 2 < len(foreach)
    passes = 1555e9 * 0.83
    assert kernel.end - kernel.start == pytest.approx(28 * 3 * 64 * NUMEL / passes, rel=0.001)
    assert kernel.end - kernel.start < sum(op.end - op.start for op in foreach)


def test_small_tensors_keep_all_their_bits():
    assert stepped("adamw-8bit", SMALL - 1)[0] == 8
    assert stepped("adamw-8bit", SMALL)[0] == 2 + 8 / BLOCK


@pytest.mark.parametrize("name, moved", [("adamw-8bit", 4 + 4 + 2 + 8 / BLOCK), ("adamw-bf16", 12)])
def test_a_kernel_for_each_tensor_that_reads_and_writes_all_of_it(name, moved):
    _, kernels = stepped(name)
    assert [op.name for op in kernels] == ["adamw_low"] * 3
    for op in kernels:
        assert sum(buffer.nbytes for buffer in {*op.reads, *op.writes}) == pytest.approx(
            moved * NUMEL, rel=0.01
        )


def test_fewer_bits_take_less_memory_and_less_time():
    small = "--model gpt-125m --gpus 2 --batch 1 --seq 128 --steps 2 --optimizer "
    full, low, lower = (
        simulate(options(small + name)).report() for name in ("adamw", "adamw-bf16", "adamw-8bit")
    )
    assert full["peak reserved"] > low["peak reserved"] > lower["peak reserved"]
    assert full["compute"] > low["compute"] > lower["compute"]
