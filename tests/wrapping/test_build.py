"""build.py: from a module to a unit."""

import gc
import weakref
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

import minifsdp.wrapping.build
from minifsdp import CPUOffload, CustomPolicy, FlatParameter, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.consensus import gather_objects
from minifsdp.core.streams import BACKENDS
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.precision import FULL_PRECISION
from minifsdp.wrapping.build import build_unit, default_device
from minifsdp.wrapping.settings import Settings, as_device
from tests.ranks import device, on_ranks
from tests.small import layers, stack, step

META = torch.device("meta")
HYBRID_SHARD = ShardingStrategy.HYBRID_SHARD


def build(module: nn.Module, **settings) -> FeaturedUnit:
    with patch.dict(BACKENDS, meta=BACKENDS["cpu"]):  # in these tests units may be built on meta
        return build_unit(module, Settings(**settings))


def here() -> torch.device:
    """Where this rank computes, with a GPU's number."""
    return as_device(device())


def on_meta(make):
    with META:
        return make()


@on_ranks(2)
def test_the_steps_come_in_the_order_that_keeps_memory_low():
    names = ["check_optimizers", "make_param_infos", "materialize", "make_param_infos"]
    names += ["move", "synchronize", "FeaturedUnit"]
    log = []

    def noted(name):
        step = getattr(minifsdp.wrapping.build, name)
        return lambda *args, **kwargs: log.append(name) or step(*args, **kwargs)

    with ExitStack() as stack:
        for name in set(names):
            stack.enter_context(patch.object(minifsdp.wrapping.build, name, noted(name)))
        build(nn.Linear(3, 3), device_id=device(), sync_module_states=True)
        assert log == names
        log.clear()
        build(nn.Linear(3, 3))
        assert log == [n for n in names if n not in ("move", "synchronize")]


@on_ranks(2)
def test_the_originals_are_gone_at_once():
    linear = nn.Linear(64, 64).to(device())
    originals = [weakref.ref(param) for param in linear.parameters()]
    left = []

    def set_unit(*_):  # called when there is a unit, and before everything is done
        left.extend(original() for original in originals)

    gc.disable()
    try:
        with (
            patch.object(gc, "get_objects", None),  # so nobody has to be looked for among them
            patch.object(minifsdp.wrapping.build, "set_unit", set_unit),
        ):
            build(linear)
        assert left == [None, None]
    finally:
        gc.enable()


@on_ranks(1)
def test_values_go_down_the_columns_before_they_go_along_the_rows():
    # The other way round they would reach everybody only if the ranks are in a certain order.
    row, column = dist.new_group([0]), dist.new_group([0])
    hybrid = {"sharding_strategy": HYBRID_SHARD, "process_group": (row, column)}
    with patch.object(minifsdp.wrapping.build, "synchronize") as synchronize:
        build(nn.Linear(2, 2), sync_module_states=True, **hybrid)
    assert synchronize.call_args.args[1] == [column, row]


WAYS = {
    "as it is": lambda: (nn.Linear(6, 6).to(device()), {}),
    "moved": lambda: (nn.Linear(6, 6).to(device()), {"device_id": META}),  # it is everywhere
    "on meta": lambda: (on_meta(lambda: nn.Linear(6, 6)), {}),
    "made by a function": lambda: (on_meta(lambda: nn.Linear(6, 6)), {"param_init_fn": refill}),
    "synchronized": lambda: (nn.Linear(6, 6).to(device()), {"sync_module_states": True}),
}


def refill(module: nn.Module) -> None:
    module.to_empty(device=device(), recurse=False)
    module.reset_parameters()


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_an_optimizer_built_before_is_noticed_however_the_parameters_come_to_be(way):
    linear, settings = WAYS[way]()
    optimizer = torch.optim.SGD(linear.parameters(), lr=1)
    with pytest.raises(RuntimeError, match=r"\(SGD\) was built before.* holds weight, bias, which"):
        build(linear, **settings)
    assert optimizer is not None


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(8, 3))
        self.bias, self.second = nn.Parameter(torch.ones(5)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight


@on_ranks(2)
def test_lengths_after_which_a_matrix_would_begin_anywhere_come_last():
    """A GPU takes up to eight times as long to multiply by a matrix that begins anywhere."""
    unit = build(Odd().to(device()))
    assert [info.name for info in unit.param_infos] == ["weight", "second", "scale", "bias"]
    model = FSDP(Odd().to(device()))
    assert [*model.state_dict()] == ["scale", "weight", "bias", "second"]  # as in the program


@on_ranks(3)
def test_units_of_a_group_have_different_tags_and_all_its_ranks_the_same():
    pair, world = dist.new_group([0, 1]), dist.group.WORLD
    model, inner = layers(2), []
    if dist.get_rank() < 2:  # units that rank 2 has no part in
        inner = [FSDP(model[place], process_group=pair)._unit for place in (1, 2)]
    before = [build(nn.Linear(2, 2)) for _ in range(dist.get_rank())]  # other models on each rank
    whole = stack(3)
    step(whole, 0)  # agrees on the tags
    units = [unit.tag for unit in whole.engine.units]
    assert len({unit.tag for unit in inner}) == len(inner)
    assert len(set(units)) == 4
    assert gather_objects(units, world) == [units] * 3
    assert len(before) == dist.get_rank()  # they are still there


@on_ranks(1)
def test_units_of_another_group_take_no_tags():
    other = dist.new_group([0])
    first = build(nn.Linear(2, 2)).tag
    build(nn.Linear(2, 2), process_group=other)
    assert build(nn.Linear(2, 2)).tag == first + 1


@on_ranks(2)
def test_what_a_param_init_fn_puts_in_place_is_a_part_of_the_unit():
    def fill(module):
        if isinstance(module, nn.Sequential):
            module[0] = nn.Linear(2, 2).to(device())
            for param in module[0].parameters():
                nn.init.constant_(param, dist.get_rank())

    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    unit = build(module, param_init_fn=fill, sync_module_states=True)
    assert not unit.padded_shard.any()  # rank 0's values


@on_ranks(2)
def test_a_unit_is_where_the_user_says():
    assert build(nn.Linear(2, 2)).sharded_flat_param.device.type == "cpu"
    unit = build(nn.BatchNorm1d(2), device_id=META)
    assert unit.sharded_flat_param.device == META and isinstance(
        unit.sharded_flat_param, FlatParameter
    )
    norm = nn.BatchNorm1d(2)
    build(norm, device_id=META)
    assert norm.running_mean.device == norm.num_batches_tracked.device == META


@on_ranks(2)
def test_with_offload_the_shard_is_on_the_host_and_computed_with_elsewhere():
    for settings in ({}, {"device_id": device()}):
        unit = build(nn.Linear(2, 2).to(device()), cpu_offload=CPUOffload(True), **settings)
        assert (
            unit.sharded_flat_param.device.type == "cpu"
            and unit.device == unit.offload_from == here()
        )
    empty = build(nn.Tanh(), cpu_offload=CPUOffload(True))
    assert empty.offload_from == default_device(dist.group.WORLD)
    assert build(nn.Linear(2, 2)).offload_from is None


def test_units_are_computed_with_where_their_group_communicates():
    for config, kind in (
        ("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu"),
    ):  # fmt: skip
        with (
            patch.object(dist, "get_backend_config", lambda group, config=config: config),
            patch.object(torch.cuda, "current_device", lambda: 3),
        ):
            found = default_device(None)
        assert found == (torch.device("cuda", 3) if kind == "cuda" else torch.device("cpu"))


@on_ranks(1)
def test_a_device_that_is_not_there_is_refused_before_anything_changes():
    linear = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="device_id=99 means a GPU that is not there"):
        FSDP(linear, device_id=99)
    assert isinstance(linear.weight, nn.Parameter)


@on_ranks(1)
def test_what_a_policy_says_of_a_module_goes_before_its_being_left_out():
    own, left_out = MixedPrecision(torch.float16), MixedPrecision(torch.bfloat16)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Sequential(nn.BatchNorm1d(6)))
    policy = CustomPolicy(lambda m: {"mixed_precision": own} if m is module[1] else False)
    model = FSDP(module, auto_wrap_policy=policy, mixed_precision=left_out)
    found = {unit.name: unit.precision for unit in model.engine.units}
    assert found == {"": left_out, "1": own, "2.0": FULL_PRECISION}


@pytest.mark.gpus(1)
@on_ranks(1)
def test_a_model_is_moved_to_its_gpu_unit_by_unit_and_trains_there():
    expected, model = layers(), layers().cpu()
    found = FSDP(model, device_id=device())
    assert next(found.parameters()).device == here()
    assert torch.equal(step(found), step(expected))
    offloaded = FSDP(layers(), cpu_offload=CPUOffload(offload_params=True))
    assert offloaded._unit.offload_from == here() != offloaded._unit.sharded_flat_param.device


@pytest.mark.parametrize("limit", [None, "2"])
@on_ranks(2)
def test_a_limit_of_another_kind_is_refused_before_anything_is_changed(limit):
    def settings(module):
        first = getattr(module, "out_features", None) == 3
        return first or ({"limit_all_gathers": limit} if isinstance(module, nn.Linear) else False)

    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)).to(device())
    before = list(module.modules()), list(module.parameters())
    expected = "limit_all_gathers=.*: expected True .*, False .*, a number of units"
    with pytest.raises(TypeError, match=expected):
        FSDP(module, auto_wrap_policy=CustomPolicy(settings))
    hybrid = ShardingStrategy.HYBRID_SHARD
    made = patch("minifsdp.comm.groups.groups_by_host")  # all ranks have to make groups together
    with made as groups, pytest.raises(TypeError, match=expected):
        FSDP(module, sharding_strategy=hybrid, limit_all_gathers=limit)
    assert not groups.called
    after = list(module.modules()), list(module.parameters())
    assert [list(map(id, found)) for found in after] == [list(map(id, found)) for found in before]
