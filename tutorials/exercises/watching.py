"""Ways to watch a training step, for checks: of one unit, on the virtual GPU, and on real ranks.

Imported by checks in their bodies only, because it imports minifsdp.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifsdp.core.unshard
from minifsdp import BackwardPrefetch, ForwardPrefetch, ModuleWrapPolicy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.pieces import whole
from minifsdp.core.gradients import Gradients
from minifsdp.core.limiter import NoLimit
from minifsdp.core.unit_state import BACKWARD, FORWARD
from minifsdp.core.views import make_views, show_views
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.report import ALL_GATHER, last_step
from minifsdp.sim.tape import COMPUTE, Op
from minifsdp.support.param_access import Placeholder
from minifsdp.support.prefetch_stats import CountedPrefetcher
from tests.lone_unit import Lone, lone_unit
from tests.small import Block, gathered_gradients, replaced, storage, watch

# ------------------------------------------------------------------------------- without ranks


class Says(CountedPrefetcher):
    """A prefetcher that has the same target at all moments."""

    def __init__(self, target: FeaturedUnit | None) -> None:
        super().__init__(BackwardPrefetch.BACKWARD_PRE, ForwardPrefetch.FORWARD_PRE)
        self.target = target

    def pre_forward(self, unit: FeaturedUnit) -> FeaturedUnit | None:
        return self.target

    post_forward = pre_backward = post_backward = pre_forward


@contextmanager
def two_units(**settings: Any) -> Iterator[tuple[FeaturedEngine, Lone, Lone]]:
    """An engine with two units: "now", and "next", which its prefetcher names at every moment.

    Args:
        settings: arguments of :func:`tests.lone_unit.lone_unit`.
    """
    with (
        lone_unit(**settings) as root,
        lone_unit(**settings) as now,
        lone_unit(**settings) as next_,
    ):
        for lone, name in ((root, "root"), (now, "now"), (next_, "next")):
            lone.unit.rename(name)
        units = [root.unit, now.unit, next_.unit]
        yield FeaturedEngine(units, NoLimit(), Says(next_.unit)), now, next_


def state(lone: Lone) -> str:
    """What a unit's state is, whether it has memory, and its reasons to stay: "SHARDED, FORWARD,
    without memory, held for nothing"."""
    sharded, training = lone.unit.state.sharded.name, lone.unit.state.training.name
    reasons = " and ".join(sorted(lone.unit.reasons)) or "nothing"
    memory = "with" if lone.memory else "without"
    return f"{sharded}, {training}, {memory} memory, held for {reasons}"


def gathered_for_forward(lone: Lone, *reasons: str) -> None:
    """Put a unit where it is while its module runs.

    Args:
        reasons: others that it has to stay.
    """
    _gather_for(lone, FORWARD, *reasons)


def gathered_for_backward(lone: Lone, *reasons: str) -> None:
    """Put a unit where it is between the start of its backward and its gradient.

    Args:
        reasons: others that it has to stay.
    """
    _gather_for(lone, BACKWARD, *reasons)
    lone.unit.state.run_forward()
    lone.unit.state.start_backward(0)


def _gather_for(lone: Lone, *reasons: str) -> None:
    lone.fill()
    for reason in reasons:
        lone.unit.hold(reason)
    make_views(lone.unit)
    show_views(lone.unit)


def gradient(unit: FeaturedUnit) -> Tensor:
    """What backwards have computed of the unit's gradient, which is taken away."""
    return whole(unit.view_maker.take_gradient(unit))


def pending(gradients: Gradients) -> int:
    """How many gradients there are that the optimizer has not got yet."""
    return len(gradients._reductions) + len(getattr(gradients, "held", ()))


def root_of(engine: FeaturedEngine) -> Lone:
    """The root of :func:`two_units`."""
    return Lone(engine.root, engine.streams, engine.root.module)


def lists_shard(lone: Lone) -> bool:
    """Whether ``parameters()`` of the module lists the shard, and not views."""
    return all(param is lone.unit.sharded_flat_param for param in lone.module.parameters())


def has_views(lone: Lone) -> bool:
    """Whether the module computes with its unsharded parameters, and not with what lists shards."""
    return not isinstance(lone.module.weight, Placeholder)


def has_memory(lone: Lone) -> bool:
    """Whether a unit has memory for its parameters."""
    return bool(lone.memory)


# -------------------------------------------------------------------------- on the virtual GPU


def turns(gpu: VirtualGpu) -> str:
    """The last step as the host has launched it: "+a" for the all-gather of unit a, "a" where the
    computation with it begins."""
    found: list[str] = []
    owner: dict[Any, str] = {}
    for op in [entry for entry in last_step(gpu.tape)[0] if isinstance(entry, Op)]:
        if op.name == ALL_GATHER:
            name = op.label.split(" ", 1)[1].strip("'")
            owner.update(dict.fromkeys(op.writes, name))
            found.append(f"+{name}")
        elif op.stream == COMPUTE:
            used = [owner[buffer] for buffer in op.reads if buffer in owner]
            found += [name for name in used[:1] if name not in found[-1:]]
    # Between two uses of one unit there may be the gather of another.
    return " ".join(found)


# ------------------------------------------------------------------------------------ on ranks


class Stage(nn.Sequential):
    """A unit with units inside."""


class Nested(nn.Module):
    """A unit in a unit, a unit that is used twice, and a loss that may come from the middle.

    Attributes:
        kept: the output of the outer unit.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.twice = Block(nn.Linear(width, width), nn.Tanh())
        self.stage = Stage(nn.Linear(width, width), Block(nn.Linear(width, width), nn.Tanh()))
        self.last = Block(nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage(self.twice(self.first(x)))
        self.kept = x
        return self.last(self.twice(x))


class KeepsInside(Stage):
    """Its own output is no part of the graph; what is kept of the inside is."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self[1](self[0](x))
        return self.kept.detach()


class Inside(nn.Module):
    """The loss comes from the middle of a unit in a unit."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.stage = KeepsInside(nn.Linear(width, width), Block(nn.Linear(width, width)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stage(self.first(x))
        return out


def wrapped(module: nn.Module, **settings: Any) -> FSDP:
    """With blocks and stages as units."""
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block, Stage, KeepsInside}), **settings)


def stack(blocks: int = 3, width: int = 6) -> nn.Sequential:
    """A root with a layer of its own and units "1", "2", ..."""
    parts = [Block(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(width, width), *parts)


def batch(at: int, width: int = 6) -> Tensor:
    """This rank's input of one step."""
    seed = 1000 * torch.initial_seed() + 10 * at + dist.get_rank()
    return torch.randn(3, width, generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A loss, of the output."""
    loss: Tensor = model(x).pow(2).sum()
    return loss


def trained(
    model: FSDP, steps: int = 3, loss: Callable[[nn.Module, Tensor], Tensor] = squares
) -> Iterator[Any]:
    """Train with different data on each rank. Observes losses, gradients, what is left of gathered
    parameters between the steps, and parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [info.name for unit in model.engine.units for info in unit.param_infos]
    assert names
    for at in range(steps):
        value = loss(model, batch(at))
        yield f"the loss of step {at + 1}", value
        value.backward()
        gradients = gathered_gradients(model)
        for name, grad in gradients.items():
            yield f"the gradient of {name} in step {at + 1}", grad
        left = [unit.name or "root" for unit in model.engine.units if storage(unit)]
        yield f"units that have memory after the backward of step {at + 1}", left
        optimizer.step()
        optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        yield (
            f"all parameters after {steps} steps",
            torch.cat([p.reshape(-1) for p in model.parameters()]),
        )


def turns_on_ranks(model: FSDP, at: int) -> tuple[str, str]:
    """What happens in the forward and in the backward of one step: "+a" is the start of unit a's
    all-gather, "-a" its free, and "|" is where a unit below the root begins."""
    with watch(model) as log, ExitStack() as handles:

        def begins(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            x = inputs[0].clone()  # so that it has a place of its own in the backward
            if x.requires_grad:
                x.register_hook(lambda grad: log.append("|"))
            log.append("|")
            return x

        for unit in model.module.children():
            if isinstance(unit, FSDP):
                handles.callback(unit.register_forward_pre_hook(begins).remove)
        loss = model(batch(at)).pow(2).sum()
        forward = " ".join(log)
        log.clear()
        loss.backward()
    return forward, " ".join(log)


def accumulated(model: FSDP) -> Iterator[Any]:
    """Two backwards in no_sync, then one that reduces. Observes what `trained` does."""
    with model.no_sync():
        for at in range(2):
            squares(model, batch(at)).backward()
    squares(model, batch(2)).backward()
    for name, grad in gathered_gradients(model).items():
        yield f"the gradient of {name} after two backwards in no_sync and one more", grad
    left = [unit.name or "root" for unit in model.engine.units if storage(unit)]
    yield "units that have memory after these backwards", left


class _Noted:
    """An event that notes the first wait for it."""

    def __init__(self, event: Any, name: str, log: list[str]) -> None:
        self.event, self.name, self.log = event, name, log

    def wait(self) -> None:
        if not self.event.query():
            self.log.append(self.name)
        self.event.wait()

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        passed: bool = self.event.query()
        return passed


def started_before_a_wait(model: FSDP, where: str) -> list[str]:
    """The units whose all-gathers are started as prefetches before the unit that is needed has been
    waited for, so that both are on the network together, in the second step."""
    squares(model, batch(0)).backward()
    log: list[str] = []
    unshard = minifsdp.core.unshard.unshard

    def noted_start(unit: FeaturedUnit, streams: Any) -> None:
        log.append("+" + unit.name)
        unshard(unit, streams)
        unit.unshard_event = _Noted(unit.unshard_event, "=" + unit.name, log)

    with replaced(unshard, noted_start):
        loss = squares(model, batch(1))
        forward = list(log)
        log.clear()
        loss.backward()
    log = forward if where == "forward" else log
    # Two starts without a wait between them are on the network together.
    pairs = pairwise(log)
    return [b[1:] for a, b in pairs if a.startswith("+") and b.startswith("+")]
