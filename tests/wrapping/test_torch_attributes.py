"""torch_attributes.py: what scripts read of a wrapper, compared with torch's own."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.wrapping.torch_attributes import TORCH_ATTRIBUTES
from tests.ranks import device, on_ranks
from tests.small import Block, batch, layers, stack, step

SETTINGS = {
    "default": lambda fsdp: {},
    "kept": lambda fsdp: {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP},
    "low": lambda fsdp: {"mixed_precision": fsdp.MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": lambda fsdp: {"cpu_offload": fsdp.CPUOffload(offload_params=True)},
    "hybrid": lambda fsdp: {
        "sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh(device().type, (2, 2)),
    },
    "hybrid, kept": lambda fsdp: {
        "sharding_strategy": fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,
        "device_mesh": init_device_mesh(device().type, (2, 2)),
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(4)
def test_they_answer_as_torchs_do(setting):
    ours = stack(1, 8, **SETTINGS[setting](minifsdp))
    model = theirs.FullyShardedDataParallel(
        layers(1, 8),
        device_id=device(),
        auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({Block}),
        **SETTINGS[setting](theirs),
    )
    for mine, expected in ((ours, model), (ours[1], model[1])):
        assert mine.compute_device == expected.compute_device
        assert mine.rank == expected.rank and mine.world_size == expected.world_size
        ranks = dist.get_process_group_ranks
        assert ranks(mine.process_group) == ranks(expected.process_group)
        assert mine.sharding_strategy.name == expected.sharding_strategy.name
        assert mine.cpu_offload.offload_params == expected.cpu_offload.offload_params
        for dtype in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            found = getattr(mine.mixed_precision, dtype)
            assert found == getattr(expected.mixed_precision, dtype)
        assert [p.shape for p in mine.params] == [p.shape for p in expected.params]
        assert mine.params[0] is next(iter(mine.parameters()))


@on_ranks(2)
def test_a_model_that_is_whole_has_the_ranks_that_it_averages_over():
    model = stack(1, sharding_strategy=ShardingStrategy.NO_SHARD)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert model.world_size == 2 and model.rank == dist.get_rank()


@on_ranks(2)
def test_in_rows_the_params_are_those_that_the_optimizer_steps():
    model = stack(1, use_orig_params=True)
    assert [id(p) for p in model.params + model[1].params] == [id(p) for p in model.parameters()]
    step(model)
    assert all(p.grad is not None for p in model.params)


@on_ranks(1)
def test_a_unit_without_parameters_has_no_params():
    model = FSDP(nn.Sequential(nn.Tanh(), Block(nn.Linear(2, 2))).to(device()),
                 auto_wrap_policy=minifsdp.ModuleWrapPolicy({Block}))  # fmt: skip
    assert model.params == [] and len(model[1].params) == 1
    assert not model._has_params and model._flat_param is None
    assert model[1]._has_params and model[1]._flat_param is model[1].params[0]


@on_ranks(1)
def test_the_modules_own_attributes_come_first():
    model = nn.Linear(2, 2).to(device())
    model.rank, model.params = 8, {"of": "LoRA"}
    model = FSDP(model, cpu_offload=CPUOffload(), mixed_precision=MixedPrecision())
    assert model.rank == 8 and model.params == {"of": "LoRA"} and model.world_size == 1
    del model.params
    assert isinstance(model.params[0], minifsdp.FlatParameter)
    assert not TORCH_ATTRIBUTES.keys() & vars(model).keys()


CHOICES = [
    {"forward_prefetch": False, "backward_prefetch": None, "limit_all_gathers": False},
    {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST", "limit_all_gathers": True},
    {"use_orig_params": True, "forward_prefetch": False},
]


@pytest.mark.parametrize("choice", CHOICES)
@on_ranks(2)
def test_every_wrapper_answers_how_its_root_runs_a_step(choice):
    def settings(fsdp):
        when = choice.get("backward_prefetch", "BACKWARD_PRE")
        member = fsdp.BackwardPrefetch[when] if when else None
        return {**choice, "backward_prefetch": member}

    ours = stack(1, 8, **settings(minifsdp))
    model = theirs.FullyShardedDataParallel(
        layers(1, 8),
        device_id=device(),
        auto_wrap_policy=theirs.wrap.ModuleWrapPolicy({Block}),
        **settings(theirs),
    )
    ours(batch(8)).sum().backward()
    model(batch(8)).sum().backward()  # who the root is torch knows after a step
    for mine, expected in ((ours, model), (ours[1], model[1])):
        for name in ("limit_all_gathers", "forward_prefetch", "_is_root"):
            assert getattr(mine, name) == getattr(expected, name), name
        found = mine.backward_prefetch
        assert found is None if expected.backward_prefetch is None else (
            found.name == expected.backward_prefetch.name
        )  # fmt: skip


@on_ranks(2)
def test_the_training_state_is_in_torchs_words():
    ours = stack(1)
    seen = []
    ours[1][0].register_forward_hook(lambda *_: seen.append(ours[1].training_state))
    ours(batch())
    seen.append(ours.training_state)
    with FSDP.summon_full_params(ours, recurse=False):
        seen += [ours.training_state, ours[1].training_state]
    names = [state.name for state in seen]
    assert names == ["FORWARD_BACKWARD", "IDLE", "SUMMON_FULL_PARAMS", "IDLE"]
    assert ours.training_state.name == "IDLE"


def casts_as_accelerate_does(wrap, low, rows):
    policy = theirs.wrap.ModuleWrapPolicy({Block})
    settings = {"mixed_precision": low, "use_orig_params": rows, "auto_wrap_policy": policy}
    model = wrap(layers(1, 8).bfloat16(), device_id=device(), **settings)
    names = []
    for module in wrap.fsdp_modules(model):
        assert module._has_params and module._use_orig_params is rows
        param = module._flat_param
        names.append(param._fqns)
        param.data = param.data.to(torch.float32)
        module._handle._orig_param_dtype = torch.float32
        assert module._handle.flat_param is param
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        model(batch(8)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with wrap.summon_full_params(model):
        return names, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_accelerate_casts_a_model_by_its_flat_parameters(rows):
    of_torchs = theirs.MixedPrecision(torch.bfloat16, torch.float32)
    names, values = casts_as_accelerate_does(theirs.FullyShardedDataParallel, of_torchs, rows)
    found, ours = casts_as_accelerate_does(
        FSDP, MixedPrecision(torch.bfloat16, torch.float32), rows
    )
    assert found == names
    for (name, value), mine in zip(values.items(), ours.values(), strict=True):
        assert mine.dtype is value.dtype is torch.float32 and torch.equal(mine, value), name


@on_ranks(2)
def test_a_flat_parameter_of_rows_casts_what_is_trained():
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device(), torch.bfloat16)
    block[0].requires_grad_(False)
    model = FSDP(block, use_orig_params=True)
    model._flat_param.data = model._flat_param.data.double()
    assert [(p.dtype, p.requires_grad) for p in model.parameters()] == [
        *[(torch.bfloat16, False)] * 2,
        *[(torch.float64, True)] * 2,
    ]


@on_ranks(2)
def test_a_unit_is_free_between_steps_when_verl_frees_it():
    model = stack(1, 8)
    with torch.no_grad():
        model(batch(8))
    model._handle.reshard(True)
    assert [unit.unsharded.storage.nbytes() for unit in model._engine.units] == [0, 0]
