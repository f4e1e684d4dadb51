"""several_forwards.py: one backward through several forwards. (What it computes is in
promises/test_step.py, what it gathers ahead in test_prefetch.py.)"""

import gc
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.support import several_forwards
from minifsdp.support.several_forwards import SeveralForwards
from tests.promises import batch, test_when_freed
from tests.promises.test_when_freed import (
    FORWARD,
    FULL_SHARD,
    SHARD_GRAD_OP,
    Part,
    Watched,
    every_way,
)
from tests.ranks import device, on_ranks

THROUGH_ONE = ["backward of head: root", "backward of b: root b", "backward of a: root a"]


def forwards(watched, number=2, at=0):
    """The losses of so many forwards. From here on the moments are those of a backward."""
    losses = [watched.model(batch(2, 6, step=at + n)).sum() for n in range(number)]
    watched.moments = []
    return losses


def backward(watched, *losses, **settings):
    """The moments of a backward through these, and how many gathers it has made."""
    before, watched.moments = watched.engine.stats.all_gathers, []
    sum(losses).backward(**settings)
    watched.note("after")
    return watched.moments, watched.engine.stats.all_gathers - before


@every_way
@on_ranks(2)
def test_each_forward_frees_its_units(way):
    watched = Watched(way, FULL_SHARD)
    for at in range(4):
        for number in (2, 3):
            moments, gathers = backward(watched, *forwards(watched, number, at))
            assert moments == [*number * THROUGH_ONE, "after:"] and gathers == 2 * number
    assert watched.at_rest()


@every_way
@on_ranks(2)
def test_what_stays_for_another_reason_stays_from_one_to_the_other(way):
    watched = Watched(way, SHARD_GRAD_OP)
    moments, gathers = backward(watched, *forwards(watched))
    assert moments[:3] == [f"backward of {name}: root a b" for name in ("head", "b", "a")]
    assert moments[-2:] == ["backward of a: root a", "after:"] and gathers == 0
    assert watched.at_rest()


def again_and_again(net, x):
    return net.head(net.b(net.a(net.b(net.a(x)))))


@every_way
@on_ranks(2)
def test_of_several_uses_in_one_forward_the_first_counts(way):
    watched = Watched(way, FULL_SHARD, run=again_and_again)
    for at in range(4):
        _, one = backward(watched, *forwards(watched, 1, at))
        moments, three = backward(watched, *forwards(watched, 3, at))
        assert (one, three) == (2, 6)
        assert moments.count("backward of head: root") == 3  # nothing else is there between them


class Recomputed(Part):
    """A part of its forward runs again in a backward, which has a backward of its own for that.
    What comes before it needs parameters, too."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self.linear, self.before(x), use_reentrant=True).tanh()


@every_way
@on_ranks(2)
def test_a_part_that_is_recomputed_does_not_end_the_backward_of_a_forward(way):
    def run(net, x):
        return net.head(net.b(net.a(x)))

    with patch.object(test_when_freed, "Part", Recomputed):
        watched = Watched(way, FULL_SHARD, run=run)
    for at in range(2):
        _, one = backward(watched, *forwards(watched, 1, at))
        _, two = backward(watched, *forwards(watched, 2, at))
        assert two <= 2 * one


@every_way
@on_ranks(2)
def test_a_forward_that_is_dropped_before_another_one_changes_nothing_for_that(way):
    watched = Watched(way, FULL_SHARD)
    for at in range(4):
        watched.model(batch(2, 6, step=at))  # an evaluation, outside of no_grad
        assert watched.step(at=at) == [*FORWARD, *THROUGH_ONE, "after:"]
    assert watched.at_rest()


@on_ranks(2)
def test_a_gradient_penalty_leaves_the_graphs_of_all_forwards():
    watched = Watched("chunks", FULL_SHARD)
    for at in range(4):
        losses = forwards(watched, at=at)
        x = batch(2, 6, step=at).requires_grad_()
        (slope,) = torch.autograd.grad(watched.model(x).sum(), x, create_graph=True)
        moments, _ = backward(watched, *losses, slope.pow(2).sum())
        assert moments[-4:] == [*THROUGH_ONE, "after:"]
        assert moments.count("backward of head: root") >= 2
    assert watched.at_rest()


@on_ranks(2)
def test_a_gradient_of_an_input_ends_what_was_before_it():
    """A program may do nothing else, and would note forwards for ever."""
    watched = Watched("chunks", FULL_SHARD)
    x = batch(2, 6).requires_grad_()
    for _ in range(4):
        torch.autograd.grad(watched.model(x).sum(), x)
        assert not watched.engine.layer(SeveralForwards)._noted


@on_ranks(2)
def test_a_backward_between_them_ends_what_was_before_it():
    watched = Watched("chunks", FULL_SHARD)
    for at in range(4):
        one, other, third = forwards(watched, 3, at)
        backward(watched, other)
        moments, gathers = backward(watched, one, third)
        assert moments[-2] == "backward of a: root a" and gathers == 3  # once in both forwards
        layer = watched.engine.layer(SeveralForwards)
        assert not layer._noted and not layer._hooks


@on_ranks(2)
def test_for_a_forward_from_before_such_a_backward_units_stay():
    """Ranks do not compare whether a backward comes to it, so none may have to gather for it."""
    watched = Watched("chunks", FULL_SHARD)
    for at in range(4):
        old, other = forwards(watched, at=at)
        backward(watched, other)
        moments, gathers = backward(watched, old, *forwards(watched, at=at))
        assert moments[3:5] == ["backward of head: root", "backward of b: root b"]
        assert moments[-2] == "backward of a: root a" and gathers == 4


@on_ranks(2)
def test_a_graph_that_is_gone_through_again_is_as_it_was():
    watched = Watched("chunks", FULL_SHARD)
    for at in range(4):
        losses = forwards(watched, at=at)
        assert backward(watched, *losses, retain_graph=True)[1] == 4
        assert backward(watched, *losses)[1] == 3


def fails(grad):
    raise ValueError


@on_ranks(2)
def test_after_a_failure_forwards_are_counted_from_the_beginning():
    watched = Watched("chunks", FULL_SHARD)
    for at in range(4):
        one, other = forwards(watched, at=at)
        one.register_hook(fails)
        with pytest.raises(ValueError):
            backward(watched, one, other)
        assert not watched.engine.layer(SeveralForwards)._hooks
        loss = watched.model(batch(2, 6, step=at)).sum()
        assert len(watched.engine.layer(SeveralForwards)._noted) == 1
        backward(watched, loss)


@on_ranks(2)
def test_evaluations_without_a_backward_are_not_noted_for_ever():
    watched = Watched("chunks", FULL_SHARD)
    layer = watched.engine.layer(SeveralForwards)
    with patch.object(several_forwards, "MOST", 3 * len(watched.engine.units)):  # all used once
        for at in range(5):
            watched.model(batch(2, 6, step=at))
        with torch.no_grad():
            watched.model(batch(2, 6, step=at))
        assert len(layer._noted) == 3
        assert backward(watched, *forwards(watched))[1] == 2  # as these two are not noted
    watched.model(batch(2, 6))
    with torch.no_grad():
        watched.model(batch(2, 6))
    assert len(layer._noted) == 1


@on_ranks(2)
def test_a_penalty_of_a_frozen_part_leaves_them_as_well():
    watched = Watched("chunks", FULL_SHARD, frozen=["b"])
    for at in range(4):
        losses = forwards(watched, at=at)
        x = batch(2, 6, step=at).requires_grad_()
        (slope,) = torch.autograd.grad(watched.model(x).sum(), x, create_graph=True)
        assert len(watched.engine.layer(SeveralForwards)._noted) == 3
        backward(watched, *losses, slope.pow(2).sum())


@on_ranks(2)
def test_any_use_counts():
    """Rank 0 comes to the second use of a unit in the last forward, and rank 1 to none in it."""

    def run(net, x):
        return net.head(net.b(net.a(x))).sum(), net.a(x + 1).sum()

    watched = Watched("chunks", FULL_SHARD, run=run)
    for at in range(4):
        one, other, third = (watched.model(batch(2, 6, step=at + n)) for n in range(3))
        left_out = (other[1],) if dist.get_rank() == 0 else ()
        moments, _ = backward(watched, one[0], third[0], *left_out)
        assert moments[1] == "backward of b: root a b"  # ranks differ, so all is gathered
    assert watched.at_rest()


class Experts(nn.Module):
    """Two ranks share an expert."""

    def __init__(self):
        super().__init__()
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        self.a = FSDP(Part().to(device()))
        self.expert = FSDP(Part().to(device()), process_group=pairs[dist.get_rank() // 2])

    def forward(self, x, with_expert):
        x = self.a(x)
        y = self.expert(x)
        return (y if with_expert else x).sum()


@on_ranks(4)
def test_other_ranks_may_use_another_expert_in_another_forward():
    model, agreement = FSDP(Experts()), []
    for at in range(4):
        x, first = batch(2, 6, step=at), dist.get_rank() < 2
        (model(x, first) + model(x + 1, not first)).backward()
        agreement.append(model.engine.layer(RankAgreement)._ever_diverged)
    assert agreement == [False] * 4


@every_way
@on_ranks(2)
def test_a_model_that_is_dropped_with_its_graphs_is_gone(way):
    watched = Watched(way, FULL_SHARD)
    losses = forwards(watched)
    model = ref(watched.model)
    del losses, watched
    gc.collect()
    assert model() is None
