"""full_params.py: reading and changing whole parameters between steps."""

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from tests.models import SharedTransformer
from tests.parity import check_at_rest
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step

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
    with pytest.raises(RuntimeError, match="another"), FSDP.summon_full_params(model):
        summon()
    check_at_rest(model)
    step(model)


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
