"""policies.py: the policies, which say which modules become units."""

from functools import partial

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import minifsdp as ours
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ShardingStrategy
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.wrapping.auto_wrap import select
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
)


def tree() -> nn.Module:
    """Blocks in blocks and in both containers, attention, a block without parameters, a module in
    two places of one parent, a parameter in two modules."""
    root = nn.Sequential(
        nn.Linear(4, 4),
        nn.ModuleList([Block(Block(nn.Linear(4, 4)), nn.LayerNorm(4))]),
        nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)}),
        Block(nn.ReLU()),
        nn.Linear(4, 4),
        Block(nn.Linear(4, 4), nn.Linear(4, 4)),
    )
    root.append(root[4])
    root[5][1].weight = root[5][0].weight
    return root


def names(root, modules) -> set[str]:
    return {name for name, module in root.named_modules() if module in modules}


class Marked(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module


def wrapped_by_torch(policy) -> set[str]:
    """What torch's FSDP does with a policy, up to the wrapping itself."""
    root = tree()
    if isinstance(policy, theirs._Policy):
        return names(root, policy._run_policy(root, set(), {})) - {""}
    theirs._recursive_wrap(root, policy, Marked, set(), set(), only_wrap_children=True)
    found = [n for n, module in root.named_modules() if isinstance(module, Marked)]
    return {name.replace(".inner", "") for name in found}


def is_block(module):
    return isinstance(module, Block)


def size(module, **settings):
    return partial(module.size_based_auto_wrap_policy, **settings)


POLICIES = {
    "classes": lambda m: m.ModuleWrapPolicy({Block, nn.LayerNorm}),
    "no classes": lambda m: m.ModuleWrapPolicy([]),
    "custom": lambda m: m.CustomPolicy(is_block),
    "custom, some by settings": lambda m: m.CustomPolicy(
        lambda module: {"x": 1} if is_block(module) else {}
    ),
    "lambda": lambda m: partial(m.lambda_auto_wrap_policy, lambda_fn=is_block),
    "transformer": lambda m: partial(
        m.transformer_auto_wrap_policy, transformer_layer_cls={nn.MultiheadAttention, nn.Linear}
    ),
    "size, by default": lambda m: m.size_based_auto_wrap_policy,
    "size 1": lambda m: size(m, min_num_params=1),
    "size 20": lambda m: size(m, min_num_params=20),
    "size 21": lambda m: size(m, min_num_params=21),
    "size 25": lambda m: size(m, min_num_params=25),
    "size, other leaves": lambda m: size(m, min_num_params=1, force_leaf_modules={Block}),
    "size, no leaves": lambda m: size(m, min_num_params=1, force_leaf_modules=set()),
    "size, others excluded": lambda m: size(
        m, min_num_params=1, exclude_wrap_modules={nn.ModuleList, nn.ModuleDict, Block}
    ),
    "a function": lambda m: lambda module, recurse, nonwrapped_numel: recurse or is_block(module),
    "a function that looks into blocks only": lambda m: (
        lambda module, recurse, nonwrapped_numel: is_block(module)
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_modules_are_selected_as_by_torchs_policies(name):
    root = tree()
    assert names(root, select(root, POLICIES[name](ours))) == wrapped_by_torch(
        POLICIES[name](theirs)
    )


def test_each_of_torchs_names_is_there_and_takes_the_same_arguments():
    for name in theirs.__all__:
        assert hasattr(ours, name), name
    asked = dict(module=nn.Linear(2, 2), recurse=False, nonwrapped_numel=6)
    assert ours.always_wrap_policy(**asked)
    assert ours.size_based_auto_wrap_policy(**asked, min_num_params=6)
    assert not ours.size_based_auto_wrap_policy(**asked, min_num_params=7)
    assert not ours.size_based_auto_wrap_policy(nn.Linear(2, 2), False, 99_999_999)
    assert ours.size_based_auto_wrap_policy(nn.Linear(2, 2), False, 100_000_000)


def test_always_means_everything_that_has_a_forward_and_looks_into_the_rest():
    root = tree()
    lists = nn.ParameterList([nn.Parameter(root[0].weight.detach())])
    root[1].append(lists)
    everything = names(root, set(root.modules())) - {""}
    assert names(root, select(root, ours.always_wrap_policy)) == everything - {"1", "2", "1.1"}
    assert wrapped_by_torch(theirs.always_wrap_policy) == everything - {"1.1"}  # never gathered


@on_ranks(2)
def test_a_model_in_which_everything_is_wrapped_trains():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(layers())

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = FSDP(Listed().to(device()), auto_wrap_policy=ours.always_wrap_policy)
    assert len(model.engine.units) == 1 + 1 + 4 * 3 and type(model.blocks) is nn.ModuleList
    plain = Listed().to(device())
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    model(batch()).pow(2).sum().backward()
    assert_same_gradients(gathered_gradients(model), expected)


def unit_at(model: FSDP, place: int) -> FeaturedUnit:
    return model.module[place]._unit


def settings_by_place(module):
    place = getattr(module, "place", None)
    return {
        1: {"sharding_strategy": ShardingStrategy.NO_SHARD},
        2: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": None},
        3: True,
        4: {},
    }.get(place, False)


@on_ranks(2)
def test_a_custom_policy_gives_each_unit_settings_of_its_own():
    plain, model = layers(), layers()
    for place, block in enumerate(model):
        block.place = place
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    precision = MixedPrecision(reduce_dtype=plain[0].weight.dtype)
    model = FSDP(
        model, auto_wrap_policy=ours.CustomPolicy(settings_by_place), mixed_precision=precision
    )
    assert [unit.name for unit in model.engine.units] == ["", "1", "2", "3"]
    one, two, three = (unit_at(model, place) for place in (1, 2, 3))
    assert one.shard_group is None and two.shard_group is not None
    assert three.reshard_after_forward and not two.reshard_after_forward
    assert one.precision is three.precision is precision and two.precision == MixedPrecision()
    model(batch()).pow(2).sum().backward()
    assert_same_gradients(gathered_gradients(model), expected)


@pytest.mark.parametrize("answer", ["yes", 1, None])
def test_a_custom_policy_whose_function_says_something_else_is_refused(answer):
    with pytest.raises(TypeError, match=rf"bool or a dict.* for Linear it returned {answer!r}"):
        select(nn.Sequential(nn.Linear(2, 2)), ours.CustomPolicy(lambda module: answer))


@pytest.mark.parametrize("make", [
    ours.ModuleWrapPolicy,
    lambda given: ours.transformer_auto_wrap_policy(nn.Linear(1, 1), True, 2, given),
], ids=["ModuleWrapPolicy", "transformer_auto_wrap_policy"])  # fmt: skip
def test_a_policy_of_classes_takes_classes_only(make):
    with pytest.raises(TypeError, match=r"takes classes of nn.Module, not Linear\("):
        make([nn.Linear(1, 1)])
    with pytest.raises(TypeError, match=r"takes classes of nn.Module, not <class 'int'>"):
        make([nn.Linear, int])
    with pytest.raises(TypeError, match=r"a set of classes, .* not <class .*Linear'>"):
        make(nn.Linear)


class Wrapper(nn.Module):
    def __init__(self, module, **settings):
        super().__init__()
        self.module, self.settings = module, settings


def settings_of(module) -> dict | None:
    return module.settings if isinstance(module, Wrapper) else None


def test_wrap_wraps_inside_enable_wrap_only():
    plain = nn.Linear(1, 1)
    assert ours.wrap(plain, a=1) is plain
    with ours.enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        wrapped = ours.wrap(plain)
        assert wrapped.module is plain and settings_of(wrapped) == {"a": 1, "b": 2}
        assert settings_of(ours.wrap(plain, b=3, c=4)) == {"a": 1, "b": 3, "c": 4}
        assert settings_of(ours.wrap(plain)) == {"a": 1, "b": 2}  # those were for one call
    assert ours.wrap(plain) is plain


def test_enable_wrap_may_be_nested_and_ends_with_its_block():
    plain = nn.Linear(1, 1)
    with ours.enable_wrap(wrapper_cls=Wrapper, a=1):
        with pytest.raises(KeyError), ours.enable_wrap(wrapper_cls=Wrapper, b=2):
            assert settings_of(ours.wrap(plain)) == {"b": 2}  # those around do not count
            raise KeyError
        assert settings_of(ours.wrap(plain)) == {"a": 1}
    assert ours.wrap(plain) is plain


class Annotated(nn.Module):
    """Says in its ``__init__`` what its units are."""

    def __init__(self):
        super().__init__()
        parts = layers()
        self.first = ours.wrap(parts[0])
        self.second = ours.wrap(parts[1], sharding_strategy=ShardingStrategy.NO_SHARD)
        self.third = parts[2]

    def forward(self, x):
        return self.third(self.second(self.first(x)))


@on_ranks(2)
def test_a_model_that_wraps_its_own_parts_trains_with_and_without():
    plain = Annotated()
    assert not FSDP.fsdp_modules(plain)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    settings = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    with ours.enable_wrap(wrapper_cls=FSDP, **settings):
        model = FSDP(Annotated(), **settings)
    assert [unit.name for unit in model.engine.units] == ["", "first", "second"]
    assert [unit.shard_group is None for unit in model.engine.units] == [False, False, True]
    assert not any(unit.reshard_after_forward for unit in model.engine.units)
    model(batch()).pow(2).sum().backward()
    assert_same_gradients(gathered_gradients(model), expected)


def test_torchs_defaults_can_be_extended():
    """As programs write it: size_based_auto_wrap_policy.FORCE_LEAF_MODULES.union({...})."""
    size, torchs = ours.size_based_auto_wrap_policy, theirs.size_based_auto_wrap_policy
    assert size.FORCE_LEAF_MODULES == torchs.FORCE_LEAF_MODULES
    assert size.EXCLUDE_WRAP_MODULES == torchs.EXCLUDE_WRAP_MODULES
    containers = nn.ModuleList([nn.Linear(4, 4), nn.ParameterList([torch.ones(9)])])
    root = nn.Sequential(containers, nn.Linear(4, 4))
    leaves = size.FORCE_LEAF_MODULES.union({nn.ModuleList})
    policy = partial(size, min_num_params=1, force_leaf_modules=leaves)
    assert list(select(root, policy)) == [root[1]]
    excluded = size.EXCLUDE_WRAP_MODULES.union({nn.Linear})
    policy = partial(size, min_num_params=1, exclude_wrap_modules=excluded)
    assert not select(root, policy)  # nobody calls a ParameterList
