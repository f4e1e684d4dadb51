"""unit_messages.py: what a unit's messages say of the unit, and where its blocks are."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import deadlock_watch, unit_messages
from minifsdp.comm.blocks import together
from minifsdp.comm.message_tags import Kind
from minifsdp.comm.pieces import Pieces
from minifsdp.comm.unit_messages import DirectMessages, InBlocks, Watched
from minifsdp.core.collectives import TorchCollectives
from minifsdp.rows import Rows
from tests.comm import one_unit
from tests.comm.test_deadlock_watch import alone_in_the_world
from tests.ranks import device, on_ranks

OWN, OTHER = (SimpleNamespace(size=lambda: 2, rank=lambda: 0) for _ in range(2))


class Noted:
    """Collectives that do nothing, and note what they are asked for."""

    def __init__(self):
        self.called = []

    def all_gather(self, unit, full, shard, group):
        self.called.append(("gather", full, group))
        return lambda: full.copy_(torch.cat([shard, shard + 100]))

    def reduce_scatter(self, unit, flat, scale):
        self.called.append(("reduce", flat, scale))
        return flat[: len(flat) // 2], lambda: None

    def all_reduce(self, unit, flat, scale, group):
        self.called.append(("all-reduce", flat, group))
        return lambda: None


def in_rows(group=OWN):
    """A weight of 4 rows of 2, which is trained, and a frozen bias of 2, on two ranks."""
    shapes = [torch.Size([4, 2]), torch.Size([2])]
    unit = one_unit.unit(group, 5, "'a'")
    unit.layout = Rows(shapes, [True, False], 2)
    return unit


@pytest.mark.direct
class TestDirectly:
    @pytest.mark.parametrize("group, blocks", [(OWN, True), (OTHER, False)])
    def test_blocks_are_where_the_layout_has_them_in_the_units_own_group_only(self, group, blocks):
        unit, found = in_rows(), {}

        def all_gather(full, chunk, group, tag, label, **settings):
            found.update(settings, of=(group, tag, label))

        with patch.object(unit_messages, "all_gather", all_gather):
            DirectMessages().all_gather(unit, torch.empty(0), torch.empty(0), group)
        assert found["of"] == (group, 5, "'a'")
        assert found["blocks"] == (unit.layout.blocks if blocks else None)

    def test_a_direct_reduction_is_cut_where_parameters_are(self):
        unit, found = in_rows(), {}

        def reduce_scatter(flat, group, scale, tag, label, **settings):
            found.update(settings, of=(flat, group, scale, tag, label))

        flat = Pieces([torch.empty(1)])
        with patch.object(unit_messages, "reduce_scatter", reduce_scatter):
            DirectMessages().reduce_scatter(unit, flat, 0.5)
        assert found["of"] == (flat, OWN, 0.5, 5, "'a'")
        assert found["blocks"] == unit.layout.trained_blocks != unit.layout.blocks
        assert found["sizes"] == unit.layout.sizes

    def test_blocks_come_apart_when_they_have_arrived(self):
        unit, inner = in_rows(), Noted()
        assert unit.layout.blocks == [4, 4, 1]  # of the weight, the marks and the bias
        full, shard = torch.full((18,), -1.0), torch.arange(9.0)
        finish = InBlocks(inner).all_gather(unit, full, shard, OWN)
        assert (full == -1).all(), "it is started, and not waited for"
        finish()
        assert torch.equal(together(full, unit.layout.blocks, 2), torch.cat([shard, shard + 100]))
        assert full[:8].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]

    def test_in_another_group_they_stay_end_to_end(self):
        unit, inner = in_rows(), Noted()
        full, shard = torch.empty(18), torch.arange(9.0)
        InBlocks(inner).all_gather(unit, full, shard, OTHER)()
        assert inner.called == [("gather", full, OTHER)] and inner.called[0][1] is full
        assert torch.equal(full, torch.cat([shard, shard + 100]))

    def test_of_what_is_trained_the_blocks_of_a_rank_come_together_before_a_reduction(self):
        unit, inner, flat = in_rows(), Noted(), torch.arange(16.0)
        InBlocks(inner).reduce_scatter(unit, flat, 0.5)
        (_, sent, scale) = inner.called[0]
        assert scale == 0.5
        assert sent.tolist()[:8] == [0, 1, 2, 3, 8, 9, 10, 11]
        assert flat.tolist() == list(range(16)), "a copy is sent"

    def test_a_shard_is_in_one_piece(self):
        unit, inner, flat = in_rows(), Noted(), torch.arange(12.0)
        InBlocks(inner).all_reduce(unit, flat, 0.5, OTHER)
        assert inner.called[0][1] is flat


def started(comm):
    """Each collective of ``comm``, by its kind: called, it is started, and gives ``finish``."""
    unit, group = one_unit.unit(dist.group.WORLD, 5, "'a'"), dist.group.WORLD
    full, shard = torch.empty(4, device=device()), torch.ones(2, device=device())
    return {
        Kind.PARAMETERS: lambda: comm.all_gather(unit, full, shard, group),
        Kind.REDUCTION: lambda: comm.reduce_scatter(unit, full, 0.5)[1],
        Kind.ALL_REDUCTION: lambda: comm.all_reduce(unit, full, 0.5, group),
    }


@on_ranks(2)
def test_what_is_under_way_is_known_until_it_has_been_waited_for():
    for kind, start in started(Watched(TorchCollectives())).items():
        before = set(deadlock_watch.unfinished)
        finish = start()
        (message,) = set(deadlock_watch.unfinished) - before
        assert (message.kind, message.label, message.key[1:]) == (kind, "'a'", (5, kind, 4))
        assert message.group is dist.group.WORLD
        finish()
        assert message not in deadlock_watch.unfinished and not deadlock_watch.waiting


def test_a_rank_that_waits_in_vain_says_what_for():
    said = alone_in_the_world(left)
    assert "rank 1 waited in the gather of the parameters of unit 'a'" in said[1]
    assert "lost the other ranks" in said[1]


def left():
    group = dist.group.WORLD
    deadlock_watch.watch([group])
    with patch.multiple(deadlock_watch, POLL=0.05):
        if dist.get_rank() == 0:
            dist.destroy_process_group()
            return ""
        unit = one_unit.unit(group, 5, "'a'")
        with pytest.raises(RuntimeError) as error:
            Watched(TorchCollectives()).all_gather(unit, torch.empty(4), torch.ones(2), group)()
    return str(error.value)
