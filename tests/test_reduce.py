"""reduce.py: turn a unit's gradient into this rank's share of the mean over ranks."""

import pytest
import torch
import torch.distributed as dist

from minifsdp import ShardingStrategy
from minifsdp.reduce import reduce_gradient, store_gradient
from tests.ranks import device, on_ranks
from tests.small import (
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
)

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_the_gradient_is_the_mean_over_ranks(strategy):
    model, plain = stack(sharding_strategy=strategy), layers()
    step(model)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)


@on_ranks(2)
def test_each_rank_keeps_its_own_part():
    model = stack()
    model.engine.start()
    unit = model.engine.units[1]
    grad = torch.arange(42.0, device=device()) * (dist.get_rank() + 1)
    reduction = reduce_gradient(unit, grad, model.engine.streams)
    reduction.event.wait()
    expected = (torch.arange(42.0, device=device()) * 1.5).chunk(2)[dist.get_rank()]
    assert torch.equal(reduction.result, expected)


@on_ranks(2)
def test_the_result_does_not_keep_the_whole_gradient_alive():
    model = stack()
    step(model)
    for unit in model.engine.units:
        assert unit.shard.grad.untyped_storage().size() == unit.chunk.nbytes


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_add_up_until_they_are_cleared(strategy):
    model, plain = stack(sharding_strategy=strategy), layers()
    for at in range(3):
        step(model, at)
    losses = [plain(batch(step=at)).pow(2).sum() for at in range(3)]
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *losses))


@on_ranks(2)
def test_a_result_is_stored_without_copying_it():
    model = stack()
    model.engine.start()
    unit = model.engine.units[1]
    reduction = reduce_gradient(unit, torch.ones(42, device=device()), model.engine.streams)
    reduction.event.wait()
    store_gradient(reduction)
    assert unit.shard.grad.data_ptr() == reduction.result.data_ptr()


@on_ranks(2)
def test_a_reduction_goes_on_while_the_backward_does():
    """Counted, not timed: when unit 4's gradient is on its way, unit 3's backward still
    computes."""
    model, open_when = stack(), []

    def note(*_):
        open_when.append(any(not r.event.query() for r in model.engine._reductions))

    model.module[1].module[0].register_full_backward_hook(note)
    step(model)
    if device().type == "cuda":
        pytest.skip("the host does not see how far a GPU has come")
    assert open_when == [True]
