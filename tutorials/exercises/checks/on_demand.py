"""Checks of on_demand.py: a root that is freed in the middle of a backward, and needed again."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most, refused

CHECKPOINT = "a layer of the root between the blocks, in a checkpoint"


def _freed(what: str, want: Any, got: Any) -> str | None:
    if "root's forward" in what:
        return (
            "the unit stays: it is held for more than its backward (unit.reasons), or self.graphs "
            "is 0, because a backward inside of the forward has ended"
        )
    if isinstance(got, dict) and "raised" in got:
        if "is sharded now" in got["message"]:
            return (
                "autograd asks for a parameter of a unit that was freed early. Gather it again, "
                "wait for it, and show its views"
            )
        return None
    if "state" in what:
        return (
            "the root's layer runs again while its parameters are still under way: has the "
            "computation waited for the gather"
        )
    if "outside of a backward" in what:
        return "between steps a saved parameter has no values: check_in_backward() refuses it"
    if "limiter" in what:
        return (
            "to the limiter a unit that was freed early is alive until its gradient is complete, "
            "or until it is gathered again. Keep the event of the free in self._freed_early, and "
            "let self.freed(unit) tell the limiter"
        )
    if "gathers" in what and "checkpoint" not in what:
        return (
            "autograd has saved something of the root that its backward still needs (is_saved), "
            "and the root had to be gathered again for it"
        )
    if "gathers" in what:
        return (
            "a unit that a checkpoint needs again is gathered a second time in the first step "
            "only: remember it in self._needed_again, and do not free it early any more"
        )
    if "memory" in what:
        return _of_memory(what, want, got)
    if "seconds" in what:
        return (
            "a backward may come to a unit by what autograd has saved, and by no output: it begins "
            "all the same (backward.before_backward), and prefetches the next unit"
        )
    if "gradient" in what:
        return (
            "a gradient is wrong where the root is freed or gathered in the backward: has the "
            "computation waited for the gather, and do the modules have their views"
        )
    return None


def _of_memory(what: str, want: list[bool], got: list[bool]) -> str:
    if sum(got) > sum(want):
        return (
            "nothing is left that autograd has saved of the root, so it can be freed before the "
            "backward of the blocks"
        )
    if "kept" in what:
        return "somebody refers to a parameter of the unit (is_in_use), so it stays"
    if "dropped" in what:
        return (
            "there may be another graph that the program has dropped. When it goes is not the same "
            "on all ranks, so count the graphs (self.graphs), and leave the unit"
        )
    if "checkpoint" in what:
        return "a unit that was needed again stays from then on"
    return "autograd has saved something of the root that its backward still needs (is_saved)"


class _Block(nn.Sequential):
    """A unit."""


class _Whole(nn.Module):
    """Three blocks between an embedding and a head, and between blocks perhaps a layer, which is
    the root's as well."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(torch.initial_seed())  # the same on every rank
        self.first, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.blocks = nn.ModuleList(_Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.between = None if between is None else nn.Linear(6, 6)
        self.run_between = between

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x)
            if self.run_between is not None:
                x = self.run_between(self.between, x)
        result: Tensor = self.head(x)
        return result


class _Keeps(_Whole):
    """It keeps a parameter of each step."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.kept = [*getattr(self, "kept", []), self.head.weight]
        return super().forward(tokens)


class _Slope(_Whole):
    """In its forward it asks for a gradient of a block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        at = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.blocks[0](at).pow(2).sum(), at)
        result: Tensor = super().forward(tokens) + self.head(slope)
        return result


class _Counting:
    """A limiter without a limit, which counts how often a unit is alive."""

    def __init__(self) -> None:
        self.alive: dict[Any, int] = {}

    def admit(self, unit: Any, needed: bool) -> bool:
        self.alive[unit] = self.alive.get(unit, 0) + 1
        return True

    def freed(self, unit: Any, event: Any) -> None:
        self.alive[unit] = self.alive.get(unit, 0) - 1


def _tokens(step: int) -> Tensor:
    made = torch.Generator().manual_seed(torch.initial_seed() + 10 * step + dist.get_rank())
    return torch.randint(9, (5,), generator=made)


def _steps(
    about: str, whole: _Whole, before: Callable[[nn.Module], object] = lambda model: None
) -> Iterator[Any]:
    """Two steps: where the root's memory is, how often it is gathered, and its gradients."""
    from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy

    limiter, there, alive, states = _Counting(), list[bool](), list[int](), list[str]()
    policy = ModuleWrapPolicy({_Block})
    model = FullyShardedDataParallel(whole, auto_wrap_policy=policy, limit_all_gathers=limiter)
    root = model.engine.root

    def look(*_: object) -> None:
        there.append(root.unsharded.storage.size() > 0)
        alive.append(limiter.alive[root])

    for block in model.module.blocks:
        block.module.register_full_backward_pre_hook(look)
    if whole.between is not None:
        # Its gradient alone does not tell: on a slow machine the data may be there unwaited for.
        whole.between.register_forward_pre_hook(lambda *_: states.append(root.state.sharded.name))
    for step in range(2):
        model.zero_grad()
        before(model)
        there.clear()
        alive.clear()
        states.clear()
        gathers = model.engine.stats.all_gathers
        loss = model(_tokens(step)).pow(2).sum()
        loss.backward()
        where = f"with {about}, in step {step + 1}"
        yield f"whether the root has memory when each block's backward begins, {where}", [*there]
        yield f"state of the root whenever its layer runs, {where}", [*states]
        yield f"gathers of all units {where}", model.engine.stats.all_gathers - gathers
        yield (
            f"how often the root is alive to the limiter when each block's backward begins, "
            f"and afterwards, {where}",
            [*alive, limiter.alive[root]],
        )
        for name, param in whole.named_parameters():
            yield f"gradient of {name} on this rank {where}", param.grad


def _plainly(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x)
    return result


_again = partial(checkpoint, use_reentrant=False)
_LOSSES: list[Tensor] = []


@check("on_demand.1", ranks=2, because=_freed)
def a_root_is_freed_when_nothing_is_saved_of_it() -> Iterator[Any]:
    yield from _steps("a head and an embedding", _Whole())
    yield from _steps("a layer of the root between the blocks", _Whole(_plainly))


@check("on_demand.1", ranks=2, because=_freed)
def a_root_that_a_checkpoint_needs_again() -> Iterator[Any]:
    yield from _steps(CHECKPOINT, _Whole(_again))


@check("on_demand.1", ranks=2, because=_freed)
def a_root_that_stays() -> Iterator[Any]:
    import warnings

    warnings.simplefilter("ignore")  # that a parameter is kept is told
    yield from _steps(
        "a graph that was dropped before", _Whole(), lambda model: model(_tokens(9)).sum()
    )
    yield from _steps("a parameter that somebody has kept", _Keeps())
    yield from _steps("a gradient that is asked for in the root's forward", _Slope())


class _Router(nn.Linear):
    """Its loss leaves it by a list, and its forward runs again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        _LOSSES.append(_again(super().forward, x).square().mean())
        return x


@check("on_demand.1", ranks=2, because=_freed)
def a_backward_that_comes_by_no_output() -> Iterator[Any]:
    from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy

    plain = nn.Sequential(_Router(8, 8), nn.Linear(8, 8))
    model = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({_Router}))
    model(torch.full((2, 8), 1.0 + dist.get_rank()))
    _LOSSES.pop().backward()
    for name, param in plain.named_parameters():
        yield f"gradient of {name}, whose unit's output is not in the loss", param.grad


@check("on_demand.1", because=_freed)
def on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import Block, train

    def inside(model: nn.Module, x: Tensor) -> Tensor:
        """The mean of what a layer in the last block has computed; no unit's output."""
        kept: list[Tensor] = []
        last = [block for block in model.modules() if isinstance(block, Block)][-1]
        hook = last.linear.register_forward_hook(lambda module, args, output: kept.append(output))
        model(x)
        hook.remove()
        return kept.pop().square().mean()

    gpu = train(loss=inside)
    yield "races with a loss from inside of a unit", [str(race) for race in gpu.races()][:1]
    yield at_most("seconds of a step with a loss from inside of a unit", gpu.report()["step"], 0.01)


@check("on_demand.1", ranks=2, because=_freed)
def between_steps() -> Iterator[Any]:
    from minifsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 4))
    node: Any = model(torch.ones(2, 4, requires_grad=True)).grad_fn
    while "_saved_mat2" not in dir(node):
        node = node.next_functions[0][0]
    yield (
        "reading a saved parameter outside of a backward raises",
        refused(lambda: node._saved_mat2),
    )
    model(torch.ones(2, 4)).sum().backward()
    for name, param in model.named_parameters():
        yield f"gradient of {name} in a step after it", param.grad
