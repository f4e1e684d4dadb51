"""param_attributes.py: what a program has set on its parameters is there after wrapping, or it is
told that it is not."""

import warnings

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp.chunks.param_attributes import (
    attributes_of,
    common_attributes,
    warn_of_lost_attributes,
)
from minifsdp.support.param_access import ParamInfo
from tests.ranks import device, on_ranks
from tests.small import Block, batch

WORDS = (
    r"differ in attributes .*'no_decay' \('bias' has True, 'weight' has none\).*"
    r"use_orig_params=True"
)


def marked(on=None):
    """Linear layers without weight decay for the biases, as programs mark them."""
    torch.manual_seed(0)
    with torch.device(on or device()):
        model = nn.Sequential(*(nn.Sequential(Block(nn.Linear(6, 6))) for _ in range(3)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias.no_decay = True
            for param in module.parameters():
                param.lr_scale = 2.0
                param._is_hf_initialized = True
    return model


def groups(model):
    decayed, others = [], []
    for param in model.parameters():
        (others if getattr(param, "no_decay", False) else decayed).append(param)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def check(model):
    for name, param in model.named_parameters():
        assert hasattr(param, "no_decay") == ("bias" in name) and param.lr_scale == 2


def infos(**attributes):
    shape = torch.Size((2,))
    return [ParamInfo(name, shape, attributes=its) for name, its in attributes.items()]


@pytest.mark.direct
class TestDirectly:
    def test_what_torch_and_others_set_is_left_out(self):
        param = nn.Parameter(torch.zeros(2))
        param._is_hf_initialized = param._dynamo_static_input_type = True
        assert attributes_of(param) == {}
        param._no_weight_decay, param.lr_scale = True, 0.5
        assert attributes_of(param) == {"_no_weight_decay": True, "lr_scale": 0.5}

    def test_a_flat_parameter_has_what_all_have(self):
        one = {"a": 1, "b": torch.ones(2), "c": 1}
        other = {"a": 1, "b": torch.ones(2), "c": 2, "d": 3}
        assert common_attributes(infos(x=one, y=other)) == {"a": 1}
        assert common_attributes(infos(x=other, y=one)) == {"a": 1}
        assert common_attributes(infos(x=one, y={})) == common_attributes([]) == {}
        assert common_attributes(infos(x=one, y={"b": one["b"]})) == {"b": one["b"]}

    def test_the_warning_names_an_attribute_and_two_that_differ(self):
        with pytest.warns(UserWarning, match=r"'s' \('y' has 1, 'x' has none\); 't' \('y' has 2"):
            warn_of_lost_attributes(infos(x={}, y={"s": 1, "t": 2}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_lost_attributes(infos(x={"s": 1}, y={"s": 1}))


@pytest.mark.parametrize("on", [None, "meta"])
@pytest.mark.parametrize("wrap", ["rows", "fully_shard"])
@on_ranks(2)
def test_in_rows_each_parameter_keeps_its_own(wrap, on):
    model = marked(on)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if wrap == "rows":
            model = FSDP(model, use_orig_params=True)
        else:
            model = fully_shard(model)
            model.to_empty(device=device()) if on else None
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        check(model)
        model(batch().to(dtype)).sum().backward()
        check(model)


@on_ranks(2)
def test_groups_by_an_attribute_are_those_of_a_plain_model():
    expected = [len(group["params"]) for group in groups(marked())]
    model = FSDP(marked(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    assert [len(group["params"]) for group in groups(model)] == expected == [3, 3]
    assert all(p.lr_scale == 2 for p in model.parameters())


@on_ranks(2)
def test_in_chunks_a_program_is_told_once():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        model = FSDP(marked(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert len(found) == 1 and "'no_decay' ('0.bias' has True, '0.weight' has none)" in str(
        found[0].message
    )
    assert all(p.lr_scale == 2 and not hasattr(p, "no_decay") for p in model.parameters())
    model.double()
    model(batch().double())
    assert all(p.lr_scale == 2 for p in model.parameters()), "also after it was moved"
    with FSDP.summon_full_params(model):
        assert [hasattr(p, "no_decay") for p in model.parameters()] == [False, True] * 3


@on_ranks(2)
def test_a_unit_of_one_kind_keeps_what_its_parameters_have():
    model = marked()
    for param in model[1].parameters():
        param.no_decay = param.is_sharded = True  # the second is a name of ours
    model[1] = FSDP(model[1], sharding_strategy=ShardingStrategy.NO_SHARD)
    assert [(p.no_decay, p.is_sharded) for p in model[1].parameters()] == [(True, False)]
