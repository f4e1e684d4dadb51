"""grad_hooks.py: hooks on flat parameters are called, when and with what it says."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.between_steps import idle
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

every_strategy = pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
)


@every_strategy
@on_ranks(3)
def test_a_tensor_hook_gets_this_ranks_gradient_of_the_whole_unit(strategy):
    model, seen = stack(2, width=4, sharding_strategy=strategy), {}
    for unit in model.engine.units:
        hook = lambda grad, unit=unit: seen.__setitem__(unit.name, grad.clone())  # noqa: E731
        unit.sharded_flat_param.register_hook(hook)
    model(batch(4)).pow(2).sum().backward()
    plain = layers(2, width=4)
    plain(batch(4)).pow(2).sum().backward()
    for unit in model.engine.units:
        prefix = f"{unit.name}." if unit.name else ""
        own = [plain.get_parameter(prefix + info.name) for info in unit.param_infos]
        expected = torch.cat([param.grad.reshape(-1) for param in own])
        torch.testing.assert_close(seen[unit.name], expected)  # and nothing of the padding


@pytest.mark.parametrize("in_rows", [False, True])
@every_strategy
@on_ranks(2)
def test_what_it_returns_is_reduced_and_the_next_one_gets_it(strategy, in_rows):
    model = stack(2, sharding_strategy=strategy, use_orig_params=in_rows)
    for param in model.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        param.register_hook(lambda grad: grad * (4 if dist.get_rank() else 0))
    step(model)
    found = gathered_gradients(model)
    plain = layers(2)
    for param in plain.parameters():
        param.register_hook(lambda grad: grad.clamp(-0.01, 0.01) * (4 if dist.get_rank() else 0))
    assert_same_gradients(found, mean_gradients(plain, plain(batch()).pow(2).sum()))


@on_ranks(2)
def test_a_hook_that_is_removed_is_not_called():
    model = stack(1)
    for param in model.parameters():
        param.register_hook(lambda grad: 1 / 0).remove()
        param.register_post_accumulate_grad_hook(lambda param: 1 / 0).remove()
    step(model)


@on_ranks(2)
def test_a_hook_may_remove_itself_and_be_called_once():
    model, called = stack(1), []

    def once(register):
        handle = register(lambda _: called.append(register.__name__) or handle.remove())

    for shard in model.parameters():
        for register in (shard.register_hook, shard.register_post_accumulate_grad_hook):
            once(register)
            once(register)
    for at in range(2):
        step(model, at)
        assert called.count("register_hook") == len(called) // 2 == 4


@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name():
    model = stack(1)
    model.engine.units[1].sharded_flat_param.register_hook(lambda grad: grad[:-1])
    words = r"(?s)flat parameter of unit '1' failed.*of 42 elements"
    with pytest.raises(RuntimeError, match=words):
        step(model)


@every_strategy
@on_ranks(2)
def test_a_hook_after_accumulation_finds_every_gradient_reduced(strategy):
    model, seen = stack(2, sharding_strategy=strategy), []

    def hook(param):
        assert not torch.is_grad_enabled()
        seen.append((param, [p.grad.clone() for p in model.parameters()]))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    for at in range(2):  # the second one adds to the first
        seen.clear()
        step(model, at)
        params = list(model.parameters())
        assert len(seen) == 3 and {id(param) for param, _ in seen} == set(map(id, params))
        for _, found in seen:
            assert all(torch.equal(a, p.grad) for a, p in zip(found, params, strict=True))


@on_ranks(2)
def test_it_is_not_called_for_units_without_a_gradient_or_while_gradients_wait():
    model, seen = stack(2), []
    for unit in model.engine.units:
        unit.sharded_flat_param.register_post_accumulate_grad_hook(
            lambda _, unit=unit: seen.append(unit.name)
        )
    with model.no_sync():
        step(model)
    assert not seen
    step(model)
    assert sorted(seen) == ["", "1", "2"]
    seen.clear()
    outputs = []
    model.module[1].register_forward_hook(lambda m, a, output: outputs.append(output))
    model(batch())
    outputs[0].sum().backward()
    assert sorted(seen) == ["", "1"]


@on_ranks(2)
def test_after_one_that_raises_every_gradient_is_there_and_the_next_step_is_right():
    model, plain = stack(2), layers(2)

    def hook(param):
        raise KeyError

    handle = next(iter(model.parameters())).register_post_accumulate_grad_hook(hook)
    with pytest.raises(KeyError):
        step(model)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)
    handle.remove()
    model.zero_grad()
    step(model)
    assert_same_gradients(gathered_gradients(model), expected)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@on_ranks(3)
def test_in_rows_hooks_are_those_of_each_parameter(strategy):
    model, plain = stack(1, 7, sharding_strategy=strategy, use_orig_params=True), layers(1, 7)
    before, after = {}, {}
    frozen = model.get_parameter("1.0.bias")
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: before.__setitem__(name, grad.clone()))
        hook = lambda param, name=name: after.__setitem__(name, param.grad.full_tensor())  # noqa: E731
        param.register_post_accumulate_grad_hook(hook)
    frozen.requires_grad_(False)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    model(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    own = {name: param.grad.clone() for name, param in plain.named_parameters()}
    mean = mean_gradients(plain, plain(x).pow(2).sum())
    assert before.keys() == after.keys() == own.keys() - {"1.0.bias"}
    for name in before:
        torch.testing.assert_close(before[name], own[name])  # of its shape, without padding
        torch.testing.assert_close(after[name], mean[name])


@on_ranks(2)
def test_torchs_optimizers_in_the_backward_step_and_clear():
    model = stack(1)
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param._in_backward_optimizers = [torch.optim.SGD([param], lr=0.1)]
    step(model)
    assert all(param.grad is None for param in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_gradients_of_gradients_are_refused_by_name():
    model = stack()
    with pytest.raises(RuntimeError, match="unit '4': gradients of gradients"):
        model(batch()).pow(2).sum().backward(create_graph=True)
    model.zero_grad()
    step(model)
    check_at_rest(model)


@on_ranks(2)
def test_in_rows_hooks_of_what_has_no_new_gradient_are_not_called():
    model, called = FSDP(Partial().to(device()), use_orig_params=True), []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: called.append(name))
    step(model)
    assert sorted(called) == ["frozen_later", "used"]
    model.module.frozen_later.requires_grad_(False)  # its gradient from before stays
    called.clear()
    step(model)
    assert called == ["used"] and model.module.frozen_later.grad is not None


class Partial(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("used", "unused", "frozen_later"):
            setattr(self, name, nn.Parameter(torch.ones(6)))

    def forward(self, x):
        return x * self.used * self.frozen_later


@on_ranks(2)
def test_hooks_of_a_backward_that_failed_at_its_end_are_not_called_by_the_next_forward():
    model, called = stack(2), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: called.append(param))
    loss = model(batch()).pow(2).sum()
    with (
        patch.object(idle, "wait_for_readers", side_effect=ConnectionError("lost")),
        pytest.raises(ConnectionError),
    ):
        loss.backward()
    model(batch())
    assert not called
    step(model)
    assert len(called) == len(list(model.parameters()))
