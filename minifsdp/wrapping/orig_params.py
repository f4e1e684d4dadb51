"""Parameters as they were before wrapping. Nobody should hold them any more.

A unit copies them into its flat parameter and lets them go. Whoever still has one has a tensor that
no layer computes with. It may be another module, which then shares a parameter with a unit that it
is not in; or an optimizer, whose steps would change nothing.
"""

import gc
import sys
from collections import Counter
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.unit import Unit

Originals = dict[str, "ref[nn.Parameter]"]
"""A unit's parameters as they were, by name."""


def originals(modules: dict[str, nn.Module]) -> Originals:
    """The parameters of these modules, by name, as long as somebody else has them."""
    return {
        f"{name}.{attribute}" if name else attribute: ref(param)
        for name, module in modules.items()
        for attribute, param in module._parameters.items()
        if param is not None and not isinstance(param, FlatParameter)
    }


def mark_taken(unit: Unit, originals: Originals) -> None:
    """Leave a note on the original parameters, for a module elsewhere that holds one of them."""
    for name, original in reversed(originals.items()):  # of a shared one the first name stays
        param = original()
        if param is not None:
            param._minifsdp_taken = (ref(unit), name)  # type: ignore[attr-defined]


def taken_by(param: nn.Parameter) -> tuple[Unit | None, str]:
    """The unit that has taken a parameter, and its name there. None, if none has."""
    unit, name = getattr(param, "_minifsdp_taken", (lambda: None, ""))
    return unit(), name


def check_optimizers(modules: dict[str, nn.Module]) -> None:
    """Refuse an optimizer that was built before wrapping: it would step tensors nobody uses.

    Called before anything is wrapped, so that the model stays as it was.

    Args:
        modules: those whose parameters are about to be taken, by name.

    Raises:
        RuntimeError: an optimizer holds one of these.
    """
    held_elsewhere = _held_elsewhere(modules)
    if not held_elsewhere or not _holders(held_elsewhere):
        return
    gc.collect()  # one that nobody uses any more may wait for this, and is no mistake
    for optimizer, held in _holders(held_elsewhere).items():
        raise RuntimeError(
            f"an optimizer ({optimizer}) was built before wrapping. It holds {', '.join(held)}, "
            f"which wrapping replaces by a sharded flat parameter, so its steps would change "
            f"nothing. Wrap first (this model is as it was), and build the optimizer after that, "
            f"from the wrapped model's parameters()."
        )


def check_hooks(modules: dict[str, nn.Module]) -> None:
    """Refuse hooks on parameters that are about to be taken: nobody would call them.

    Raises:
        ValueError: a parameter has one.
    """
    for name, original in originals(modules).items():
        param = original()
        if param is not None and (param._backward_hooks or param._post_accumulate_grad_hooks):
            raise ValueError(
                f"parameter {name!r} has a hook (register_hook or "
                f"register_post_accumulate_grad_hook), which would never be called: wrapping "
                f"replaces the parameter by a part of a flat one. Remove it, wrap, and register "
                f"it on the wrapped model's parameters(); grad_hooks.py says what it gets there."
            )


def _held_elsewhere(modules: dict[str, nn.Module]) -> Originals:
    """The parameters that somebody else than these modules has a reference to."""
    alone = nn.Module()
    alone.only = nn.Parameter()
    usual = _references(alone, "only")
    owners = Counter(id(p) for module in modules.values() for p in module._parameters.values())
    found = {}
    for name, module in modules.items():
        for attribute in module._parameters:
            spare = usual - 1 + owners[id(module._parameters[attribute])]
            if module._parameters[attribute] is not None and _references(module, attribute) > spare:
                found.update(originals({name: module}))
    return found


def _references(module: nn.Module, attribute: str) -> int:
    """Counted in the same way for all. What a number means is up to the version of Python."""
    return sys.getrefcount(module._parameters[attribute])


def _holders(originals: Originals) -> dict[str, list[str]]:
    """Which of them the optimizers hold, by the name of the optimizer's class."""
    alive = {id(param): name for name, r in originals.items() if (param := r()) is not None}
    found: dict[str, list[str]] = {}
    if not alive:
        return found
    for candidate in gc.get_objects():  # a long walk; only when somebody does hold an original
        if issubclass(type(candidate), Optimizer):  # isinstance would wake up lazy proxies
            groups = getattr(candidate, "param_groups", [])
            held = [alive[id(p)] for group in groups for p in group["params"] if id(p) in alive]
            if held:
                found.setdefault(type(candidate).__name__, []).extend(held)
    return found
