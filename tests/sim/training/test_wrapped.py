"""sim/training/wrapped.py: the model has the settings of the command line."""

import pytest

from minifsdp import BackwardPrefetch, ForwardPrefetch
from minifsdp.core.limiter import EventQueue, NoLimit
from minifsdp.sim import cluster
from minifsdp.sim.training.fsdp2 import StreamOrdered
from minifsdp.sim.training.history import DriftingQueue, LettingGo, ReversedPostForward
from minifsdp.sim.training.wrapped import limit_of, wrapped
from tests.sim.cli.test_run import SMALL, options, simulate
from tests.sim.test_main import small
from tests.sim.test_virtual_cluster import Block


@pytest.mark.parametrize(
    "unit, inside",
    [
        ("model", ()),
        ("block", ("",)),
        ("part", ("", ".1", ".3")),  # its large layers; the norm stays with the block
    ],
)
def test_the_size_of_a_unit(unit, inside):
    gpu = simulate(options(f"{SMALL} --unit {unit} --strategy shard_grad_op"), steps=1)
    gathered = {op.label for op in gpu.tape if getattr(op, "name", "") == "_allgather_base_"}
    names = [f"'{block}{part}'" for block in range(4) for part in inside] or ["<root>"]
    assert gathered == {f"all-gather {name}" for name in names}


def engine(words: str):
    with cluster():
        return wrapped(small().build(), (Block,), options(words)).engine


def test_our_own_engine_has_what_is_asked_for():
    found = engine("--limit 3 --backward post --forward pre --strategy shard_grad_op")
    assert isinstance(found.limiter, EventQueue) and found.limiter.limit == 3
    assert found.prefetcher.backward is BackwardPrefetch.BACKWARD_POST
    assert found.prefetcher.forward is ForwardPrefetch.FORWARD_PRE
    assert not any(unit.reshard_after_forward for unit in found.units)
    assert isinstance(engine("--limit none").limiter, NoLimit)
    usual, two = (engine(words).limiter for words in ("", "--limit 2"))
    assert (usual.limit, usual.freeing) == (2, 1) and (two.limit, two.freeing) == (2, 0)
    assert engine("--forward none --backward none").prefetcher.forward is None


@pytest.mark.parametrize(
    "words, prefetcher, limiter, parameters",
    [
        ("fsdp1", ReversedPostForward, DriftingQueue, False),
        ("fsdp1 --limit none", ReversedPostForward, NoLimit, False),
        ("fsdp2", LettingGo, NoLimit, True),
    ],
)
def test_pytorchs_engines(words, prefetcher, limiter, parameters):
    found = engine(f"--engine {words}")
    assert type(found.prefetcher) is prefetcher and type(found.limiter) is limiter
    assert isinstance(found.parameters, StreamOrdered) is parameters
    assert found.prefetcher.backward is BackwardPrefetch.BACKWARD_PRE
    assert found.prefetcher.forward is None
    assert found.parameters.prefetcher is found.prefetcher


def test_pytorchs_first_engine_prefetches_as_it_is_told():
    found = engine("--engine fsdp1 --backward post --forward pre")
    assert found.prefetcher.backward is BackwardPrefetch.BACKWARD_POST
    assert found.prefetcher.forward is ForwardPrefetch.FORWARD_PRE


def test_a_limit_is_a_number_or_none():
    assert limit_of("none") is False and limit_of("1") == 1 and limit_of("12") == 12
