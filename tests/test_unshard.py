"""unshard.py: gather a unit's parameters."""

import itertools
import weakref
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.core.unit_state import Purpose, ShardedState
from minifsdp.core.unshard import OwnShard, unshard, wait_for_unshard
from minifsdp.core.views import make_views, show_views
from minifsdp.offload import Upload
from minifsdp.sim import cluster
from minifsdp.sim.tape import Op
from minifsdp.support.unsharded_storage import FeaturedFlatParam
from tests.lagging import deferring_device
from tests.lone_unit import Group, lone_unit
from tests.parity import check_at_rest
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step, storage, travels

OFFLOADS = {"": None, "offload": CPUOffload(True)}
PRECISIONS = {"": None, "bf16": MixedPrecision(torch.bfloat16)}


@pytest.mark.direct
class TestDirectly:
    def test_unshard_starts_the_gather_and_does_not_wait_for_it(self):
        with lone_unit() as lone:
            unshard(lone.unit, lone.streams)
            assert lone.unit.state.sharded is ShardedState.UNSHARDING
            assert lone.unit.shard_group.called == ["all-gather"], "one all-gather is started"
            event = lone.unit.unshard_event
            assert event is not None, "wait_for_unshard needs unit.unshard_event"
            assert not event.query(), "what lies between start and wait hides the network's time"

    @pytest.mark.parametrize("rank", range(3))
    def test_after_the_wait_every_rank_has_all_chunks_in_order(self, rank):
        with lone_unit(rank, ranks=3) as lone:
            unshard(lone.unit, lone.streams)
            wait_for_unshard(lone.unit)
            assert lone.gathered == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
            assert lone.unit.state.sharded is ShardedState.UNSHARDED
            assert lone.unit.unshard_event is None, "it would be waited for twice"

    def test_a_unit_that_is_there_already_is_not_waited_for(self):
        with lone_unit() as lone:
            wait_for_unshard(lone.unit)
            assert lone.unit.state.sharded is ShardedState.SHARDED, "nothing was gathered"
            lone.fill()
            wait_for_unshard(lone.unit)
            assert lone.unit.state.sharded is ShardedState.UNSHARDED

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
    def test_on_its_way_a_chunk_is_cast_and_uploaded(self, offload, ranks):
        with lone_unit(ranks=ranks, precision=PRECISIONS["bf16"], offload=offload) as lone:
            unshard(lone.unit, lone.streams)
            wait_for_unshard(lone.unit)
            assert lone.unit.unsharded.data.dtype is torch.bfloat16
            assert lone.gathered == list(range(1, 11))

    def test_a_unit_sends_its_shard_as_it_is_stored(self):
        with lone_unit() as lone:
            source = OwnShard(lone.unit.shard_group)
            source.prepare(lone.unit, lone.streams)
            assert source.tensor(lone.unit, lone.streams) is lone.unit.padded_shard
            assert source.group is lone.unit.shard_group

    def test_a_source_is_prepared_and_then_asked_what_to_send_and_to_whom(self):
        with lone_unit() as lone:
            lone.unit.source = source = Noted(Group(1, 2), torch.tensor([6.0, 7, 8, 9, 10]))
            unshard(lone.unit, lone.streams)
            assert source.called == ["prepare", "tensor"], "prepare() comes before the launch"
            wait_for_unshard(lone.unit)
            assert source.group.called == ["all-gather"], "the source says among whom"
            assert lone.unit.shard_group.called == []
            assert lone.gathered == list(range(1, 11))

    def test_where_there_is_nobody_to_gather_from_what_it_would_send_is_copied(self):
        with lone_unit() as lone:
            lone.unit.source = Noted(None, torch.arange(10.0, 20))
            unshard(lone.unit, lone.streams)
            wait_for_unshard(lone.unit)
            assert lone.gathered == list(range(10, 20))
            assert lone.unit.shard_group.called == []

    def test_without_memory_to_gather_into_no_copy_stays(self):
        with lone_unit(offload=True) as lone:
            lone.unit.source = source = Noted(lone.unit.shard_group, Upload(lone.unit.source))
            with patch.object(lone.unit.unsharded, "allocate", Mock(side_effect=MemoryError)):
                try:
                    unshard(lone.unit, lone.streams)
                except MemoryError as error:
                    error.__traceback__ = None  # its frames refer to the copy
                else:
                    pytest.fail("no error")
            assert source.sent is not None and source.sent() is None
            assert lone.unit.state.sharded is ShardedState.UNSHARDING, "reshard() frees the rest"


class Noted:
    """A source that sends a tensor, or what another one sends, and notes its calls."""

    def __init__(self, group, sends):
        self.group, self.sends, self.called, self.sent = group, sends, [], None

    def prepare(self, unit, streams):
        self.called.append("prepare")
        if not isinstance(self.sends, torch.Tensor):
            self.sends.prepare(unit, streams)

    def tensor(self, unit, streams):
        self.called.append("tensor")
        if isinstance(self.sends, torch.Tensor):
            return self.sends
        sent = self.sends.tensor(unit, streams)
        self.sent = weakref.ref(sent)
        return sent


def prepared(**settings):
    model = stack(**settings)
    model.engine.start(Purpose.TRAIN)
    return model, model.engine.units[1], model.engine.streams


def check_views(offload, precision):
    _, unit, streams = prepared(cpu_offload=offload, mixed_precision=precision)
    unshard(unit, streams)
    wait_for_unshard(unit)
    make_views(unit)
    show_views(unit)
    assert (
        storage(unit) == unit.layout.padded_numel * unit.unsharded.dtype.itemsize
    )  # room for what comes, no more
    expected = layers()[1][0].to(unit.unsharded.dtype)
    assert torch.equal(unit.views[0], expected.weight) and torch.equal(unit.views[1], expected.bias)
    assert unit.param_infos[0].owners[0][0].weight is unit.views[0]


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(3)
def test_every_rank_has_all_parameters_in_order(precision, offload):
    check_views(OFFLOADS[offload], PRECISIONS[precision])


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(2)
def test_they_are_there_however_late_uploads_and_gathers_are(precision, offload):
    if device().type == "cuda":
        pytest.skip("the streams are placeholders")
    with deferring_device():
        check_views(OFFLOADS[offload], PRECISIONS[precision])


@on_ranks(2)
def test_it_comes_in_two_halves():
    _, unit, streams = prepared()
    assert storage(unit) == 0 and unit.state.sharded is ShardedState.SHARDED
    unshard(unit, streams)
    assert unit.state.sharded is ShardedState.UNSHARDING and unit.unshard_event is not None
    assert storage(unit) == unit.unsharded.nbytes == 4 * 42
    wait_for_unshard(unit)
    assert unit.state.sharded is ShardedState.UNSHARDED and unit.unshard_event is None
    wait_for_unshard(unit)  # harmless
    dist.barrier()


@on_ranks(2)
def test_the_first_half_does_not_wait_for_the_other_rank():
    """Rank 0's gather stays open until rank 0, which computes meanwhile, lets rank 1 join in."""
    _, unit, streams = prepared()
    store, key = dist.distributed_c10d._get_default_store(), "rank 0 has computed, not waited"
    store.delete_key(key)
    dist.barrier()
    if dist.get_rank() == 0:
        unshard(unit, streams)
        products = [batch() @ batch().t() for _ in range(10)]
        store.set(key, str(len(products)))
    else:
        store.wait([key], timedelta(minutes=2))
        unshard(unit, streams)
    wait_for_unshard(unit)


@on_ranks(2)
def test_what_is_sent_is_what_the_optimizer_wrote():
    model = stack()
    model(batch())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(dist.get_rank() + 1)
    model(batch())
    unit = model.engine.root  # it stays unsharded after the forward
    halves = unit.unsharded.data.view(2, -1)
    assert (halves[0] == 1).all() and (halves[1][:21] == 2).all()


@on_ranks(2)
def test_a_unit_that_is_not_sharded_computes_with_its_shard():
    model = stack(sharding_strategy=ShardingStrategy.NO_SHARD)
    model(batch())
    for unit in model.engine.units:
        assert (
            unit.unsharded.flat_param.data_ptr() == unit.sharded_flat_param.data_ptr()
            and not unit.unsharded.needs_unshard
        )
    assert model.engine.stats.all_gathers == 0


@pytest.mark.parametrize("offload, precision", [("", "bf16"), ("offload", ""), ("offload", "bf16")])
@on_ranks(2)
def test_a_unit_that_is_not_sharded_may_need_a_cast_or_an_upload_but_no_gather(offload, precision):
    with travels("all_gather", lambda _: Mock(side_effect=AssertionError("a gather"))):
        _, unit, streams = prepared(
            sharding_strategy=ShardingStrategy.NO_SHARD,
            cpu_offload=OFFLOADS[offload],
            mixed_precision=PRECISIONS[precision],
        )
        assert unit.unsharded.needs_unshard and storage(unit) == 0
        unshard(unit, streams)
        wait_for_unshard(unit)
    expected = layers()[1][0].weight.to(unit.unsharded.dtype)
    assert torch.equal(unit.unsharded.flat_param[:36], expected.flatten())
    assert unit.unsharded.flat_param.data_ptr() != unit.sharded_flat_param.data_ptr()


FAILING = {
    "the upload": (Upload, "prepare"),
    "the source": (Upload, "tensor"),
    "memory": (FeaturedFlatParam, "allocate"),
    "the gather": (None, "all_gather"),  # of whatever is the unit's ``comm``
}


@pytest.mark.parametrize("what", FAILING)
@on_ranks(2)
def test_what_fails_leaves_nothing(what):
    model = stack(cpu_offload=CPUOffload(True))
    step(model)
    owner, name = FAILING[what]
    owner = owner or type(model.engine.root.comm)
    calls, as_it_is = itertools.count(), getattr(owner, name)

    def fails(*args):
        if next(calls) == 2:  # there is a root around this one, which a limiter does not count
            raise MemoryError
        return as_it_is(*args)

    with patch.object(owner, name, fails), pytest.raises(MemoryError):
        step(model)
    check_at_rest(model)
    step(model)
    assert model.engine.stats.declined_prefetches == 0  # the limiter knows that it is gone


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", ShardingStrategy.__members__)
def test_a_gather_waits_for_what_it_reads_and_the_computation_for_it(strategy, offload):
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(
            sharding_strategy=ShardingStrategy[strategy],
            cpu_offload=OFFLOADS[offload],
            mixed_precision=PRECISIONS["bf16"],
            forward_prefetch=True,
        )
        for at in range(2):
            step(model, at)
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad)
    assert not gpu.races()


@pytest.mark.parametrize("offload", OFFLOADS)
def test_memory_to_gather_into_is_the_unshard_streams_own(offload):
    """Else the gather would have to wait for whatever the compute stream is still doing."""
    with cluster(kind="cpu") as gpu:
        _, unit, streams = prepared(
            cpu_offload=OFFLOADS[offload], mixed_precision=PRECISIONS["bf16"]
        )
        gpu.tape.clear()
        unshard(unit, streams)
        assert gpu.buffer(unit.unsharded.data).owner == "unshard"
    ops = [op for op in gpu.tape if isinstance(op, Op) and op.stream == "unshard"]
    assert ops and not any(b.owner == "host" for op in ops for b in (*op.reads, *op.writes))
