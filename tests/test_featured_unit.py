"""featured_unit.py: a unit with all that features need of it."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import CPUOffload, FlatParameter, MixedPrecision, ModuleWrapPolicy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.unit_state import Purpose, ShardedState
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks
from tests.small import Block, batch, stack, step, storage
from tests.support.test_unsharded_storage import LOW, prepared


@pytest.mark.direct
class TestDirectly:
    def test_the_optimizer_gets_this_ranks_chunk_without_padding(self):
        for rank, chunk in enumerate([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]):
            with lone_unit(rank, ranks=3) as lone:
                assert isinstance(lone.unit.sharded_flat_param, nn.Parameter)
                assert lone.unit.sharded_flat_param.tolist() == chunk
                assert lone.unit.padded_shard.tolist() == chunk + [0] * (4 - len(chunk))

    def test_before_it_is_gathered_it_has_a_size_and_no_memory(self):
        with lone_unit(ranks=3) as lone:
            assert lone.unit.numel == 10 and lone.unit.layout.padded_numel == 12
            assert lone.unit.unsharded.data.shape == (12,) and lone.memory == 0
            assert lone.unit.unsharded.needs_unshard
            assert lone.unit.state.sharded is ShardedState.SHARDED

    def test_what_is_not_sharded_is_computed_with_where_it_is(self):
        with lone_unit(ranks=1) as lone:
            assert not lone.unit.unsharded.needs_unshard
            assert lone.unit.unsharded.data.data_ptr() == lone.unit.padded_shard.data_ptr()


@on_ranks(2)
def test_the_shard_is_this_ranks_chunk_and_a_parameter():
    linear = nn.Linear(3, 5).to(device())  # 20 elements
    expected = torch.cat([linear.weight.detach().reshape(-1), linear.bias.detach()])
    unit = FSDP(linear)._unit
    assert isinstance(unit.sharded_flat_param, FlatParameter) and isinstance(
        unit.sharded_flat_param, nn.Parameter
    )
    assert torch.equal(unit.sharded_flat_param, expected.chunk(2)[dist.get_rank()])


@on_ranks(4)
def test_padding_never_reaches_the_optimizer():
    model = FSDP(nn.Linear(5, 1, bias=False).to(device()))  # 5 elements over 4 ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1)
    model(torch.ones(1, 5, device=device())).sum().backward()
    expected = [2, 2, 1, 0][dist.get_rank()]
    assert (
        model._unit.sharded_flat_param.numel()
        == model._unit.sharded_flat_param.grad.numel()
        == expected
    )
    with torch.no_grad():
        model._unit.sharded_flat_param.add_(1)  # noise, say
    optimizer.step()
    assert not model._unit.padded_shard[expected:].any()


@on_ranks(2)
def test_the_original_parameters_are_gone():
    linear = nn.Linear(64, 64).to(device())
    original = weakref.ref(linear.weight)
    model = FSDP(linear)
    gc.collect()
    assert original() is None
    assert [name for name, _ in model.named_parameters()] == ["_flat_param"]


@on_ranks(2)
def test_a_unit_without_parameters_gathers_nothing():
    model = FSDP(nn.Sequential(FSDP(nn.Tanh()), FSDP(nn.Linear(6, 6).to(device()))))
    step(model)
    assert [name for name, _ in model.named_parameters()] == ["1._flat_param"]
    assert model.engine.stats.all_gathers == 2
    assert all(unit.state.sharded is ShardedState.SHARDED for unit in model.engine.units)


# ------------------------------------------------------------------- one `full` for each dtype


@pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["", "offload"])
@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=str)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_only_what_is_there_in_the_right_dtype_and_place_is_computed_with_as_it_is(
    strategy, dtype, offload
):
    unit = prepared(strategy, cpu_offload=offload)
    unit.compute_in(dtype)
    as_it_is = strategy == "NO_SHARD" and dtype is torch.float32 and offload is None
    assert unit.unsharded.needs_unshard == (not as_it_is)
    assert (unit.unsharded.flat_param.data_ptr() == unit.padded_shard.data_ptr()) == as_it_is
    assert storage(unit) == (42 * 4 if as_it_is else 0)


@on_ranks(1)
def test_integers_are_never_computed_with_low():
    module = nn.Identity()
    module.index = nn.Parameter(torch.arange(6, device=device()), requires_grad=False)
    model = FSDP(module, mixed_precision=MixedPrecision(LOW, keep_low_precision_grads=True))
    model.engine.start(Purpose.TRAIN)
    assert model._unit.unsharded.dtype is torch.int64


@pytest.mark.parametrize("asked_for", [True, False])
@on_ranks(1)
def test_dtypes_follow_the_roots_mode_if_that_is_asked_for(asked_for):
    module = nn.Linear(6, 6, device=device())
    module.register_buffer("buffer", torch.ones(6))
    precision = MixedPrecision(LOW, buffer_dtype=LOW, full_precision_in_eval=asked_for)
    unit, dtypes = FSDP(module, mixed_precision=precision)._unit, []
    for purpose in (Purpose.TRAIN, Purpose.EVAL, Purpose.TRAIN):
        unit.choose_precision(purpose)
        assert module.buffer.dtype is unit.unsharded.dtype
        dtypes.append(unit.unsharded.dtype)
    assert dtypes == [LOW, torch.float32 if asked_for else LOW, LOW]


@on_ranks(2)
def test_what_torch_puts_in_the_place_of_a_frozen_shard_is_frozen():
    """Moved to another kind of device, or where torch is told to, a parameter is another object."""
    model = stack()
    model.engine.units[2].sharded_flat_param.requires_grad_(False)
    before = list(model.parameters())
    trained = [param.requires_grad for param in before]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert not any(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert [param.requires_grad for param in model.parameters()] == trained
    model(batch().double()).pow(2).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == trained


# ----------------------------------------------- what a backward finds where another forward was


class Recomputed(Block):
    """Runs again in its backward, with the views that its unit shows then."""

    reentrant = False  # if so, what runs again is what gradients go through

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
@on_ranks(2)
def test_what_runs_again_after_an_evaluation_finds_views_that_get_gradients(mode, exact, reentrant):
    gradients, Recomputed.reentrant = [], reentrant
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = FSDP(
            nn.Sequential(nn.Linear(6, 6), Recomputed(nn.Linear(6, 6), nn.Tanh())).to(device()),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(LOW, full_precision_in_eval=True) if exact else None,
        )
        loss = model(batch()).pow(2).sum()
        if evaluates:
            with getattr(torch, mode)():
                model.eval()(batch(step=1))
        loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        assert expected.any() and torch.equal(found, expected)


@on_ranks(2)
def test_the_marks_of_a_unit_without_elements_are_zero():
    """Nobody gathers it, so they are what its memory has. Ranks compare them with its values."""
    block = Block()
    block.first, block.second = (nn.Parameter(torch.empty(3, 0)) for _ in range(2))
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which writes NaN to the memory of torch.empty()
    try:
        unit = FSDP(block.to(device()), use_orig_params=True).engine.root
        with FSDP.summon_full_params(unit.module):
            pass
        unit.compute_in(torch.float32)
    finally:
        torch.use_deterministic_algorithms(was)
    assert unit.unsharded.data.tolist() == [0.0] * 16
