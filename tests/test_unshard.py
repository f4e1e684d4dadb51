"""unshard.py: gather a unit's parameters."""

from datetime import timedelta

import torch
import torch.distributed as dist

from minifsdp import ShardingStrategy
from minifsdp.unit import Memory
from minifsdp.unshard import unshard, wait_for_unshard
from tests.ranks import on_ranks
from tests.small import batch, layers, stack, storage


def prepared():
    model = stack()
    model.engine.start()
    return model, model.engine.units[1], model.engine.streams


@on_ranks(3)
def test_every_rank_has_all_parameters_in_order():
    _, unit, streams = prepared()
    unshard(unit, streams)
    wait_for_unshard(unit)
    unit.make_views()
    unit.expose()
    expected = layers()[1][0]
    assert torch.equal(unit.views[0], expected.weight) and torch.equal(unit.views[1], expected.bias)
    assert unit.slots[0].owners[0][0].weight is unit.views[0]


@on_ranks(2)
def test_it_comes_in_two_halves():
    _, unit, streams = prepared()
    assert storage(unit) == 0 and unit.memory is Memory.SHARDED
    unshard(unit, streams)
    assert unit.memory is Memory.GATHERING and unit.gathered is not None
    assert storage(unit) == unit.full_bytes == 4 * 42
    wait_for_unshard(unit)
    assert unit.memory is Memory.UNSHARDED and unit.gathered is None
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
        store.wait([key], timedelta(seconds=20))
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
    halves = unit.buffer.view(2, -1)
    assert (halves[0] == 1).all() and (halves[1][:21] == 2).all()


@on_ranks(2)
def test_a_unit_that_is_not_sharded_computes_with_its_shard():
    model = stack(sharding_strategy=ShardingStrategy.NO_SHARD)
    model(batch())
    for unit in model.engine.units:
        assert unit.full.data_ptr() == unit.shard.data_ptr() and not unit.sharded
    assert model.engine.stats.all_gathers == 0
