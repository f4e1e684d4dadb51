"""sim/training/fused.py: the same results and gradients, in fewer kernels, with less kept."""

import pytest
import torch
from torch import nn

from minifsdp.sim.cli.run import measure, simulate
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Op
from minifsdp.sim.training.fused import FUSED, fuse
from minifsdp.sim.training.llama import SEPARATE, LlamaBlock
from tests.sim.cli.test_run import options

LLAMA = "--model llama2-7b --layers 2 --width 512 --heads 8 --kv-heads 4 --hidden 1024 --vocab 512"


def inputs(dtype, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def grads(outputs, given):
    torch.manual_seed(1)
    loss = sum((out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outputs)
    return torch.autograd.grad(loss, given)


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("part", ["norm", "rotate", "swiglu"])
def test_it_computes_the_same_forward_and_backward(part, dtype, near):
    found = []
    for kernels in (SEPARATE, FUSED):
        if part == "norm":
            given = inputs(dtype, (2, 5, 8), (8,))
            outputs = [kernels.norm(*given)]
        elif part == "rotate":
            given = inputs(dtype, (2, 5, 4, 8), (2, 5, 2, 8))
            angles = torch.polar(torch.ones(5, 1, 4), torch.arange(20.0).view(5, 1, 4))
            outputs = kernels.rotate(*given, angles)
        else:
            given = inputs(dtype, (3, 8), (3, 8))
            gate, up = given
            outputs = [kernels.swiglu(gate.mul, up.mul, 1.0)]
        found.append([*outputs, *grads(outputs, given)])
    for separate, fused in zip(*found, strict=True):
        assert separate.dtype is fused.dtype is dtype
        assert torch.allclose(separate, fused, rtol=near, atol=near)


def test_all_parts_of_a_llama_are_fused_and_nothing_of_others():
    block = LlamaBlock(8, 4, 2, 16)
    assert fuse(nn.Sequential(nn.Linear(2, 2), block))
    assert {part.kernels for part in (block, block.norm, block.mlp_norm)} == {FUSED}
    assert LlamaBlock(8, 4, 2, 16).kernels is SEPARATE and not fuse(nn.Linear(2, 2))


def test_it_has_fewer_kernels_is_faster_and_keeps_less():
    def kernels(gpu):
        return [op.name for op in last_step(gpu.tape)[0] if isinstance(op, Op)]

    words = f"{LLAMA} --batch 8 --seq 512 --gpus 1"
    separate, fused = (simulate(options(f"{words} --fused {w}"), steps=2) for w in ("no", "yes"))
    for name, times in (("norm", 5), ("rotate", 2), ("swiglu", 2)):
        assert kernels(fused).count(name) == kernels(fused).count(f"{name}_backward") == times
        assert name not in kernels(separate)
    assert len(kernels(fused)) < 0.7 * len(kernels(separate))
    one, other = fused.report(), separate.report()
    assert one["compute"] < 0.9 * other["compute"]
    assert one["peak allocated"] < 0.8 * other["peak allocated"]
    assert one["flops"] == other["flops"]


def test_a_model_without_such_parts_is_refused():
    with pytest.raises(ValueError, match="--fused yes is for the Llamas of --model; 'gpt-125m'"):
        measure(options("--fused yes"))
