"""torch_names.py: torch's own objects mean what minifsdp's of the same names mean."""

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_wrap
from torch import nn

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.limiter import NoLimit
from minifsdp.wrapping.auto_wrap import select
from minifsdp.wrapping.torch_names import from_torch
from tests.ranks import device, on_ranks
from tests.small import Block, layers, step


@pytest.mark.parametrize(
    "member", [*theirs.ShardingStrategy, *theirs.BackwardPrefetch], ids=lambda member: str(member)
)
def test_an_enum_member_is_ours_of_the_same_name(member):
    ours = from_torch(member)
    assert ours is getattr(minifsdp, type(member).__name__)[member.name]
    assert from_torch(ours) is ours


@dataclass
class Mine(theirs.MixedPrecision):
    """A subclass with defaults of its own, as libraries make them."""

    param_dtype: torch.dtype | None = torch.bfloat16


RECORDS = {
    "default": theirs.MixedPrecision(),
    "all": theirs.MixedPrecision(
        torch.float16, torch.float32, torch.bfloat16, True, True, False, (nn.LayerNorm, nn.Linear)
    ),
    "subclass": Mine(),
    "offload": theirs.CPUOffload(offload_params=True),
    "no offload": theirs.CPUOffload(),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_ours_with_the_same_fields(name):
    record, ours = RECORDS[name], from_torch(RECORDS[name])
    assert type(ours) is (
        minifsdp.CPUOffload if "offload" in name else minifsdp.MixedPrecision
    ) and from_torch(ours) is ours  # fmt: skip
    for field in fields(record):
        assert getattr(ours, field.name) == getattr(record, field.name), field.name


def test_a_word_that_only_a_newer_torch_has_is_refused_unless_it_asks_for_nothing():
    module = {"__module__": "torch.distributed.fsdp.api"}
    newer = dataclass(
        type("CPUOffload", (), {**module, "__annotations__": {"pin": bool}, "pin": False})
    )
    assert from_torch(newer()) == minifsdp.CPUOffload()
    with pytest.raises(TypeError, match=r"CPUOffload has no pin, .*Leave it at its default, False"):
        from_torch(newer(pin=True))
    strategies = Enum("ShardingStrategy", ["QUARTER_SHARD"], module=module["__module__"])
    with pytest.raises(TypeError, match=r"minifsdp\.ShardingStrategy has no QUARTER_SHARD"):
        from_torch(strategies.QUARTER_SHARD)


def test_whatever_is_none_of_torchs_words_stays_as_it_is():
    for given in (None, True, "FULL_SHARD", print, {Block}, Block, theirs.StateDictType, 3):
        assert from_torch(given) is given
    policy = minifsdp.ModuleWrapPolicy({Block})
    assert from_torch(policy) is policy


def is_block(module):
    return isinstance(module, Block)


POLICIES = {
    "classes": lambda m: m.ModuleWrapPolicy({Block}),
    "custom": lambda m: m.CustomPolicy(is_block),
    "settings": lambda m: m.CustomPolicy(lambda module: {"x": 1} if is_block(module) else {}),
    "lambda": lambda m: partial(m.lambda_auto_wrap_policy, lambda_fn=is_block),
    "transformer": lambda m: partial(m.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": lambda m: partial(m.size_based_auto_wrap_policy, min_num_params=20),
    "always": lambda m: m.always_wrap_policy,
    "partial": lambda m: partial(m.always_wrap_policy),
    "or": lambda m: partial(
        m._or_policy,
        policies=[
            partial(m.lambda_auto_wrap_policy, lambda_fn=is_block),
            partial(m.transformer_auto_wrap_policy, transformer_layer_cls={nn.LayerNorm}),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_of_torchs_selects_what_ours_selects(name):
    containers = [
        nn.ModuleList([Block(nn.Linear(4, 4), nn.LayerNorm(4))]),
        nn.ParameterList([torch.ones(2)]),  # which nobody calls
    ]
    root = nn.Sequential(nn.Linear(4, 4), *containers, Block(nn.ReLU()))
    expected = select(root, POLICIES[name](minifsdp))
    assert expected and select(root, from_torch(POLICIES[name](their_wrap))) == expected


@on_ranks(2)
def test_a_script_that_says_everything_in_torchs_words_runs_as_said():
    model = FSDP(
        layers(2),
        sharding_strategy=theirs.ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=theirs.CPUOffload(offload_params=True),
        backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST,
        mixed_precision=theirs.MixedPrecision(param_dtype=torch.bfloat16),
        auto_wrap_policy=their_wrap.CustomPolicy(
            lambda module: (
                {"sharding_strategy": theirs.ShardingStrategy.NO_SHARD} if is_block(module) else {}
            )
        ),
        limit_all_gathers=False,
    )
    root, *blocks = model.engine.units
    assert len(blocks) == 2 and all(unit.shard_group is None for unit in blocks)
    assert root.shard_group is not None and not root.reshard_after_forward
    assert root.precision.param_dtype is torch.bfloat16 and root.offload_from == device()
    assert model.engine.prefetcher.backward is minifsdp.BackwardPrefetch.BACKWARD_POST
    assert isinstance(model.engine.limiter, NoLimit)
    step(model)


class Annotated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = their_wrap.wrap(nn.Linear(6, 6).to(device()))
        self.second = nn.Linear(6, 6).to(device())

    def forward(self, x):
        return self.second(self.first(x))


@on_ranks(2)
def test_torchs_enable_wrap_wraps_with_ours():
    settings = {"sharding_strategy": theirs.ShardingStrategy.NO_SHARD}
    with their_wrap.enable_wrap(wrapper_cls=FSDP, **settings):
        model = their_wrap.wrap(Annotated())
    assert [unit.name for unit in model.engine.units] == ["", "first"]
    assert all(unit.shard_group is None for unit in model.engine.units)
    step(model)


def test_the_records_have_no_other_fields():
    """Should torch add one, this says so before users find out."""
    for ours, record in ((minifsdp.MixedPrecision, theirs.MixedPrecision),):
        names = {field.name for field in fields(record)}
        assert names <= {field.name for field in fields(ours)}
        assert from_torch(replace(record())) == ours()
