"""sim/hardware/attention.py: the kernel that a GPU would choose, forward and backward."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp.sim import cluster
from minifsdp.sim.__main__ import main, parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.hardware.attention import attention, choose, only

BF16, FP32 = torch.bfloat16, torch.float32


def tensors(*sizes, dtype=BF16):
    """Queries, keys and values without values; ``[batch, heads, length, size]`` each."""
    sizes = sizes * 3 if len(sizes) == 1 else sizes
    return [torch.empty(size, dtype=dtype, device="meta", requires_grad=True) for size in sizes]


SMALL = (2, 4, 64, 32)
MASK = torch.empty(64, 64, dtype=BF16, device="meta")


@pytest.mark.parametrize(
    "sizes, dtype, mask, causal, ampere, hopper",
    [
        ([SMALL], BF16, None, False, "flash", "cudnn"),
        ([SMALL], torch.float16, None, True, "flash", "cudnn"),
        ([SMALL], BF16, MASK, False, "efficient", "cudnn"),
        ([SMALL], FP32, None, False, "efficient", "efficient"),
        ([SMALL], torch.float64, None, False, "math", "math"),
        ([(2, 4, 64, 256)], BF16, None, False, "flash", "flash"),
        ([(2, 4, 64, 264)], BF16, None, False, "efficient", "efficient"),
        ([(2, 4, 64, 20)], BF16, None, False, "flash", "flash"),  # padded to 24
        ([(2, 4, 64, 20)], BF16, MASK, False, "math", "math"),  # not a multiple of 8
        ([(2, 4, 64, 20)], FP32, MASK, False, "efficient", "efficient"),  # of 4, in 32 bits
        ([SMALL, (2, 4, 16, 32), (2, 4, 16, 32)], BF16, None, True, "efficient", "cudnn"),
        ([SMALL, SMALL, (2, 4, 64, 16)], BF16, None, False, "efficient", "efficient"),
        ([SMALL, (2, 2, 64, 32), (2, 2, 64, 32)], BF16, None, True, "flash", "cudnn"),
        ([(4, 64, 32)], BF16, None, False, "math", "math"),
    ],
)
def test_the_choice_is_cudas(sizes, dtype, mask, causal, ampere, hopper):
    given = (*tensors(*sizes, dtype=dtype), mask, causal)
    assert choose(*given, False) == ampere and choose(*given, True) == hopper


def test_a_tensor_whose_last_dimension_is_not_dense_has_the_plain_way():
    q, k, v = tensors(SMALL)
    assert choose(q, k.mT.contiguous().mT, v, None, False, False) == "math"


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient", "math"])
def test_kernels_that_are_switched_off_are_not_taken(name):
    with only(name):
        assert choose(*tensors(SMALL), None, False, False) == name
    with only("auto"):
        assert choose(*tensors(SMALL), None, False, False) == "flash"


def test_if_none_can_do_it_that_is_said():
    said = (
        r"switched on can do this: queries \(2, 4, 64, 32\) torch.float32, keys .*no mask, causal"
    )
    with only("flash"), pytest.raises(RuntimeError, match=said):
        choose(*tensors(SMALL, dtype=FP32), None, True, False)


class Seen(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient", "math"])
@pytest.mark.parametrize("keys", [4, 2])  # heads
@pytest.mark.parametrize("size", [32, 20])
@pytest.mark.parametrize("mask", [None, "bool", "summand"])
def test_it_runs_forward_and_backward_with_the_right_shapes(kind, keys, size, mask):
    kv = (2, keys, 64, size)
    q, k, v = tensors((2, 4, 64, size), kv, kv)
    if mask == "bool":
        mask = torch.empty(64, 64, dtype=torch.bool, device="meta")
    elif mask == "summand":
        mask = torch.empty(2, 1, 64, 64, dtype=BF16, device="meta", requires_grad=True)
    needs_grad = mask is not None and mask.requires_grad
    cannot = {
        "flash": mask is not None,
        "cudnn": size == 20 or needs_grad,
        "efficient": size == 20,
        "math": False,
    }
    if cannot[kind]:
        with only(kind), pytest.raises(RuntimeError, match="none of the attention kernels"):
            choose(q, k, v, mask, False, True)
        return
    with attention(prefers_cudnn=True), only(kind), Seen() as seen:
        out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=keys < 4)
        out.sum().backward()
    assert out.shape == q.shape and out.dtype is BF16
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    if kind == "math":
        assert not any("attention" in name for name in seen.names) and "bmm" in seen.names
    else:
        name = f"_scaled_dot_product_{kind}_attention"
        assert seen.names.count(name) == seen.names.count(f"{name}_backward") == 1


def test_scores_are_not_stored():
    """4,096 tokens: 16 heads' scores alone would be 1 GiB in fp32."""
    with cluster() as gpu:
        q, k, v = (torch.empty(1, 16, 4096, 64, dtype=BF16, requires_grad=True) for _ in range(3))
        inputs = gpu.allocator.allocated.now
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert gpu.allocator.allocated.peak < inputs + 6 * q.nbytes


def test_triton_is_flash_with_a_time_of_its_own():
    q, k, v = (torch.empty(1, 16, 512, 64, dtype=BF16, device="meta") for _ in range(3))
    with only("triton"):
        assert choose(q, k, v, None, True, True) == "flash"
        with pytest.raises(RuntimeError, match="none of the attention kernels"):
            choose(q.float(), k.float(), v.float(), None, True, True)
    run = "--model gpt-125m --gpus 2 --batch 2 --seq 512 --attention {}"
    flash, triton = (
        simulate(parser().parse_args(run.format(kernel).split()), steps=1).report()
        for kernel in ("flash", "triton")
    )
    assert triton["compute"] > 1.01 * flash["compute"]
    assert triton["peak allocated"] == flash["peak allocated"]


def test_outside_of_a_virtual_gpu_nothing_has_changed():
    with cluster():
        pass
    with Seen() as seen:
        functional.scaled_dot_product_attention(*tensors(SMALL))
    assert "bmm" in seen.names


def test_the_command_line_takes_a_kernel(capsys):
    run = [
        "--model",
        "gpt-125m",
        "--batch",
        "1",
        "--seq",
        "512",
        "--precision",
        "fp32",
        "--attention",
    ]
    assert main([*run, "math"]) == 0
    slow = capsys.readouterr().out
    assert main([*run, "auto"]) == 0
    assert capsys.readouterr().out != slow
    assert main([*run, "flash"]) == 2
    assert "switched on can do this" in capsys.readouterr().err
