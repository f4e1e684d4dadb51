"""The reference: train a case under DDP and under minifsdp, and compare.

What differs between the two is sharding alone. Under mixed precision DDP trains a copy of the model
in the low dtype, whose inputs, buffers and reductions are cast as minifsdp casts them; an optimizer
steps exact parameters, which are copied to it before each forward.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel as DDP

import minifsdp.comm.collectives
import minifsdp.core.reshard
from minifsdp import CustomPolicy, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.groups import HYBRID
from minifsdp.core.unit_state import ShardedState
from minifsdp.no_sync import NO_SYNC
from tests.models import CASES, Case
from tests.ranks import cached_in_a_world, device
from tests.small import replaced, travels

STEPS = 3
FULL = MixedPrecision()
BF16 = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
BF16_SUMMED_IN_FP32 = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)

BOUND = 2e-6
"""Largest difference from DDP with more than two ranks, relative to the largest element of a tensor
(at least 1). Both add up the same W gradients, in different orders: W - 1 additions, each off by
at most half of 2**-23 of the sum. At W = 4 that is 2e-7 a step, and there are three steps. The rest
is for what the network makes of a perturbed parameter. With two ranks the sums are the same
sums."""

LOW_BOUND = 2**-11
"""The same in bfloat16, after one step: half of 2**-8 of the sum for each of three additions, times
the learning rate, 0.05. Only one step, because afterwards a parameter that is off in its last bit
is rounded the other way here and there; what a network makes of that says nothing of sharding."""


# --------------------------------------------------------------------------------------- training


def nothing() -> None:
    """Happens before each forward and each optimizer step, unless a caller has something to do."""


def train(
    model: nn.Module,
    case: Case,
    steps: int = STEPS,
    parameters: list[nn.Parameter] | None = None,
    before_forward: Callable[[], None] = nothing,
    before_step: Callable[[], None] = nothing,
) -> list[Tensor]:
    """Momentum, because plain SGD forgets, and Adam hides a gradient that is off by a factor."""
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())  # for dropout, too
        inputs = [tensor.to(device()) for tensor in case.inputs()]
        before_forward()
        loss = case.loss(model(*inputs), *inputs)
        after_loss()
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def after_loss() -> None:
    """Nothing, unless :func:`delays` puts a pause here."""


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().to(device())


# ------------------------------------------------------------------------------------- under DDP

Result = tuple[list[Tensor], dict[str, Tensor]]  # losses, and parameters by name


@cache
def reference(name: str, precision: MixedPrecision = FULL, steps: int = STEPS) -> Result:
    """Losses and parameters of a case under DDP."""
    case = CASES[name]
    exact = build(case)
    if precision == FULL:
        losses = train(ddp(exact, case), case, steps)
    else:
        losses = train_low(exact, case, precision, steps)
    return losses, {n: p.detach().clone() for n, p in exact.named_parameters()}


def experts(module: nn.Module, case: Case) -> set[str]:
    """The names of parameters that each rank has for itself."""
    return {
        f"{name}.{parameter}"
        for name, child in module.named_modules()
        if isinstance(child, case.experts)
        for parameter, _ in child.named_parameters()
    }


def ddp(module: nn.Module, case: Case) -> DDP:
    module._ddp_params_and_buffers_to_ignore = experts(module, case)
    return DDP(module, find_unused_parameters=case.unused)


def train_low(exact: nn.Module, case: Case, precision: MixedPrecision, steps: int) -> list[Tensor]:
    """Train `exact` by the gradients of a copy in the low dtype; BatchNorm stays exact there."""
    low = copy.deepcopy(exact)
    for module in low.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(lambda _, args: args[0].float())
            module.register_forward_hook(lambda _, args, out: out.to(precision.param_dtype))
            continue
        for param in module.parameters(recurse=False):
            param.data = param.data.to(precision.param_dtype)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(precision.buffer_dtype))
    low.register_forward_pre_hook(
        lambda _, args: tuple(
            t.to(precision.param_dtype) if t.is_floating_point() else t for t in args
        )
    )
    own = experts(exact, case)
    pairs = list(zip(exact.named_parameters(), low.parameters(), strict=True))

    def copy_parameters() -> None:
        for (_, param), its_copy in pairs:
            its_copy.data.copy_(param)

    def hand_over_gradients() -> None:
        for (name, param), its_copy in pairs:
            grad, its_copy.grad = its_copy.grad, None
            if grad is not None and precision.reduce_dtype is not None:
                grad = grad.to(precision.reduce_dtype)
                if name not in own:  # DDP averages in the dtype of the gradients, and no other
                    dist.all_reduce(grad.div_(dist.get_world_size()))
            param.grad = None if grad is None else grad.to(param.dtype)

    model = ddp(low, case) if precision.reduce_dtype is None else low
    parameters = list(exact.parameters())
    return train(model, case, steps, parameters, copy_parameters, hand_over_gradients)


# -------------------------------------------------------------------------------- under minifsdp

INITS = ("before", "after", "device_id", "meta", "sync")
"""How parameters come to be: on the device before wrapping, or moved there after it, or by
`device_id`; on the meta device until they are sharded; made from rank 0's."""


@cached_in_a_world
def mesh(replicas: int) -> DeviceMesh:
    """A grid of all ranks with this many rows."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))


@cached_in_a_world
def alone() -> dist.ProcessGroup:
    """This rank's group of one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def grid(strategy: ShardingStrategy) -> DeviceMesh:
    """Square with four ranks. With fewer, the two hybrid strategies take one extreme each: chunks
    of everything on one rank, replicated; and one row of ranks that is not."""
    if dist.get_world_size() == 4:
        return mesh(2)
    return mesh(dist.get_world_size() if strategy is ShardingStrategy.HYBRID_SHARD else 1)


def policy(case: Case) -> CustomPolicy:
    own = {"sharding_strategy": ShardingStrategy.FULL_SHARD, "device_mesh": None}

    def settings(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, case.experts):
            return {**own, "process_group": alone()}
        return isinstance(module, case.units)

    return CustomPolicy(settings)


def sharded(case: Case, init: str = "before", **settings: Any) -> FSDP:
    if settings.get("sharding_strategy") in HYBRID:
        settings.setdefault("device_mesh", grid(settings["sharding_strategy"]))
    settings["auto_wrap_policy"] = policy(case)
    model = build(case)
    if init == "after":
        model.cpu()
    if init == "device_id":
        return FSDP(model.cpu(), device_id=device(), **settings)
    if init == "meta":
        with torch.device("meta"):
            hollow = case.build()
        sources = dict(zip(hollow.modules(), model.modules(), strict=True))
        return FSDP(hollow, param_init_fn=lambda m: copy_own(sources[m], m), **settings)
    if init == "sync" and dist.get_rank() > 0:
        own = experts(model, case)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in own:
                tensor.data.add_(1)
    model = FSDP(model, sync_module_states=init == "sync", **settings)
    if init == "after":
        move_elsewhere(model)
    return model


def copy_own(source: nn.Module, target: nn.Module) -> None:
    """Give a module, but not its children, the values of another."""
    target.to_empty(device=device(), recurse=False)
    own = (*target.named_parameters(recurse=False), *target.named_buffers(recurse=False))
    for name, tensor in own:
        tensor.copy_(getattr(source, name))


def move_elsewhere(model: FSDP) -> None:
    """What `model.cuda()` does to a model that was wrapped on the CPU: new memory for everything.
    Without a GPU there is nowhere to go for those that will be computed with, so they move from one
    place in memory to another; with offload they may not be computed with, and move to `meta`."""
    offloaded = any(unit.offload_from is not None for unit in model.engine.units)
    if device().type == "cuda":
        model.cuda()
    elif offloaded:
        model.to("meta")
    else:
        model._apply(torch.clone)


def full_parameters(model: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


# --------------------------------------------------------------------------------- and compared


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    assert gap == gap, "NaN"
    return gap


def check_parity(name: str, steps: int = STEPS, init: str = "before", **settings: Any) -> float:
    """Train case `name` both ways on this rank; the largest difference, if it is small enough."""
    precision = settings.get("mixed_precision", FULL)
    model = sharded(CASES[name], init, **settings)
    worst = check_equal(name, model, full_parameters, precision, steps)
    check_where(model)
    check_at_rest(model)
    return worst


def check_equal(
    name: str,
    model: Any,
    parameters_of: Callable[[Any], dict[str, Tensor]],
    precision: MixedPrecision = FULL,
    steps: int = STEPS,
) -> float:
    """Train `model`, which is case `name` sharded in some way, and compare it with DDP."""
    exact = dist.get_world_size() <= 2
    bound = 0.0 if exact else BOUND if precision == FULL else LOW_BOUND
    steps = steps if exact or precision == FULL else 1
    losses, parameters = reference(name, precision, steps)
    found_losses = train(model, CASES[name], steps)
    found = parameters_of(model)
    assert found.keys() == parameters.keys()
    worst = 0.0
    for step, (a, b) in enumerate(zip(found_losses, losses, strict=True)):
        gap = difference(a, b)
        assert gap <= bound, f"loss of step {step}: {a.item()} under minifsdp, {b.item()} under DDP"
        worst = max(worst, gap)
    for key, expected in parameters.items():
        gap = difference(found[key], expected)
        assert gap <= bound, f"{key} differs from DDP's by {gap:.3g} (relative), bound {bound:.3g}"
        worst = max(worst, gap)
    return worst


def check_refused(name: str, **settings: Any) -> None:
    """Offload, and moved to the device afterwards: must raise, and say which unit."""
    model = sharded(CASES[name], "after", **settings)
    with pytest.raises(RuntimeError, match=r"unit .* were moved to .* with CPUOffload they live"):
        train(model, CASES[name], 1)


def check_where(model: FSDP) -> None:
    """With offload everything that the optimizer sees is on the host, in the dtype it was."""
    for unit in model.engine.units:
        home = torch.device("cpu") if unit.offload_from is not None else device()
        assert (
            unit.sharded_flat_param.device.type == home.type
            and unit.sharded_flat_param.dtype == torch.float32
        )


def check_at_rest(model: FSDP, kept: bool = False) -> None:
    """After a step nothing is unsharded, held or under way.

    Args:
        kept: this is right after a backward in no_sync, which leaves gathered what the strategy
            lets it keep.
    """
    unsharded = 0
    for unit in model.engine.units:
        stays = NO_SYNC in unit.reasons
        assert unit.reasons <= {NO_SYNC}, f"{unit.label} is held for {unit.reasons}"
        assert not stays or (kept and not unit.reshard_after_forward), f"{unit.label} was kept"
        if unit.unsharded.needs_unshard and unit.unsharded.flat_param is not None and not stays:
            assert unit.unsharded.flat_param.untyped_storage().size() == 0, (
                f"{unit.label} was not freed"
            )
        unsharded += stays and unit.state.sharded is not ShardedState.SHARDED
    assert model.engine.stats.unsharded_units == unsharded


@contextmanager
def delays(where: str) -> Iterator[None]:
    """Make what usually is fast slow, so that whoever does not wait for it is found out."""

    def slowly(function: Any) -> Any:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            pause()
            return function(*args, **kwargs)

        return delayed

    def slow_to_finish(function: Any) -> Any:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, tuple):
                return result[0], slowly(result[1])
            return slowly(result)

        return delayed

    reshard = minifsdp.core.reshard.reshard
    patches = {
        "reduction": travels("reduce_scatter", slow_to_finish),
        "gather": travels("all_gather", slow_to_finish),
        "loss": patch(f"{__name__}.after_loss", pause),
        "free": replaced(reshard, slowly(reshard)),
    }
    with patches[where]:
        yield


def pause() -> None:
    """A few milliseconds: of the host's time on a CPU, of the current stream's on a GPU."""
    if device().type == "cuda":
        torch.cuda._sleep(5_000_000)
    else:
        time.sleep(0.003)
