"""Parameters as they were before wrapping. Nobody should hold them any more.

A unit copies them into its flat parameter and lets them go. Whoever still has one has a tensor that
no layer computes with. It may be another module, which then shares a parameter with a unit that it
is not in; or an optimizer, whose steps would change nothing.
"""

import gc
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from minifsdp.unit import Unit

Originals = dict[str, "ref[nn.Parameter]"]
"""A unit's parameters as they were, by name."""


def originals(modules: dict[str, nn.Module]) -> Originals:
    """The parameters of these modules, by name, as long as somebody else has them."""
    return {
        f"{name}.{attribute}" if name else attribute: ref(param)
        for name, module in modules.items()
        for attribute, param in module._parameters.items()
        if param is not None
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


def check_optimizers(originals: Originals) -> None:
    """Refuse an optimizer that was built before wrapping: it would step tensors nobody uses.

    Raises:
        RuntimeError: an optimizer does.
    """
    if not _holders(originals):
        return
    gc.collect()  # one that nobody uses any more may wait for this, and is no mistake
    for optimizer, held in _holders(originals).items():
        raise RuntimeError(
            f"an optimizer ({optimizer}) was built before wrapping. It holds {', '.join(held)}, "
            f"which wrapping has replaced by a sharded flat parameter, so its steps would change "
            f"nothing. Build the model anew (this one's parameters are gone), wrap it, and build "
            f"the optimizer after that, from the wrapped model's parameters()."
        )


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
