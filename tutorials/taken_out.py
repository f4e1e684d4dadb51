"""Takes a part out of the engine, runs a program without it, and puts it back: what the pages of
the second part do with the extras that they are about.

    three_times(program, layer(Precision))    # as it is, without Precision, and put back

An extra is one of four things, and each is taken out in a way of its own:

    layer(Precision)          a layer (core/layers.py): no model that is wrapped now has it
    stage(Cast)               a stage of a reduction (strategies.py): hands on what it is given
    reason(STRATEGY)          a reason to keep a unit (core/unit_state.py): nobody gives it
    call("minifsdp.a.b.f")    anything else, a check or a step of wrapping: f does nothing
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Layer
from minifsdp.core.reduce import Stage
from minifsdp.core.streams import Finish
from minifsdp.core.unit import Unit


@contextmanager
def layer(*kinds: type[Layer]) -> Iterator[str]:
    """In this block models are wrapped without the layers of these classes."""
    use = Engine.use

    def use_others(engine: Engine, layers: Iterable[Layer]) -> None:
        use(engine, [one for one in layers if not isinstance(one, kinds)])

    with patch.object(Engine, "use", use_others):
        yield _named(kind.__name__ for kind in kinds)


@contextmanager
def stage(*kinds: type[Stage]) -> Iterator[str]:
    """In this block a gradient comes out of the stages of these classes as it went in."""
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "launch", _hand_on))
        yield _named(kind.__name__ for kind in kinds)


def _hand_on(stage: Stage, unit: Unit, value: Any) -> tuple[Any, Finish]:
    return value, lambda: None


@contextmanager
def reason(name: str) -> Iterator[str]:
    """In this block no unit is kept for this reason."""
    hold = Unit.hold

    def hold_for_others(unit: Unit, why: str) -> None:
        if why != name:
            hold(unit, why)

    with patch.object(Unit, "hold", hold_for_others):
        yield _named([repr(name)])


@contextmanager
def call(function: str, instead: Callable[..., Any] = lambda *_: None) -> Iterator[str]:
    """In this block a function does nothing, or what is given instead.

    Args:
        function: its name, with the module or class in which it is looked up.
    """
    with patch(function, instead):
        yield _named([function.rpartition(".")[2]])


def _named(parts: Iterable[str]) -> str:
    return f"without {' and '.join(parts)}"


def said(program: Callable[[], object]) -> str:
    """What a program returns or, if it raises, its error's first sentence."""
    try:
        return str(program())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def three_times(program: Callable[[], object], part: Any) -> list[str]:
    """Run a program as it is, without a part, and with the part put back. The first rank prints
    what is :func:`said` each time.

    Args:
        part: one of the blocks above.

    Returns:
        What was said, on this rank.

    Raises:
        AssertionError: it makes no difference, or the part is not back.
    """
    found = []
    for block in (nullcontext("as it is"), part, nullcontext("put back")):
        with block as words:
            found.append(said(program))
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{words}: {found[-1]}")
    assert found[0] == found[2] != found[1], found
    return found


def gradients(model: nn.Module) -> Tensor:
    """The gradients of all parameters of a plain model, or of one that is sharded, one behind the
    other, in fp32."""
    whole = FSDP.summon_full_params(model, with_grads=True) if FSDP.fsdp_modules(model) else None
    with whole or nullcontext():
        return torch.cat([param.grad.flatten().float() for param in model.parameters()])


def off_ddps(backward: Callable[[Any], object], model: nn.Module, plain: nn.Module) -> str:
    """How far the gradients of a sharded model are from those that DDP would give a plain one.

    Args:
        backward: computes gradients of a model from this rank's data.
    """
    backward(model)
    backward(plain)
    mean = gradients(plain) / dist.get_world_size()
    dist.all_reduce(mean)
    return f"the gradient is off by {(gradients(model) - mean).norm() / mean.norm():.1%}"
