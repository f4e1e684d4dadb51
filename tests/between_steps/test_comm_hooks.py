"""comm_hooks.py: gradients that are averaged in another way."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import device, on_ranks
from tests.small import batch, gathered_gradients, reductions, stack, step

NO_SHARD = ShardingStrategy.NO_SHARD
LAYOUTS = {
    "chunks": {},
    "rows": {"use_orig_params": True},
    "whole": {"sharding_strategy": NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(True), "use_orig_params": True},
}


class Calls(list):
    """The state of `mean_of_squares`."""


def mean_of_squares(calls, gradient, shard=None):
    """A user's own hook: nothing that minifsdp could do without calling it."""
    calls.append(gradient.numel())
    dist.all_reduce(gradient.square_())
    if shard is not None:
        gradient = gradient.chunk(dist.get_world_size())[dist.get_rank()]
        shard.copy_(gradient)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_users_hook_decides_what_the_optimizer_gets(layout):
    """Also where widths are not divisible by the number of ranks, so that parts are padded."""
    model, calls = stack(2, 5, **LAYOUTS[layout]), Calls()
    model.register_comm_hook(calls, mean_of_squares)
    plain = stack(2, 5, sharding_strategy=NO_SHARD)
    plain.register_comm_hook(None, lambda state, gradient: None)  # this rank's own gradients
    with reductions() as started:
        for either in (model, plain):
            either(batch(5)).pow(2).sum().backward()
    assert len(started) == 6
    for unit in model.engine.units:  # nothing is averaged once more
        assert [stage.name for stage in unit.stages[:1]] == ["mean_of_squares"]
        assert len(unit.stages) == 1 + (unit.offload_from is not None)
    own, found = gathered_gradients(plain), gathered_gradients(model)
    assert len(calls) == 3 and found.keys() == own.keys()
    for name, gradient in own.items():
        dist.all_reduce(gradient.square_())
        assert torch.equal(found[name].to(device()), gradient), name  # it may be offloaded


HOOKS = {fp16_compress_hook: torch.float16, bf16_compress_hook: torch.bfloat16}


@pytest.mark.parametrize("layout", ["chunks", "rows", "whole"])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@on_ranks(2)
def test_torchs_compression_is_a_dtype_of_the_reduction(hook, layout):
    """It is not called, so communication overlaps as always; what it computes is the same."""

    def called(state, gradient, shard=None):  # torch's code, but for what fails on a CPU
        hook(state, gradient, shard)

    compressed, hooked = (stack(2, **LAYOUTS[layout]) for _ in range(2))
    compressed.register_comm_hook(LowPrecisionState(dist.group.WORLD), hook)
    assert compressed.mixed_precision.reduce_dtype is HOOKS[hook]
    assert all(unit.comm_hook is None for unit in compressed.engine.units)
    low = stack(2, mixed_precision=MixedPrecision(reduce_dtype=HOOKS[hook]), **LAYOUTS[layout])
    hooked.register_comm_hook(LowPrecisionState(dist.group.WORLD), called)
    decompress, default_hooks._decompress = default_hooks._decompress, _decompress
    try:
        for model in (compressed, low, hooked):
            step(model)
    finally:
        default_hooks._decompress = decompress
    expected = gathered_gradients(hooked)
    for model in (compressed, low):
        for name, gradient in gathered_gradients(model).items():
            assert gradient.dtype is torch.float32 and torch.equal(gradient, expected[name])


def _decompress(state, gradient):
    gradient.data = gradient.data.to(state.parameter_type)


@pytest.mark.parametrize("layout, hook", [
    ("chunks", reduce_scatter_hook), ("rows", reduce_scatter_hook), ("whole", allreduce_hook),
])  # fmt: skip
@on_ranks(2)
def test_torchs_other_hooks_change_nothing(layout, hook):
    low = MixedPrecision(torch.bfloat16, torch.float32)
    for state in (DefaultState(dist.group.WORLD), DefaultState(dist.new_group())):
        model, plain = (stack(2, mixed_precision=low, **LAYOUTS[layout]) for _ in range(2))
        model.register_comm_hook(state, hook)
        assert model.mixed_precision.reduce_dtype is torch.float32
        step(model)
        step(plain)
        expected = gathered_gradients(plain)
        for name, gradient in gathered_gradients(model).items():
            assert torch.equal(gradient, expected[name])


@on_ranks(2)
def test_a_hook_for_other_ranks_than_the_units_is_called():
    """Each rank averages with itself, as in a first phase of training without communication."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = stack(1, sharding_strategy=NO_SHARD)
    model.register_comm_hook(DefaultState(alone), allreduce_hook)
    (step(model), model.zero_grad())
    step(model)
    gradient = torch.cat([p.grad for p in model.parameters()])
    other = gradient.clone()
    dist.broadcast(other, 0)
    assert torch.equal(gradient, other) is (dist.get_rank() == 0)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.used(x)


@on_ranks(2)
def test_a_hook_may_change_the_marks_of_parameters_that_nobody_uses():
    """In rows they are negative zeros, and this hook makes some of all others."""

    def negative(state, gradient, shard):
        dist.all_reduce(gradient.neg_())
        shard.copy_(gradient.chunk(2)[dist.get_rank()])

    model = FSDP(HalfUsed().to(device()), use_orig_params=True)
    model.register_comm_hook(None, negative)
    model(batch()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("layout", ["chunks", "whole"])
@on_ranks(2)
def test_what_a_hook_lets_go_of_is_kept_until_it_is_sent(layout):
    """torch's compression puts other memory in the gradient's place, while a GPU still reads what
    was there. Who has started the reduction keeps the gradient's own tensor, and its memory."""

    def replaces(state, gradient, shard=None):
        gradient.data = gradient.data.clone()

    model = stack(1, **LAYOUTS[layout])
    model.register_comm_hook(None, replaces)
    step(model)  # which chooses the stages
    unit = model.engine.units[0]
    gradient = torch.ones(unit.layout.padded_numel, device=device())
    address = gradient.data_ptr()
    unit.stages[0].launch(unit, gradient)
    assert gradient.data_ptr() == address


@on_ranks(2)
def test_gradients_that_wait_are_handed_to_the_hook_in_one():
    model, calls = stack(1), Calls()
    model.register_comm_hook(calls, mean_of_squares)
    with model.no_sync():
        step(model, 0)
    assert not calls
    step(model, 1)
    plain = stack(1, sharding_strategy=NO_SHARD)
    plain.register_comm_hook(None, lambda state, gradient: None)
    (step(plain, 0), step(plain, 1))
    own = gathered_gradients(plain)
    for name, gradient in gathered_gradients(model).items():
        dist.all_reduce(own[name].square_())
        torch.testing.assert_close(gradient, own[name])


@on_ranks(2)
def test_the_gradient_comes_in_the_dtype_of_the_reduction():
    seen = []

    def hook(state, gradient, shard):
        seen.append((gradient.dtype, shard.dtype))
        reduce_scatter_hook(state, gradient, shard)
        shard.data = shard.data.double()

    model = stack(1, mixed_precision=MixedPrecision(torch.bfloat16, torch.float16))
    model.register_comm_hook(DefaultState(dist.group.WORLD), hook)
    step(model)
    assert set(seen) == {(torch.float16, torch.float16)}
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


@on_ranks(2)
def test_what_is_no_hook_is_refused_before_the_first_step():
    model, whole = stack(1), stack(1, sharding_strategy=NO_SHARD)
    with pytest.raises(TypeError, match="a communication hook is a function, not 3"):
        model.register_comm_hook(None, 3)
    with pytest.raises(
        TypeError, match=r"allreduce_hook cannot be called with \(state, gradient, s"
    ):
        model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(TypeError, match=r"\(state, gradient\), as unit <root>.*NO_SHARD do not"):
        whole.register_comm_hook(None, reduce_scatter_hook)
    with pytest.raises(RuntimeError, match="Call it on the outermost"):
        model[1].register_comm_hook(None, mean_of_squares)
    whole.register_comm_hook(Calls(), partial(mean_of_squares))
    with pytest.raises(RuntimeError, match=r"with mean_of_squares, but unit <root> has partial"):
        whole.register_comm_hook(Calls(), mean_of_squares)
    step(model)
    with pytest.raises(RuntimeError, match="called after the first step"):
        model.register_comm_hook(Calls(), mean_of_squares)


@on_ranks(4)
def test_hybrid_strategies_have_no_hooks():
    mesh = init_device_mesh(device().type, (2, 2))
    model = stack(1, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(ValueError, match="unit <root> has a hybrid strategy"):
        model.register_comm_hook(None, mean_of_squares)


@pytest.mark.parametrize("hook", [mean_of_squares, fp16_compress_hook], ids=["own", "torch's"])
@on_ranks(2)
def test_ranks_with_different_hooks_are_told(hook):
    model = stack(1)
    if dist.get_rank() == 1:
        model.register_comm_hook(LowPrecisionState(dist.group.WORLD), hook)
    with pytest.raises(ValueError, match=r"different modules.*(mean_of_squares|float16)"):
        step(model)
