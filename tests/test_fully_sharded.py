"""fully_sharded.py: the module that users hold, and the names that they import."""

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn

from minifsdp import FlatParameter, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from tests.parity import check_at_rest
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


def test_arguments_are_torchs_in_torchs_order():
    ours = inspect.signature(FSDP).parameters
    expected = inspect.signature(theirs.FullyShardedDataParallel).parameters
    assert list(ours) == list(expected)
    for name in expected:
        # forward_prefetch: None, which is False on GPUs; see prefetch.py.
        if name not in ("backward_prefetch", "forward_prefetch", "param_init_fn"):
            assert ours[name].default == expected[name].default, name
    assert ours["backward_prefetch"].default.name == expected["backward_prefetch"].default.name


@on_ranks(1)
def test_the_outermost_wrapper_is_the_root():
    model = stack(1)
    assert model.check_is_root() and not model[1].check_is_root()


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(RuntimeError, match="init_process_group"):
        FSDP(nn.Linear(2, 2))


@on_ranks(2)
def test_attributes_and_items_are_the_wrapped_modules():
    model = stack()
    model.module.answer = 42
    assert model.answer == 42 and model[1] is model.module[1]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense


@on_ranks(2)
def test_fsdp_modules_are_listed_outer_first():
    model = stack(2)
    assert FSDP.fsdp_modules(model) == [model, model[1], model[2]]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(nn.Linear(1, 1)) == []


@on_ranks(3)
def test_it_shards_over_the_group_it_is_given():
    pair = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        model = FSDP(layers(), process_group=pair)
        assert model._unit.shard_world_size == 2 and model._unit.shard_rank == dist.get_rank() // 2
        step(model)
        check_at_rest(model)
    step(FSDP(layers()))  # with all ranks again, of which one has made a model less


@on_ranks(2)
def test_units_of_one_model_may_differ_in_strategy():
    plain = layers(3)
    model = layers(3)
    strategies = [
        ShardingStrategy.NO_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.FULL_SHARD,
    ]
    for place, strategy in enumerate(strategies, start=1):
        model[place] = FSDP(model[place], sharding_strategy=strategy)
    model = FSDP(model)
    step(model)
    assert_same_gradients(
        gathered_gradients(model), mean_gradients(plain, plain(batch()).pow(2).sum())
    )
    check_at_rest(model)


@on_ranks(1)
def test_one_rank_is_an_ordinary_case():
    model, plain = stack(), layers()
    assert torch.equal(step(model), plain(batch()).pow(2).sum())
    assert model.engine.stats.all_gathers == 9 and model.engine.stats.reductions == 5
    check_at_rest(model)


@on_ranks(1)
def test_what_torch_puts_in_the_place_of_a_flat_parameter_is_the_units_shard():
    """module.to("meta") replaces parameters; others move them."""
    model = stack().to("meta")
    for wrapper in FSDP.fsdp_modules(model):
        assert (
            wrapper._unit.sharded_flat_param is wrapper._flat_param and wrapper._flat_param.is_meta
        )
        assert isinstance(wrapper._flat_param, FlatParameter)


@on_ranks(2)
def test_evaluation_and_inference_give_what_the_plain_model_gives():
    model, plain = stack(), layers()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model.eval()(batch()), plain.eval()(batch()))
        check_at_rest(model)
    assert torch.equal(step(model.train()), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_a_model_used_alone_may_become_part_of_a_larger_one():
    inner = stack(2)
    step(inner)
    inner(batch())  # leaves its root unsharded
    model = FSDP(nn.Sequential(inner, nn.Linear(6, 6).to(device())))
    model.zero_grad()
    step(model)
    assert [unit.name for unit in model.engine.units] == ["", "0", "0.1", "0.2"]
    check_at_rest(model)


@on_ranks(2)
def test_two_models_side_by_side_do_not_disturb_each_other():
    a, b, plain = stack(2), stack(3), layers(2)
    loss = a(batch()).pow(2).sum()
    other = b(batch()).pow(2).sum()
    (loss + other).backward()
    assert_same_gradients(gathered_gradients(a), mean_gradients(plain, plain(batch()).pow(2).sum()))
    check_at_rest(a)
    check_at_rest(b)


@on_ranks(2)
def test_autograd_hooks_do_not_pile_up_on_leaves():
    """A unit that hands its input through must not leave a hook on it in every step."""

    class Through(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model, x = FSDP(Through(6, 6).to(device())), batch().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        y, through = model(x)
        (y.sum() + through.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not x._backward_hooks
