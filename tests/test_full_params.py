"""full_params.py: reading and changing whole parameters between steps."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from tests.models import SharedTransformer
from tests.parity import check_at_rest
from tests.ranks import device, on_ranks
from tests.small import batch, gathered_gradients, layers, mean_gradients, stack, step

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@every_strategy
@on_ranks(3)
def test_parameters_are_whole_and_under_their_own_names(strategy):
    model, plain = stack(sharding_strategy=strategy), layers()
    with FSDP.summon_full_params(model):
        found = dict(model.named_parameters())
        expected = dict(plain.named_parameters())
        assert found.keys() == expected.keys()
        for name, param in expected.items():
            assert isinstance(found[name], nn.Parameter) and torch.equal(found[name], param)
    assert all("_flat_param" in name for name, _ in model.named_parameters())
    check_at_rest(model)


@pytest.mark.parametrize("assign", ["in place", "data", "copy"])
@every_strategy
@on_ranks(2)
def test_changes_are_kept(strategy, assign):
    model, plain, x = stack(sharding_strategy=strategy), layers(), batch()
    with FSDP.summon_full_params(model), torch.no_grad():
        weight = model.module[1].module[0].weight
        if assign == "in place":
            weight.mul_(3)
        elif assign == "data":
            weight.data = weight.data * 3
        else:
            weight.copy_(weight * 3)
    with torch.no_grad():
        plain[1][0].weight.mul_(3)
    assert torch.equal(model(x), plain(x))


@every_strategy
@on_ranks(2)
def test_a_shared_parameter_may_be_replaced_by_either_name(strategy):
    model = FSDP(SharedTransformer().to(device()), sharding_strategy=strategy)
    with FSDP.summon_full_params(model):
        assert model.module.output.weight is model.module.embed.weight
        model.module.output.weight = nn.Parameter(torch.full((23, 16), 3.0, device=device()))
    with FSDP.summon_full_params(model):
        assert (model.module.embed.weight == 3).all()


@on_ranks(2)
def test_changes_are_dropped_without_writeback():
    model, plain = stack(), layers()
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.module[1].module[0].weight.zero_()
    assert torch.equal(model(batch()), plain(batch()))


@on_ranks(2)
def test_one_unit_alone():
    model = stack()
    with FSDP.summon_full_params(model, recurse=False):
        names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["0.weight", "0.bias"] and names[2] == "1._flat_param"
    with FSDP.summon_full_params(model.module[2]):
        assert [n for n, _ in model.module[2].named_parameters()] == ["0.weight", "0.bias"]


@on_ranks(2)
def test_training_goes_on_after_it_and_after_an_exception_in_it():
    model, plain = stack(), layers()
    with pytest.raises(KeyError), FSDP.summon_full_params(model):
        raise KeyError
    check_at_rest(model)
    assert torch.equal(step(model), plain(batch()).pow(2).sum())


@on_ranks(2)
def test_it_is_refused_where_parameters_come_and_go_by_themselves():
    model = stack()

    def summon(*_):
        with FSDP.summon_full_params(model):
            pass

    handle = model.module[1].module[0].register_forward_hook(summon)
    with pytest.raises(RuntimeError, match="summon_full_params was called in a forward"):
        model(batch())
    handle.remove()
    loss = model(batch()).sum()
    handle = model.module[1].module[0].register_full_backward_hook(summon)
    loss = model(batch()).sum()
    with pytest.raises(RuntimeError, match="summon_full_params was called in a forward"):
        loss.backward()
    handle.remove()
    step(model)
    check_at_rest(model)


@on_ranks(2)
def test_a_forward_inside_is_refused_and_the_parameters_stay():
    model = stack()
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match="inside summon_full_params"):
            model(batch())
        assert torch.equal(model.module[1].module[0].weight, layers()[1][0].weight)


@on_ranks(2)
def test_a_parameter_of_another_shape_is_refused_by_name():
    model = stack()
    with pytest.raises(ValueError, match=r"'0.weight' of unit '1'"), FSDP.summon_full_params(model):
        model.module[1].module[0].weight = nn.Parameter(torch.zeros(2, device=device()))


@on_ranks(2)
def test_blocks_may_lie_in_blocks():
    model, plain = stack(), layers()
    inner = model.module[2]
    with FSDP.summon_full_params(model, recurse=False):
        with FSDP.summon_full_params(inner):
            assert [n for n, _ in inner.named_parameters()] == ["0.weight", "0.bias"]
            inner.module[0].weight.data.fill_(2)
        assert [n for n, _ in inner.named_parameters()] == ["_flat_param"]
        with FSDP.summon_full_params(model):
            found = {name: param.clone() for name, param in model.named_parameters()}
        assert [n for n, _ in model.named_parameters()][:3] == [
            "0.weight",
            "0.bias",
            "1._flat_param",
        ]
    plain[2][0].weight.data.fill_(2)
    assert found.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
    check_at_rest(model)
    step(model)


@every_strategy
@on_ranks(2)
def test_in_the_hosts_memory_the_device_holds_one_unit_at_a_time(strategy):
    """And changes are kept all the same."""
    model, plain = stack(sharding_strategy=strategy), layers()
    with FSDP.summon_full_params(model, offload_to_cpu=True):
        assert model.engine.stats.unsharded_units == 0
        for param in model.parameters():
            assert param.device.type == "cpu"
            param.data.mul_(2)
    for param in plain.parameters():
        param.data.mul_(2)
    assert torch.equal(model(batch()), plain(batch()))


@every_strategy
@on_ranks(3)
def test_rank_0_alone(strategy):
    model, plain = stack(sharding_strategy=strategy), layers()
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        names = [name for name, _ in model.named_parameters()]
        first = dist.get_rank() == 0
        assert names == ([n for n, _ in plain.named_parameters()] if first else flat_names(model))
        assert first or model.engine.stats.unsharded_units == 0
    check_at_rest(model)
    with (
        pytest.raises(ValueError, match=r"rank0_only=True.* needs writeback=False"),
        FSDP.summon_full_params(model, rank0_only=True),
    ):
        pass


def flat_names(model):
    return ["_flat_param", *(f"{unit.name}._flat_param" for unit in model.engine.units[1:])]


@pytest.mark.parametrize("offload_to_cpu", [False, True])
@every_strategy
@on_ranks(2)
def test_with_their_gradients_which_may_be_changed(strategy, offload_to_cpu):
    model, plain = stack(sharding_strategy=strategy), layers()
    step(model)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=offload_to_cpu):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.to(device()), expected[name])
            if name == "0.weight":
                param.grad.mul_(2)
            elif name == "0.bias":
                param.grad = None
            elif name == "1.0.weight":
                param.grad = param.grad * 3
    factors = {"0.weight": 2, "0.bias": 0, "1.0.weight": 3}
    for name, grad in gathered_gradients(model).items():
        torch.testing.assert_close(grad, expected[name] * factors.get(name, 1))


@on_ranks(2)
def test_gradients_that_still_wait_are_not_shown():
    model = stack()
    with model.no_sync():
        step(model)
    with (
        pytest.raises(RuntimeError, match=r"unit <root> has gradients from no_sync\(\)"),
        FSDP.summon_full_params(model, with_grads=True),
    ):
        pass
    check_at_rest(model)


@on_ranks(2)
def test_they_are_exact_whatever_is_computed_with():
    plain, precision = layers(), MixedPrecision(param_dtype=torch.bfloat16)
    model = stack(mixed_precision=precision, cpu_offload=CPUOffload(offload_params=True))
    step(model)
    with FSDP.summon_full_params(model):
        for (_, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert found.dtype is torch.float32 and torch.equal(found, expected)
    assert model(batch()).dtype is torch.bfloat16


@on_ranks(2)
def test_apply_sees_whole_parameters_and_inner_modules_first():
    model, plain, seen = stack(2), layers(2), []

    def double(module):
        if isinstance(module, nn.Linear):
            seen.append(module.weight.shape)
            module.weight.data.mul_(2)
        elif isinstance(module, nn.Sequential):
            seen.append(type(module).__name__)

    assert model.apply(double) is model
    assert seen == [(6, 6), (6, 6), "Block", (6, 6), "Block", "Sequential"]
    plain.apply(double)
    assert torch.equal(model(batch()), plain(batch()))
