"""shard_changes.py: what a program does to sharded flat parameters between two steps."""

import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.streams import BACKENDS
from minifsdp.core.unit_state import Purpose
from minifsdp.support.shard_changes import common_device, follow_changes, was_moved
from tests.lone_unit import lone_unit
from tests.pretended_gpu import GPU, PretendedGpu
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step
from tests.support.test_unsharded_storage import LOW


@pytest.mark.direct
class TestDirectly:
    def test_new_values_get_padding_and_the_optimizer_writes_where_a_gather_reads(self):
        with lone_unit(rank=2, ranks=3) as lone:
            shard, before = lone.unit.sharded_flat_param, lone.unit.padded_shard
            assert shard.tolist() == [9, 10] and not was_moved(lone.unit)
            shard.data = torch.tensor([5.0, 6.0])
            assert was_moved(lone.unit)
            follow_changes(lone.unit)
            assert lone.unit.sharded_flat_param is shard and not was_moved(lone.unit)
            assert lone.unit.padded_shard.tolist() == [5, 6, 0, 0]
            shard.data.fill_(7)
            assert lone.unit.padded_shard.tolist() == [7, 7, 0, 0]
            assert before.tolist() == [9, 10, 0, 0]

    def test_what_was_not_moved_is_left_as_it_is(self):
        with lone_unit(ranks=3) as lone:
            before, made = lone.unit.padded_shard, lone.unit.unsharded
            lone.unit.sharded_flat_param.data.fill_(7)  # as an optimizer does
            follow_changes(lone.unit)
            assert lone.unit.padded_shard is before and made in lone.unit.unsharded_by_dtype

    def test_units_without_parameters_have_no_say_in_the_device(self):
        with lone_unit(ranks=3) as lone:
            assert common_device([lone.unit]) == torch.device("cpu")
            lone.unit.numel = 0
            assert common_device([lone.unit]) is None


@on_ranks(2)
def test_a_shard_that_the_user_replaced_is_followed():
    model, x = stack(), batch()
    before = model(x)
    for param in model.parameters():
        param.data = param.data * 2
    assert not torch.equal(model(x), before)
    unit = model.engine.units[1]
    assert unit.padded_shard.data_ptr() == unit.sharded_flat_param.data_ptr()


@on_ranks(3)
def test_a_model_may_be_cast_after_wrapping():
    model, x = stack(), batch().double()
    expected = layers().double()(x)
    assert torch.equal(model.double()(x), expected)
    assert model.engine.units[1].unsharded.flat_param.dtype == torch.float64


@on_ranks(2)
def test_a_shard_of_another_size_is_refused_by_name():
    model = stack()
    model.engine.units[2].sharded_flat_param.data = torch.zeros(3, device=device())
    with pytest.raises(ValueError, match="unit '2' has 3 elements; this rank's chunk has 21"):
        model(batch())


@on_ranks(2)
def test_a_shard_that_should_be_on_the_host_and_is_not_is_refused_by_name():
    model = stack(cpu_offload=CPUOffload(True))
    model.module[2].to("meta")
    with pytest.raises(RuntimeError, match=r"unit '2' were moved to meta, .* live on the CPU"):
        model(batch())


@on_ranks(2)
def test_freezing_after_wrapping_is_followed():
    model = stack()
    model.engine.units[2].sharded_flat_param.requires_grad_(False)
    step(model)
    grads = [unit.sharded_flat_param.grad is not None for unit in model.engine.units]
    assert grads == [True, True, False, True, True]
    model.engine.units[2].sharded_flat_param.requires_grad_(True)
    step(model)
    assert model.engine.units[2].sharded_flat_param.grad is not None


@pytest.mark.parametrize("change", ["double", "freeze", "replace"])
@on_ranks(2)
def test_a_graph_whose_full_is_gone_is_refused_by_name(change):
    model, x = stack(), batch()
    out = model(x)
    unit = model.engine.root
    if change == "double":
        model.double()
    elif change == "freeze":
        unit.sharded_flat_param.requires_grad_(False)
    else:
        unit.sharded_flat_param.data = unit.sharded_flat_param.data.clone()
    model(x.to(unit.sharded_flat_param.dtype))
    message = "parameters of unit .* were moved, cast, frozen or replaced between a forward and its"
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [None, LOW], ids=str)
@on_ranks(2)
def test_a_unit_without_parameters_has_a_dtype_and_a_place_all_the_same(dtype):
    """Both are those of its inputs and buffers; the model may be moved until it runs."""
    inside = nn.Sequential(nn.Flatten(), FSDP(nn.Linear(6, 6).to(device())))
    model = FSDP(inside, mixed_precision=MixedPrecision(dtype))
    model.engine.start(Purpose.TRAIN)
    assert model._unit.unsharded.dtype is (dtype or torch.float32)
    assert model._unit.device == device()
    if device().type == "cpu":
        with patch.dict(BACKENDS, meta=BACKENDS["cpu"]):
            model.to("meta")
            model.engine.start(Purpose.TRAIN)
        assert model._unit.device == model._unit.unsharded.flat_param.device == torch.device("meta")


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2, pretended_gpu=True)
def test_with_offload_it_computes_where_the_others_do(rows):
    """Its group, which is gloo's, says that this is the CPU; its shard is there in any case."""
    inside = nn.Sequential(nn.BatchNorm1d(6, affine=False), layers()).to(device())
    settings = {"cpu_offload": CPUOffload(True), "use_orig_params": rows}
    model = FSDP(inside, auto_wrap_policy=ModuleWrapPolicy([nn.Linear]), **settings)
    assert not model._unit.numel
    assert model(batch()).device == inside[0].running_mean.device == GPU
    assert model._unit.device == GPU and model._unit.sharded_flat_param.is_cpu
    assert model.cpu_offload.offload_params


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_what_was_made_in_an_inference_may_be_trained_with(strategy):
    """The first forward of all, and the first after the model was cast, makes tensors to keep."""
    model = stack(sharding_strategy=ShardingStrategy[strategy])
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        with torch.inference_mode():
            model(batch().to(dtype))
        model(batch().to(dtype)).pow(2).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(param.grad.dtype is dtype for param in model.parameters())
        model.zero_grad()


WAYS = {
    "chunks": FSDP,
    "rows": lambda model: FSDP(model, use_orig_params=True),
    "fully_shard": fully_shard,
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_so_may_be_a_model_that_was_sharded_and_cast_in_an_inference(way):
    with torch.inference_mode():
        model = WAYS[way](layers(1))
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            assert torch.equal(model(batch().to(dtype)), layers(1).to(dtype)(batch().to(dtype)))
    model(batch().double()).pow(2).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("in_rows", [False, True])
@on_ranks(2)
def test_a_forward_does_not_run_beside_the_gradient_of_the_step_before(in_rows):
    model = stack(use_orig_params=in_rows)
    model(batch()).sum().backward()
    grads = [unit.sharded_flat_param.grad for unit in model.engine.units if unit.numel]
    storages = [weakref.ref(grad.untyped_storage()) for grad in grads]
    del grads
    model.zero_grad()
    model(batch())
    assert storages and not any(storage() for storage in storages)


@on_ranks(2)
def test_units_on_several_devices_are_refused():
    model = stack()
    model.engine.units[2].sharded_flat_param = nn.Parameter(torch.empty(21, device="meta"))
    with pytest.raises(ValueError, match=r"all units have to be on one device.*meta: '2'"):
        model(batch())


KERNELS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel))
@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_a_step_is_noticed_whichever_kernel_makes_it(rows, kernel):
    model = stack(use_orig_params=rows)
    optimizer = torch.optim.AdamW(model.parameters(), **kernel)
    loss = model(batch()).sum()
    optimizer.step()  # without gradients, which changes nothing
    loss.backward()
    loss = model(batch()).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="unit <root> were changed in place"):
        loss.backward()


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_a_device_that_the_group_does_not_carry_is_refused_by_name(rows):
    only_cuda = dist.new_group(backend="cuda:gloo")  # as a group of NCCL's is
    model = stack(process_group=only_cuda, use_orig_params=rows)
    said = r"parameter '0.weight' of unit <root> is on cpu, .* carries only cuda:gloo .* device_id="
    for use in (lambda: model(batch()), lambda: FSDP.summon_full_params(model).__enter__()):
        with pytest.raises(RuntimeError, match=said):
            use()


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_so_it_is_if_a_model_is_moved_there_later(rows):
    model = stack(use_orig_params=rows)
    step(model)
    with PretendedGpu(), patch.object(dist, "get_backend_config", lambda group: "cpu:gloo"):
        model.to("cuda")
        with pytest.raises(RuntimeError, match=r"is on cuda:0, .* carries only cpu:gloo"):
            model(batch().to("cuda"))
        model.to("cpu")
        step(model)
