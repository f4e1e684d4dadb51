"""sim/training/offload_activations.py: what is saved for the backward waits on the host."""

import pytest
import torch
from torch import nn

import minifsdp.sim
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import HOST, Op
from minifsdp.sim.training.offload_activations import SMALLEST, offloaded_activations
from tests.sim.cli.test_run import options


def test_gradients_are_the_same():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 2)), torch.randn(9, 32)
    model(x).sum().backward()
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    with offloaded_activations():
        loss = model(x).sum()
    loss.backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)


def copies(gpu, seen, nbytes):
    """Copies of so many bytes to the host, and back."""
    found = [e for e in gpu.tape[seen:] if isinstance(e, Op) and e.name == "_to_copy"]
    assert all(op.end - op.start == pytest.approx(nbytes / 31.5e9 / 0.8) for op in found)
    assert all(op.writes[0].nbytes == nbytes for op in found)
    return [op.writes[0].owner == HOST for op in found]


def test_what_is_large_is_copied_to_the_host_and_back():
    with minifsdp.sim.cluster("a100-40", gpus_per_node=1) as gpu:
        for rows, expected in ((1024, [True, False]), (2, [])):
            x, seen = torch.zeros(rows, 64, requires_grad=True), len(gpu.tape)
            with offloaded_activations():
                loss = nn.functional.gelu(x).sum()
            loss.backward()
            assert copies(gpu, seen, x.nbytes) == expected
            assert expected or x.nbytes < SMALLEST


@pytest.mark.parametrize("more", ["none", "full", "none --engine fsdp2", "none --precision fp32"])
def test_it_saves_memory_and_takes_time(more):
    words = "--model gpt-1.3b --layers 6 --batch 4 --loss chunked --recompute " + more
    no, yes = (simulate(options(f"{words} --offload-activations {w}"), 2) for w in ("no", "yes"))
    without, offloaded = no.report(), yes.report()
    saved = without["peak allocated is"]["activations"] - offloaded["peak allocated is"].get(
        "activations", 0
    )
    assert saved > 0 and offloaded["peak allocated"] < without["peak allocated"]
    assert offloaded["step"] > without["step"] and offloaded["flops"] == without["flops"]
    assert offloaded["bytes sent"] == without["bytes sent"]
    for op in last_step(yes.tape)[0]:
        if isinstance(op, Op) and op.name == "_to_copy" and op.writes[0].owner == HOST:
            assert not any("all-gather" in buffer.label for buffer in op.reads)
