"""auto_wrap.py: which modules become units, and that no parameter is in two."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import (
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)
from minifsdp.wrapping.auto_wrap import check_sharing, select
from tests.models import SharedTransformer
from tests.ranks import device, on_ranks
from tests.small import Block, batch, layers, step


def tree():
    return nn.Sequential(
        nn.Linear(4, 4), nn.ModuleList([Block(Block(nn.Linear(4, 4)))]), Block(nn.ReLU())
    )


def test_inner_modules_are_selected_before_those_around():
    root = tree()
    selected = select(root, ModuleWrapPolicy({Block}))
    assert list(selected) == [root[1][0][0], root[1][0], root[2]]


def test_the_root_is_not_selected_and_shared_modules_once():
    shared = Block(nn.Linear(4, 4))
    assert list(select(Block(shared, shared), ModuleWrapPolicy([Block]))) == [shared]


def test_a_policy_may_give_settings_and_say_no_with_anything_that_is_false():
    root = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    answers = dict(zip(root, ({"a": 1}, True, {}, None, False), strict=True))
    selected = select(root, lambda module, recurse, nonwrapped_numel: answers.get(module, recurse))
    assert selected == {root[0]: {"a": 1}, root[1]: {}}


def test_a_policy_is_asked_with_the_number_of_elements_that_no_unit_inside_has_taken():
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.LayerNorm)

    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    tied[1].weight = tied[0].weight
    select(nn.Sequential(tied), policy)
    assert asked == [
        ("Sequential", True, 24), ("Sequential", True, 24),
        ("Linear", True, 16), ("Linear", False, 16), ("Linear", True, 16), ("Linear", False, 16),
        ("LayerNorm", True, 8), ("LayerNorm", False, 8),
        ("Sequential", False, 16),
    ]  # fmt: skip


def test_what_a_policy_does_not_want_to_look_into_is_left_whole():
    def policy(module, recurse, nonwrapped_numel):
        return not isinstance(module, Block)

    root = nn.Sequential(Block(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert list(select(root, policy)) == [root[1]]
    assert select(nn.MultiheadAttention(4, 2), size_based_auto_wrap_policy) == {}
    assert select(Block(nn.Linear(4, 4)), policy) == {}


@pytest.mark.parametrize("policy", [{Block}, True], ids=str)
def test_what_is_not_a_policy_is_refused(policy):
    with pytest.raises(TypeError, match=r"takes a policy, such as ModuleWrapPolicy"):
        select(tree(), policy)


@on_ranks(1)
def test_a_policy_that_wants_a_container_is_refused_before_anything_changes():
    model = tree()
    with pytest.raises(ValueError, match=r"module '1' \(ModuleList\) has no forward"):
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.ModuleList}))
    assert not FSDP.fsdp_modules(model) and isinstance(model[0].weight, nn.Parameter)


@on_ranks(1)
def test_a_container_of_which_a_unit_would_have_parameters_is_refused_before_anything_changes():
    parts = {"a": nn.Linear(2, 2), "b": nn.LayerNorm(2)}
    linear = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
    for container, settings, left in (
        (nn.ModuleList(parts.values()), {}, "0.weight"),
        (nn.ModuleList(parts.values()), linear, "1.weight"),
        (nn.ModuleDict(parts), linear, "b.weight"),
        (nn.ParameterList([torch.ones(1)]), {}, "0"),
    ):
        with pytest.raises(ValueError, match=f"has no forward.*'{left}'.*auto_wrap_policy="):
            FSDP(container, **settings)
        assert not FSDP.fsdp_modules(container)


def test_a_container_with_nothing_left_is_not_selected():
    root = tree()
    assert root[1] not in select(root, ModuleWrapPolicy({nn.ModuleList, Block}))


class Chain(nn.Module):
    """What a program does with a container, as a module that DDP can run."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return through(self.layers, x)


def through(layers, x):
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        x = layer(x)
    return x


def listed():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]).to(device())


CONTAINERS = {
    "list": lambda layers: FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})),
    "sharded once": lambda layers: FSDP(
        layers,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    ),
    "dict": lambda layers: FSDP(
        nn.ModuleDict({f"l{place}": layer for place, layer in enumerate(layers)}),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    ),
    "by hand": lambda layers: FSDP(
        nn.ModuleList([FSDP(layer) if place != 1 else layer for place, layer in enumerate(layers)])
    ),
    "inside": lambda layers: FSDP(
        Chain(FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})))
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
@on_ranks(2)
def test_a_container_whose_modules_are_units_trains_as_with_ddp(name):
    expected = nn.parallel.DistributedDataParallel(Chain(listed()))
    found = CONTAINERS[name](listed())
    results = []
    for model in (expected, found):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for at in range(4):
            container = isinstance(getattr(model, "module", model), (nn.ModuleList, nn.ModuleDict))
            x = batch(step=at)
            y = through(model if name != "dict" else model.module, x) if container else model(x)
            loss = y.pow(2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append(losses)
    assert results[0] == results[1], results
    assert len(list(found.parameters())) == 2


@on_ranks(2)
def test_units_are_where_the_policy_says():
    model = FSDP(tree().to(device()), auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert [unit.name for unit in model.engine.units] == ["", "1.0", "1.0.0", "2"]
    assert [unit.numel for unit in model.engine.units] == [20, 0, 20, 0]


@on_ranks(2)
def test_what_is_wrapped_by_hand_is_left_alone():
    inner = FSDP(Block(Block(nn.Linear(6, 6))).to(device()))
    model = FSDP(nn.Sequential(inner, Block(nn.Linear(6, 6)).to(device())),
                 auto_wrap_policy=ModuleWrapPolicy({Block}))  # fmt: skip
    assert [unit.name for unit in model.engine.units] == ["", "0", "1"]
    assert model.module[0] is inner
    step(model)


@on_ranks(2)
def test_a_module_in_two_places_is_one_unit():
    shared = Block(nn.Linear(6, 6)).to(device())
    model = FSDP(
        nn.Sequential(shared, nn.Tanh(), shared), auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    assert model.module[0] is model.module[2] and isinstance(model.module[0], FSDP)
    step(model)
    assert len(list(model.parameters())) == 1


@on_ranks(2)
def test_shared_parameters_inside_a_unit_stay_one_parameter():
    model = FSDP(SharedTransformer().to(device()))
    names = [info.name for info in model.engine.root.param_infos]
    assert "embed.weight" in names and "output.weight" not in names
    with FSDP.summon_full_params(model):
        assert model.module.embed.weight is model.module.output.weight


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.first = Block(nn.Linear(6, 6))
        self.decoder.second = Block(nn.Linear(6, 6))
        self.decoder.second[0].weight = self.decoder.first[0].weight
        self.decoder.forward = lambda x: self.decoder.second(self.decoder.first(x))

    def forward(self, x):
        return self.decoder.forward(x)


@on_ranks(2)
def test_parameters_shared_across_units_are_refused_before_anything_changes():
    model = Tied().to(device())
    with pytest.raises(ValueError) as error:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    message = str(error.value)
    for part in ("'decoder.first.0.weight'", "'decoder.second.0.weight'", "'decoder.first' and "
                 "'decoder.second'", "wrap 'decoder', the smallest module"):  # fmt: skip
        assert part in message
    assert not FSDP.fsdp_modules(model) and isinstance(model.decoder.first[0].weight, nn.Parameter)
    FSDP(model)  # as one unit it is fine


@on_ranks(2)
def test_parameters_shared_with_a_unit_wrapped_by_hand_are_refused():
    model = Tied().to(device())
    model.decoder.first = FSDP(model.decoder.first)
    with pytest.raises(ValueError, match=r"'decoder.first.0.weight' and 'decoder.second.0.weight'"):
        FSDP(model)
    with pytest.raises(
        ValueError, match=r"'0.weight' of this unit and '0.weight' of one that was wrapped before"
    ):
        FSDP(model.decoder.second)
    model.decoder.first = None
    gc.collect()  # the unit is gone
    FSDP(model)


def test_a_module_that_sits_in_two_units_is_refused_too():
    shared = nn.Linear(4, 4)
    root = nn.Sequential(Block(shared), Block(shared))
    with pytest.raises(
        ValueError, match=r"'0.0.weight' and '1.0.weight' are one parameter.*the root"
    ):
        check_sharing(root, select(root, ModuleWrapPolicy({Block})))


class Both(nn.Module):
    """Two modules with one weight, each of which can make its own values."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@on_ranks(2)
def test_sharing_with_a_unit_wrapped_by_hand_is_noticed_on_the_meta_device_too():
    with torch.device("meta"):
        model = Both()
    model.first = FSDP(model.first)
    with pytest.raises(ValueError, match=r"'first.weight' and 'second.weight' are one parameter"):
        FSDP(model)
    assert model.second.weight.is_meta  # nothing has been changed


def pair(second):
    return nn.Sequential(nn.Linear(2, 2), second)


REFUSED = {
    "ModuleList has no forward": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "ParameterDict has no forward": lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    "a unit of FSDP already": lambda: FSDP(nn.Linear(2, 2).to(device())),
    "torch.float64: 1.weight, 1.bias": lambda: pair(nn.Linear(2, 2).double()),
    "True: 0.weight, 0.bias; False: 1.weight": lambda: pair(nn.Linear(2, 2).requires_grad_(False)),
}


@pytest.mark.parametrize("match", REFUSED)
@on_ranks(1)
def test_what_cannot_be_a_unit_is_refused(match):
    with pytest.raises(ValueError, match=re.escape(match)):
        FSDP(REFUSED[match]())


@on_ranks(2)
def test_after_wrapping_the_original_parameters_are_gone_at_once():
    """Without the garbage collector, which may come late: it would be the memory of a model."""
    net = layers(3)
    params = [weakref.ref(param) for param in net.parameters()]
    gc.disable()
    try:
        wrapped = FSDP(net, auto_wrap_policy=always_wrap_policy)
        assert wrapped is not None and not any(param() for param in params)
    finally:
        gc.enable()
