"""When a unit is gathered and freed, which the results of a training do not show.

A unit that is freed too late costs memory, one that is freed too early a second gather; the numbers
are right in both cases. So here a step says at each of its moments which units have memory. They
are those that somebody has a reason to keep (unit_state.py), and at the end of each program there
is no reason left.
"""

import itertools
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.no_sync import NoSync
from tests.promises import Block, batch, fsdp, without_wrapper
from tests.ranks import on_ranks
from tests.small import stack, step

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


class Part(Block):
    """A unit; the linear inside tells when it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        weight = self.linear.weight  # noqa: F841  a traceback refers to it, if this fails
        return self.linear(x).tanh()


class Net(nn.Module):
    """Units "a" and "b"; the head is the root's."""

    def __init__(self, run=None):
        super().__init__()
        self.a, self.b, self.head = Part(), Part(), nn.Linear(6, 6)
        self.run = run

    def forward(self, x):
        return self.run(self, x) if self.run else self.head(self.b(self.a(x)))


SETTINGS = {"sharding_strategy": None, "backward_prefetch": None, "forward_prefetch": False}
WAYS = {
    "chunks": lambda m, s: fsdp(**SETTINGS | {"sharding_strategy": s})(m),
    "rows": lambda m, s: fsdp(**SETTINGS | {"sharding_strategy": s}, use_orig_params=True)(m),
    "fully_shard": lambda m, s: without_wrapper(m, reshard_after_forward=s is FULL_SHARD),
}


class Watched:
    """A sharded :class:`Net`, and which units have memory at each moment."""

    def __init__(self, way, strategy, run=None, frozen=()):
        torch.manual_seed(0)
        net = Net(run)
        for name in frozen:
            getattr(net, name).requires_grad_(False)
        self.moments: list[str] = []
        for name, linear in (("a", net.a.linear), ("b", net.b.linear), ("head", net.head)):
            linear.register_forward_pre_hook(lambda *_, n=name: self.note(f"forward of {n}"))
            linear.register_full_backward_pre_hook(lambda *_, n=name: self.note(f"backward of {n}"))
        self.model = WAYS[way](net, strategy)
        self.engine = self.model.engine if way != "fully_shard" else self.model._hooks.engine
        self.engine.prefetcher.backward = self.engine.prefetcher.forward = None  # see test_prefetch
        self.engine.prefetcher.forward_where_it_helps = False

    def alive(self) -> str:
        units = self.engine.units
        return " ".join(u.name or "root" for u in units if u.unsharded.storage.nbytes())

    def note(self, moment: str) -> None:
        self.moments.append(f"{moment}: {self.alive()}".strip())

    def step(self, loss_of: Callable = lambda out: out.sum(), at: int = 0) -> list[str]:
        """The moments of a forward and a backward."""
        self.moments = []
        loss = loss_of(self.model(batch(2, 6, step=at)))
        self.note("between")
        loss.backward()
        self.note("after")
        return self.moments

    def at_rest(self) -> bool:
        return not any(unit.reasons or unit.waits for unit in self.engine.units)


every_way = pytest.mark.parametrize("way", WAYS)

FORWARD = ["forward of a: root a", "forward of b: root b", "forward of head: root", "between: root"]
# The root is freed when the backward leaves it: nothing that is saved of it is left.
BACKWARD = ["backward of head: root", "backward of b: b", "backward of a: a", "after:"]


@every_way
@on_ranks(2)
def test_full_shard_has_one_unit_and_the_root(way):
    watched = Watched(way, FULL_SHARD)
    for at in range(4):
        assert watched.step(at=at) == FORWARD + BACKWARD
    assert watched.at_rest()


@every_way
@on_ranks(2)
def test_shard_grad_op_keeps_all_units_from_forward_to_backward(way):
    watched = Watched(way, SHARD_GRAD_OP)
    for at in range(4):
        assert watched.step(at=at) == [
            "forward of a: root a",
            "forward of b: root a b",
            "forward of head: root a b",
            "between: root a b",
            "backward of head: root a b",
            "backward of b: a b",
            "backward of a: a",
            "after:",
        ]
    assert watched.at_rest()


@every_way
@on_ranks(2)
def test_what_stays_gathered_does_not_show_between_forward_and_backward(way):
    watched = Watched(way, SHARD_GRAD_OP)
    before = [*map(id, watched.model.parameters())]
    out = watched.model(batch(2, 6))
    assert watched.alive() == "root a b"
    assert [*map(id, watched.model.parameters())] == before
    out.sum().backward()
    assert [*map(id, watched.model.parameters())] == before


@every_way
@on_ranks(2)
def test_an_evaluation_keeps_nothing(way):
    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        watched = Watched(way, strategy)
        with torch.no_grad():
            watched.model(batch(2, 6))
        assert watched.moments == FORWARD[:3]
        assert watched.alive() == "" and watched.at_rest()


@every_way
@on_ranks(2)
def test_in_no_sync_units_stay_for_the_next_forward_if_their_strategy_lets_them(way):
    watched = Watched(way, SHARD_GRAD_OP)
    with watched.engine.layer(NoSync)():
        assert watched.step()[-1] == "after: root a b"
        gathers = watched.engine.stats.all_gathers
        assert watched.step(at=1)[-1] == "after: root a b"
        assert watched.engine.stats.all_gathers == gathers
    moments = watched.step(at=2)
    assert watched.engine.stats.all_gathers == gathers
    assert moments[-3:] == ["backward of b: a b", "backward of a: a", "after:"]
    assert watched.at_rest()
    watched = Watched(way, FULL_SHARD)
    with watched.engine.layer(NoSync)():
        assert watched.step() == FORWARD + BACKWARD


@every_way
@on_ranks(2)
def test_what_no_sync_has_kept_is_freed_when_its_shard_has_changed(way):
    watched = Watched(way, SHARD_GRAD_OP)
    with watched.engine.layer(NoSync)():
        watched.step()
    watched.model.zero_grad()
    with torch.no_grad():
        for param in watched.model.parameters():
            param.mul_(0.5)
    gathers = watched.engine.stats.all_gathers
    watched.step(at=1)
    assert watched.engine.stats.all_gathers == gathers + 3


@every_way
@on_ranks(2)
def test_a_unit_that_has_no_part_in_the_loss_is_freed_at_the_end(way):
    watched = Watched(way, SHARD_GRAD_OP, run=lambda net, x: (net.head(net.a(x)), net.b(x)))
    moments = watched.step(lambda out: out[0].sum())
    assert moments[3:] == [
        "between: root a b",
        "backward of head: root a b",
        "backward of a: a b",
        "after:",
    ]
    assert watched.at_rest()


@every_way
@on_ranks(2)
def test_a_frozen_unit_is_freed_when_its_inputs_have_their_gradients(way):
    watched = Watched(way, FULL_SHARD, frozen=["b"])
    assert watched.step() == FORWARD + BACKWARD
    assert watched.at_rest()


@every_way
@on_ranks(2)
def test_a_unit_that_runs_twice_is_gathered_for_each_run(way):
    watched = Watched(way, FULL_SHARD, run=lambda net, x: net.head(net.a(net.b(net.a(x)))))
    assert watched.step() == [
        "forward of a: root a",
        "forward of b: root b",
        "forward of a: root a",
        "forward of head: root",
        "between: root",
        "backward of head: root",
        "backward of a: a",
        "backward of b: a b",  # the gradient of "a" is complete after both of its backwards
        "backward of a: a",
        "after:",
    ]
    assert watched.at_rest()


def around(net, x):
    return net.head(checkpoint(net.b, net.a(x), use_reentrant=False))


@every_way
@on_ranks(2)
def test_a_checkpoint_around_a_unit_gathers_it_for_its_second_forward(way):
    watched = Watched(way, FULL_SHARD, run=around)
    assert watched.step() == [
        *FORWARD,
        "backward of head: root",
        "forward of b: b",
        "backward of b: b",
        "backward of a: a",
        "after:",
    ]
    assert watched.at_rest()


@every_way
@on_ranks(2)
def test_a_forward_that_fails_keeps_nothing(way):
    def fails(net, x):
        net.a(x)
        raise InterruptedError

    watched = Watched(way, SHARD_GRAD_OP, run=fails)
    with pytest.raises(InterruptedError):
        watched.step()
    assert watched.alive() == "" and watched.at_rest()


@every_way
@on_ranks(2)
def test_a_part_that_fails_and_is_caught_is_freed_at_once(way):
    def fails(net, x):
        for width in (5, 6):
            try:
                hidden = net.b(x[:, :width])
            except RuntimeError:
                watched.note("caught")
        return net.head(hidden)

    watched = Watched(way, FULL_SHARD, run=fails)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a parameter of unit")  # a traceback refers to it
        moments = watched.step()
    assert moments[:3] == ["forward of b: root b", "caught: root", "forward of b: root b"]
    assert moments[-1] == "after:" and watched.at_rest()


@every_way
@on_ranks(2)
def test_a_backward_that_fails_keeps_nothing_when_the_next_step_begins(way):
    watched = Watched(way, SHARD_GRAD_OP)
    handle = watched.model.a.linear.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        watched.step()
    handle.remove()
    with torch.no_grad():
        watched.model(batch(2, 6))
    assert watched.moments[-3:] == FORWARD[:3]
    assert watched.alive() == "" and watched.at_rest()


@every_way
@on_ranks(2)
def test_where_ranks_use_different_units_all_of_them_stay_to_the_end(way):
    def some(net, x):
        hidden = net.a(x)
        return net.head(hidden), net.b(hidden)

    watched = Watched(way, FULL_SHARD, run=some)
    watched.step(lambda out: sum(out).sum())
    moments = watched.step(lambda out: sum(out[: 1 + dist.get_rank()]).sum(), at=1)
    assert {m.split(": ")[1] for m in moments if m.startswith("backward")} == {"root a b"}
    assert moments[-1] == "after:" and watched.at_rest()


@every_way
@on_ranks(2)
def test_looking_at_parameters_keeps_what_is_looked_at_and_frees_it(way):
    watched = Watched(way, SHARD_GRAD_OP)
    if way == "fully_shard":
        watched.model.b.unshard()
        assert watched.alive() == "b"
        watched.model.b.reshard()
    else:
        with FSDP.summon_full_params(watched.model.module.b, recurse=False):
            assert watched.alive() == "b"
    assert watched.alive() == "" and watched.at_rest()


# ------------------------------------------------------------------------------------- an interrupt


FREE = {"hide_views", "hide", "reshard", "release", "free"}  # functions that free a unit


@contextmanager
def interrupted(line):
    """A Ctrl-C when so many lines of these functions have run."""
    lines = itertools.count()

    def in_function(frame, event, arg):
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return in_function

    def in_engine(frame, event, arg):
        code = frame.f_code
        return in_function if code.co_name in FREE and "minifsdp" in code.co_filename else None

    before = sys.gettrace()
    sys.settrace(in_engine)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_a_unit_that_an_interrupt_has_found_half_free_is_freed_before_the_next_step(rows):
    model = stack(2, use_orig_params=rows)
    expected = step(model)
    for line in itertools.count():
        model.zero_grad()
        try:
            with interrupted(line):
                step(model)
            break  # it has no more lines
        except KeyboardInterrupt:
            pass
        model.zero_grad()
        assert torch.equal(step(model), expected), line
        assert not any(unit.unsharded.storage.nbytes() for unit in model.engine.units), line
    assert line > 50
