"""sim/hardware/fusion.py: passes that follow each other are one kernel."""

import pytest
import torch

import minifsdp.sim
from minifsdp.sim.cli.run import measure, simulate
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Op
from tests.sim.cli.test_run import options

N = 2**24  # bytes of a tensor
PASS = 1555e9 * 0.83  # bytes a second


def ops(work, compiled=True):
    """The operators of some work, and how long the host was busy."""
    with minifsdp.sim.cluster("a100-40", gpus_per_node=1) as gpu:
        x = torch.zeros(N // 4)
        start, seen = gpu.clock.now, len(gpu.tape)
        if compiled:
            with gpu.compiled():
                work(gpu, x)
        else:
            work(gpu, x)
        found = [entry for entry in gpu.tape[seen:] if isinstance(entry, Op)]
        return [op.end - op.start for op in found], gpu.clock.now - start, found


def moved(seconds):
    """In tensors of N bytes."""
    return seconds * PASS / N


def test_what_passes_hand_on_is_neither_written_nor_read_and_launched_once():
    def chain(gpu, x):
        ((x * 2) + 1).relu().sqrt()

    eager, eager_host, _ = ops(chain, compiled=False)
    fused, host, _ = ops(chain)
    assert [round(moved(s)) for s in eager] == [2, 2, 2, 2]
    assert moved(sum(fused)) == pytest.approx(1)  # reads x; the rest is owed when it ends
    assert eager_host - host == pytest.approx(3 * 6e-6)


def test_what_a_kernel_makes_is_charged_when_it_ends():
    def chain_and_product(gpu, x):
        y = (x * 2).view(1024, -1) + 1
        y.mm(torch.empty(4096, 1))

    seconds, _, found = ops(chain_and_product)
    plain, _, _ = ops(lambda gpu, x: x.view(1024, -1).mm(torch.empty(4096, 1)))
    assert [op.name for op in found] == ["mul", "add", "mm"]
    assert moved(sum(seconds) - plain[0]) == pytest.approx(2)  # x is read, y written


def test_what_another_kernel_reads_was_written_after_all():
    def residual(gpu, x):
        y = x * 2
        z = y + 1
        z.view(1024, -1).mm(torch.empty(4096, 1))
        return y * 3

    seconds, _, _ = ops(residual)
    product, _, _ = ops(lambda gpu, x: x.view(1024, -1).mm(torch.empty(4096, 1)))
    # x read, z written; y written after all, and read.
    assert moved(sum(seconds) - product[0]) == pytest.approx(4)


def test_the_backward_computes_again_what_was_not_written():
    kept = []

    def forward(gpu, x):
        kept.append(x * 2)
        kept[0] + 1

    with minifsdp.sim.cluster("a100-40", gpus_per_node=1) as gpu:
        x = torch.zeros(N // 4)
        with gpu.compiled():
            forward(gpu, x)
        with gpu.compiled():
            kept[0] * 3
        last = [entry for entry in gpu.tape if isinstance(entry, Op)][-1]
        assert moved(last.end - last.start) == pytest.approx(1)


def test_work_on_another_stream_ends_a_kernel():
    def with_a_copy(gpu, x):
        y = x * 2
        with gpu.on("unshard"):
            torch.zeros(4).fill_(1)
        y + 1

    seconds, _, found = ops(with_a_copy)
    mine = [s for s, op in zip(seconds, found, strict=True) if op.stream == "compute"]
    assert moved(sum(mine)) == pytest.approx(3)  # x read; y written, and read


def test_products_and_attention_are_the_same_kernels():
    def work(gpu, x):
        y = torch.empty(4096, 4096, dtype=torch.bfloat16)
        y.mm(y)
        q = torch.empty(4, 16, 1024, 128, dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    eager, _, _ = ops(work, compiled=False)
    compiled, _, _ = ops(work)
    assert compiled == pytest.approx(eager) and len(eager) == 2


def test_a_compiled_step_is_faster_and_does_the_same():
    """The optimizer is not compiled."""
    words = "--model llama2-7b --layers 2 --batch 2 --seq 1024 --gpu h100 --compile"
    (eager, a), (compiled, b) = (measure(options(f"{words} {w}"), steps=2) for w in ("no", "yes"))
    assert 0.6 < compiled["step"] / eager["step"] < 0.92
    assert compiled["flops"] == eager["flops"] and compiled["bytes sent"] == eager["bytes sent"]
    assert compiled["peak allocated"] < eager["peak allocated"]
    last = [
        [op.end - op.start for op in last_step(g.tape)[0] if isinstance(op, Op)] for g in (a, b)
    ]
    assert last[0][-1] == pytest.approx(last[1][-1])


def test_other_models_are_compiled_too():
    words = "--model tests.sim.test_main:small --batch 4096 --compile"
    eager, compiled = (simulate(options(f"{words} {w}"), 2).report() for w in ("no", "yes"))
    assert compiled["step"] < eager["step"]
