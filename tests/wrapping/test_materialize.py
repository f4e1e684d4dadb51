"""materialize.py: how parameters come to be: from the meta device, from another, from rank 0."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp.core.shard
import minifsdp.wrapping.build
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm.consensus import gather_objects
from minifsdp.wrapping.materialize import materialize, move
from minifsdp.wrapping.module_tree import own_modules
from tests.live_bytes import bytes_at
from tests.ranks import device, on_ranks
from tests.small import Block, batch, step

META = torch.device("meta")
FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
wrap_blocks = {"auto_wrap_policy": ModuleWrapPolicy({Block})}


class Steady(nn.Linear):
    """Always the same values, whatever else draws random numbers."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for param in self.parameters():
                values = torch.linspace(-1, 1, param.numel(), device=param.device)
                param.copy_(values.view_as(param))


def model() -> nn.Sequential:
    return nn.Sequential(
        Steady(6, 6),
        Block(Steady(6, 6), nn.BatchNorm1d(6)),
        Block(Steady(6, 6, bias=False).requires_grad_(False)),
        Block(Steady(6, 6), nn.Tanh()),
    )


def on_meta(make):
    with META:
        return make()


def empty(module: nn.Module) -> None:
    """What programs for torch's FSDP pass as ``param_init_fn``."""
    module.to_empty(device=device(), recurse=False)


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def empty_and_reset(module: nn.Module) -> None:
    empty(module)
    reset(module)


def where_on_meta(module: nn.Module) -> None:
    """One of the two usual styles of a ``param_init_fn``."""
    if any(param.is_meta for param in module.parameters(recurse=False)):
        empty_and_reset(module)


def all_below(module: nn.Module) -> None:
    """The other one: a class whose first values come from the whole of it."""
    if isinstance(module, (nn.Sequential, Block, Both)):
        module.to_empty(device=device())
        module.apply(reset)


def whole(model: FSDP) -> dict[str, Tensor]:
    """Parameters and buffers, under their names."""
    with FSDP.summon_full_params(model, writeback=False):
        return {
            n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())
        }


# ------------------------------------------------------------------------------ the meta device


@pytest.mark.parametrize("init_fn", [None, empty_and_reset, where_on_meta, all_below])
@on_ranks(2)
def test_a_model_from_the_meta_device_trains_like_one_that_was_there(init_fn):
    expected = FSDP(model().to(device()), **wrap_blocks)
    found = FSDP(on_meta(model), param_init_fn=init_fn, **wrap_blocks)
    for at in range(2):
        assert torch.equal(step(found, at), step(expected, at))
    for ours, theirs in zip(found.engine.units, expected.engine.units, strict=True):
        assert ours.sharded_flat_param.requires_grad == theirs.sharded_flat_param.requires_grad
        assert ours.sharded_flat_param.grad is theirs.sharded_flat_param.grad or torch.equal(
            ours.sharded_flat_param.grad, theirs.sharded_flat_param.grad
        )
    for ours, theirs in zip(found.buffers(), expected.buffers(), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


@on_ranks(1)
def test_a_function_is_called_with_every_module_of_the_unit_outer_ones_first_on_meta():
    root, called = on_meta(model), []
    weight = root[3][0].weight = nn.Parameter(torch.ones(6, 6, device=device()))

    def note(module):
        assert all(param.is_meta or param is weight for param in module.parameters())
        called.append(module)

    with pytest.raises(ValueError, match=r"param_init_fn has left '0.weight' on the meta device"):
        materialize(own_modules(root), device(), note)
    assert called == [root, *root, root[1][0], root[1][1], root[2][0], root[3][0], root[3][1]]
    assert root[3][0].weight is weight


@on_ranks(1)
def test_a_unit_that_is_there_is_not_initialized_anew():
    model, called = Block(nn.Linear(2, 2)).to(device()), []
    weight = model[0].weight
    materialize(own_modules(model), device(), called.append)
    assert not called and model[0].weight is weight


@on_ranks(1)
def test_values_are_set_without_autograd():
    def initialize(module):
        assert not torch.is_grad_enabled()
        empty(module)
        module.weight.fill_(3)

    found = FSDP(on_meta(lambda: nn.Linear(2, 2, bias=False)), param_init_fn=initialize)
    assert (
        found._unit.sharded_flat_param == 3
    ).all() and found._unit.sharded_flat_param.requires_grad


class Table(nn.Module):
    """Made in ``__init__``, in no state dict, and without parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", None)
        self.register_buffer("table", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        torch.arange(6, out=self.table, device=self.table.device)

    def forward(self, x):
        return x + self.table


@on_ranks(1)
def test_buffers_come_to_be_too_and_stay_out_of_state_dicts_as_they_were():
    found = FSDP(on_meta(lambda: nn.Sequential(Table(), nn.Linear(6, 6))), device_id=device())
    assert torch.equal(found.module[0](torch.zeros(6, device=device())).cpu(), torch.arange(6.0))
    assert found.module[0].positions is None
    assert "0.table" not in found.state_dict()


class Both(nn.Module):
    """Two modules that share a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Steady(4, 4), Steady(4, 4)
        self.second.weight = self.first.weight
        self.first.register_buffer("mask", torch.ones(4))
        self.second.register_buffer("mask", self.first.mask)

    def forward(self, x):
        return self.second(self.first(x) * self.first.mask) * self.second.mask


def check_shared(both: Both) -> None:
    assert both.first.weight is both.second.weight and both.first.mask is both.second.mask
    assert both.first.bias is not both.second.bias


def one_of_two(module: nn.Module) -> None:
    """It leaves a layer on meta whose weight another layer has, too."""
    if isinstance(module, Both):
        empty_and_reset(module.second)
        module.first.bias = nn.Parameter(torch.ones(4, device=device()))


@pytest.mark.parametrize(
    "init_fn", [None, empty, empty_and_reset, where_on_meta, all_below, one_of_two]
)
@on_ranks(1)
def test_what_is_shared_on_meta_stays_shared(init_fn):
    both = on_meta(Both)
    materialize(own_modules(both), device(), init_fn)
    check_shared(both)
    assert not any(tensor.is_meta for tensor in (*both.parameters(), *both.buffers()))


def test_what_is_shared_is_moved_once():
    both = Both()
    bias = both.first.bias
    move(own_modules(both), torch.device("cpu"))
    assert both.first.bias is bias  # it was there
    both.first.bias.requires_grad_(False)
    move(own_modules(both), META)
    check_shared(both)
    assert all(tensor.is_meta for tensor in (*both.parameters(), *both.buffers()))
    assert [both.first.bias.requires_grad, both.second.bias.requires_grad] == [False, True]
    assert isinstance(both.first.bias, nn.Parameter) and not isinstance(
        both.first.mask, nn.Parameter
    )


@on_ranks(2)
def test_a_shared_parameter_from_meta_is_one_parameter_of_its_unit():
    found = FSDP(on_meta(Both), param_init_fn=where_on_meta)
    assert [info.name for info in found.engine.root.param_infos] == [
        "first.weight", "first.bias", "second.bias",
    ]  # fmt: skip


def test_strides_are_as_on_meta():
    module = nn.Module()
    with META:
        module.weight = nn.Parameter(torch.empty(3, 5).t())
    module.reset_parameters = lambda: None
    materialize(own_modules(module), torch.device("cpu"), None)
    assert module.weight.stride() == (1, 5)


@on_ranks(2)
def test_an_lstm_from_meta_computes_with_its_new_weights():
    torch.manual_seed(dist.get_rank())
    found = FSDP(on_meta(lambda: nn.LSTM(6, 5)), sync_module_states=True)
    plain = nn.LSTM(6, 5).to(device())
    plain.load_state_dict(whole(found))
    assert torch.equal(found(batch())[0], plain(batch())[0])


class Nameless(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def forward(self, x):
        return x * self.weight


@on_ranks(1)
def test_without_reset_parameters_a_module_is_refused_by_name_before_anything_changes():
    root = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(Nameless())))
    with pytest.raises(
        ValueError, match=r"'1.0' \(Nameless\) .* no reset_parameters\(\).*init_fn="
    ):
        FSDP(root)
    assert root[0].weight.is_meta
    with pytest.raises(ValueError, match=r"'<root>' \(Nameless\)"):
        FSDP(root[1][0])
    FSDP(root, param_init_fn=empty)


class Around(nn.Module):
    """A unit's module that has a parameter of its own, and resets all that is below it."""

    def __init__(self):
        super().__init__()
        self.inner, self.own = Block(nn.Linear(6, 6)), nn.Parameter(torch.empty(6))

    def forward(self, x):
        return self.inner(x) + self.own

    def reset_parameters(self):
        self.inner.reset_parameters()
        for param in self.parameters():
            nn.init.ones_(param)


def ones_below(module: nn.Module) -> None:
    module.to_empty(device=device())
    for param in module.parameters():
        nn.init.ones_(param)


@pytest.mark.parametrize("init_fn", [None, ones_below])
@on_ranks(2)
def test_units_inside_keep_their_values_when_all_below_a_module_get_theirs(init_fn):
    root = on_meta(Around)
    inner = root.inner = FSDP(Block(nn.Linear(6, 6)).to(device()))
    chunk = inner._unit.sharded_flat_param.detach().clone()
    found = FSDP(root, param_init_fn=init_fn)
    assert found.module.inner is inner and torch.equal(inner._unit.sharded_flat_param, chunk)
    assert (found._unit.sharded_flat_param == 1).all()
    step(found)


@on_ranks(1)
def test_who_looks_into_a_unit_inside_for_a_value_is_told_where_it_is():
    root = on_meta(Around)
    inner = root.inner = FSDP(Block(nn.Linear(6, 6)).to(device()))
    with pytest.raises(AttributeError, match=r"'weight' of 'inner' cannot be seen while .* a unit"):
        FSDP(root, param_init_fn=lambda module: module.inner.weight.fill_(1))
    assert root.inner is inner


def only_weights(module: nn.Module) -> None:
    if hasattr(module, "weight"):
        module.weight = nn.Parameter(torch.ones(2))


def only_parameters(module: nn.Module) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.ones(2)))


LEFT = {
    "nothing done": ("0.weight", lambda module: None),
    "reset on meta": ("0.weight", reset),
    "cast": ("0.weight", lambda module: module.to(torch.float64)),
    "weights": ("0.bias", only_weights),
    "parameters": ("1.running_mean", only_parameters),
}


@pytest.mark.parametrize("what", LEFT)
@on_ranks(2)
def test_what_a_function_leaves_on_meta_is_refused_by_name(what):
    left, init_fn = LEFT[what]
    root = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    match = f"param_init_fn has left '{left}' on the meta device.*module.to_empty"
    with pytest.raises(ValueError, match=match):
        FSDP(root, param_init_fn=init_fn)


@on_ranks(2)
def test_a_function_may_put_other_modules_and_shapes_in_place():
    def widen(module):
        if isinstance(module, nn.Sequential):
            module[0], module[1] = Steady(6, 8).to(device()), Steady(8, 6).to(device())

    expected = nn.Sequential(Steady(6, 8), Steady(8, 6)).to(device())
    found = FSDP(on_meta(lambda: nn.Sequential(Steady(6, 6), Steady(6, 6))), param_init_fn=widen)
    check_equal(whole(found), dict(expected.named_parameters()))
    assert torch.equal(step(found), expected(batch()).pow(2).sum())


# --------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("init_fn", [None, pytest.param(empty, marks=pytest.mark.slow)])
@on_ranks(2)
def test_one_unit_at_a_time_is_whole(init_fn):
    width, blocks = 16, 5
    layer = partial(nn.Linear, width, width, bias=False)
    root = on_meta(lambda: nn.Sequential(*(Block(layer()) for _ in range(blocks))))
    unit = 4 * width**2
    chunk = unit // 2
    with (
        bytes_at(minifsdp.wrapping.build, "materialize") as given_values,
        bytes_at(minifsdp.core.shard, "shard") as cut,
    ):
        FSDP(root, param_init_fn=init_fn, **wrap_blocks)
    # Before it: the chunks of those before. The unit, and to cut it, the same end to end.
    expected = [before * chunk + unit for before in range(blocks)] + [blocks * chunk]
    assert given_values == expected, given_values
    for before in range(blocks):
        assert cut[before] <= (before + 1) * chunk + 2 * unit


# ---------------------------------------------------------------------------- rank 0's values


class Kinds(nn.Module):
    """Tensors of several kinds, with other values on every rank, and a buffer with strides."""

    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("table", torch.randn(5, 3).t())
        self.register_buffer("count", torch.tensor(100 + rank))
        self.register_buffer("flag", torch.tensor([rank == 0, True]))
        self.register_buffer("low", torch.randn(3).bfloat16())
        self.register_buffer("none", torch.empty(0))

    def forward(self, x):
        return x @ self.weight


def ranked(rank: int) -> nn.Module:
    root = nn.Sequential(Kinds(rank), Block(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    root[1](torch.randn(7, 6))  # running statistics
    return root


def line(*lines: list[int]) -> dist.ProcessGroup:
    groups = [(ranks, dist.new_group(ranks)) for ranks in lines]
    return next(group for ranks, group in groups if dist.get_rank() in ranks)


def columns_first() -> dict:
    """A grid in which the first ranks of the columns are not all in the row of rank 0."""
    return {"process_group": (line([0, 3], [1, 2]), line([0, 1], [2, 3]))}


HYBRID = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
GROUPS = {
    "sharded": dict,
    "replicated": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "grid": lambda: {**HYBRID, "device_mesh": init_device_mesh(device().type, (2, 2))},
    "another grid": lambda: {**HYBRID, **columns_first()},
    "part": lambda: {"process_group": line([0, 2], [1, 3])},
}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


@pytest.mark.parametrize("groups", GROUPS)
@on_ranks(4)
def test_all_ranks_get_the_values_of_the_first(groups):
    rank = dist.get_rank()
    settings = {"sync_module_states": True, **wrap_blocks, **GROUPS[groups]()}
    found = FSDP(ranked(rank).to(device()), **settings)
    expected = ranked(rank % 2 if groups == "part" else 0).to(device())
    check_equal(whole(found), dict((*expected.named_parameters(), *expected.named_buffers())))


@pytest.mark.parametrize("groups", ["sharded", "replicated", "grid", "another grid"])
@on_ranks(4)
def test_rank_0_may_have_the_weights_and_the_others_nothing(groups):
    def make():
        return nn.Sequential(ranked(0), Both())

    def placed():
        module = make().to(device())
        module[1].second.mask = module[1].first.mask  # two buffers, if they have been moved
        return module

    here = placed() if dist.get_rank() == 0 else on_meta(make)
    settings = {"sync_module_states": True, "param_init_fn": empty, **GROUPS[groups]()}
    found, expected = FSDP(here, **wrap_blocks, **settings), placed()
    check_equal(whole(found), dict((*expected.named_parameters(), *expected.named_buffers())))


@on_ranks(2)
def test_what_is_shared_on_one_rank_only_is_sent_all_the_same():
    both = Both().to(device())
    if dist.get_rank() == 1:
        both.second.mask = torch.zeros(4, device=device())
    FSDP(both, sync_module_states=True)
    assert both.first.mask.eq(1).all() and both.second.mask.eq(1).all()


DIFFERENT = {
    "one has no bias": ("bias' is (.+float32|not there) on", lambda: nn.Linear(2, 2, bias=False)),
    "another shape": (r"weight' is \[[23], 2\], torch.float32 on", lambda: nn.Linear(2, 3)),
    "another dtype": (r"weight' is \[2, 2\], torch.float", lambda: nn.Linear(2, 2).double()),
}


@pytest.mark.parametrize("groups", ["sharded", "replicated", "grid", "another grid"])
@pytest.mark.parametrize("difference", DIFFERENT)
@on_ranks(4)
def test_ranks_with_different_models_are_refused_by_name_on_all_ranks(difference, groups):
    # gloo would end the process, or wait for ever.
    match, make = DIFFERENT[difference]
    layer = make() if dist.get_rank() == 3 else nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"'1.0.{match}.* rank \d, .* on rank \d. Build the same"):
        FSDP(
            nn.Sequential(nn.Tanh(), nn.Sequential(layer)).to(device()),
            sync_module_states=True,
            **GROUPS[groups](),
        )
    assert gather_objects("here", dist.group.WORLD) == ["here"] * 4


@on_ranks(2)
def test_what_the_group_cannot_send_is_refused_by_name_on_all_ranks():
    root = nn.Sequential(nn.Linear(2, 2)).to(device())
    with (
        patch.object(dist, "get_backend_config", lambda group: "xpu:xccl"),
        pytest.raises(
            ValueError, match=r"'0.weight' is on .*, .* sends from xpu:xccl only.*device_id="
        ),
    ):
        FSDP(root, sync_module_states=True)


@on_ranks(2)
def test_what_was_synchronized_trains_alike_on_all_ranks():
    found, expected = ranked(dist.get_rank()).to(device()), ranked(0).to(device())
    found = FSDP(found, sync_module_states=True, **wrap_blocks)
    expected = FSDP(expected, **wrap_blocks)
    assert torch.equal(step(found), step(expected))
