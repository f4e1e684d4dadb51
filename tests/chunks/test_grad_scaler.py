"""grad_scaler.py: all ranks skip a step, or none."""

import math

import pytest
import torch
import torch.distributed as dist

from minifsdp import CPUOffload, MixedPrecision, ShardedGradScaler, ShardingStrategy
from tests.ranks import device, on_ranks
from tests.small import batch, stack

SETTINGS = {
    "fp32": {},
    "kept low": {
        "mixed_precision": MixedPrecision(
            param_dtype=torch.float16, keep_low_precision_grads=True, cast_forward_inputs=True
        )
    },
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
}


def make(setting="fp32", fused=False, **how):
    model = stack(2, **SETTINGS[setting])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **({"fused": True} if fused else {}))
    return model, optimizer, ShardedGradScaler(device().type, init_scale=64.0, **how)


def scaled_backward(model, scaler, step=0):
    scaler.scale(model(batch(step=step)).float().pow(2).sum()).backward()


def grads(model):
    return [param.grad.clone() for param in model.parameters()]


def overflow(model, value, rank=1):
    if dist.get_rank() == rank:
        next(iter(model.parameters())).grad[0] = value


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_gradients_are_divided_by_the_scale(setting):
    model, optimizer, scaler = make(setting)
    scaled_backward(model, scaler)
    before = grads(model)
    scaler.unscale_(optimizer)
    assert all(torch.equal(a, b / 64) for a, b in zip(grads(model), before, strict=True))
    assert any(grad.any() for grad in before)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("setting", ["fp32", "offload"])
@on_ranks(2)
def test_what_one_rank_finds_all_know(setting, fused, value):
    check_all_know(setting, fused, value)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2, pretended_gpu=True)
def test_what_the_host_reads_of_the_gpu_has_arrived(fused):
    """The scale is on the GPU and the gradients are not. torch would read the scale, and a fused
    optimizer whether to skip its step, before the host has them."""
    check_all_know("offload", fused, math.inf)


def check_all_know(setting, fused, value):
    model, optimizer, scaler = make(setting, fused)
    for rank in range(2):
        scaled_backward(model, scaler)
        before = [param.detach().clone() for param in model.parameters()]
        overflow(model, value, rank)
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert scaler.get_scale() == 64 / 2 ** (rank + 1)
        optimizer.zero_grad()
    scaled_backward(model, scaler)
    scaler.step(optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused  # as torch has set it


@on_ranks(2)
def test_the_arguments_are_torchs():
    _, _, scaler = make(growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    assert scaler.get_growth_factor() == 4.0 and scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    positional = ShardedGradScaler(device().type, 2.0, 0.3, 3.0, 5, True, dist.group.WORLD)
    assert positional.get_backoff_factor() == 0.3 and positional.get_growth_factor() == 3.0


@on_ranks(2)
def test_several_optimizers_skip_each_by_itself():
    model, _, scaler = make()
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    scaled_backward(model, scaler)
    before = [param.detach().clone() for param in model.parameters()]
    overflow(model, math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    stayed = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert stayed == [True, False, False] and scaler.get_scale() == 32


@on_ranks(2)
def test_a_rank_without_gradients_is_told_too():
    model, optimizer, scaler = make()
    scaled_backward(model, scaler)
    if dist.get_rank() == 0:
        optimizer.zero_grad()
    overflow(model, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32


@on_ranks(3)
def test_only_ranks_of_the_group_talk():
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        model = stack(1, process_group=pair)
        scaler = ShardedGradScaler(device().type, init_scale=64.0, process_group=pair)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaled_backward(model, scaler)
        overflow(model, math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 32
