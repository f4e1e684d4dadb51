"""Parameters as they were before wrapping, which nothing should refer to any more.

A unit copies its original parameters into the flat parameter and lets them go. Whatever still has
one has a tensor that no layer computes with::

    another module    it shares the parameter with a unit that it is not in; refused by auto_wrap.py
    an optimizer      its steps would change nothing; refused here, before anything is changed
    a variable        no harm, but the memory of that parameter is not freed
"""

import gc
import sys
from collections import Counter
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from minifsdp.support.tensor_attribute import TensorAttribute
from minifsdp.unit import Unit
from minifsdp.wrapping.module_tree import Modules, own_params

OrigParams = dict[str, "ref[nn.Parameter]"]
"""Parameters of modules before wrapping, by name. Weak, so that the memory can be freed."""


def orig_params(modules: Modules) -> OrigParams:
    """The parameters that these modules have now."""
    return {name: ref(attribute.get()) for name, attribute in own_params(modules).items()}


def set_unit(originals: OrigParams, unit: Unit) -> None:
    """Record on the original parameters which unit they are in, for :func:`unit_of_orig_param`."""
    for name, original in reversed(originals.items()):  # a shared one keeps its first name
        param = original()
        if param is not None:
            param._minifsdp_unit = (ref(unit), name)  # type: ignore[attr-defined]


def unit_of_orig_param(param: nn.Parameter) -> tuple[Unit | None, str]:
    """The unit that an original parameter was sharded into, and its name there; else None, ""."""
    unit, name = getattr(param, "_minifsdp_unit", (lambda: None, ""))
    return unit(), name


def check_optimizers(modules: Modules) -> None:
    """Refuse an optimizer that was built before wrapping: it would step tensors that no layer uses.

    Called before anything is wrapped, so that the model stays as it was.

    Args:
        modules: the modules whose parameters are about to be sharded, by name.

    Raises:
        RuntimeError: an optimizer holds one of these parameters.
    """
    held = _held_elsewhere(modules)
    if not held or not _optimizers_with(held):
        return
    gc.collect()  # an optimizer that is garbage may still be in memory, and is no mistake
    for optimizer, names in _optimizers_with(held).items():
        raise RuntimeError(
            f"an optimizer ({optimizer}) was built before wrapping. It holds {', '.join(names)}, "
            f"which wrapping replaces by a sharded flat parameter, so its steps would change "
            f"nothing. Wrap first (this model is as it was), and build the optimizer after that, "
            f"from the wrapped model's parameters()."
        )


def check_hooks(modules: Modules) -> None:
    """Refuse hooks on parameters that are about to be sharded: they would never be called.

    Raises:
        ValueError: a parameter has one.
    """
    for name, attribute in own_params(modules).items():
        param = attribute.get()
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name!r} has a hook (register_hook or "
                f"register_post_accumulate_grad_hook), which would never be called: wrapping "
                f"replaces the parameter by a part of a flat one. Remove it, wrap, and register "
                f"it on the wrapped model's parameters(); grad_hooks.py says what it gets there."
            )


def _held_elsewhere(modules: Modules) -> OrigParams:
    """The parameters that something other than these modules refers to. They are found by their
    reference counts, which is much quicker than to search for optimizers at every wrapping."""
    module = nn.Module()
    module.only = nn.Parameter()
    # Counted in the same way, because what the number is depends on the version of Python.
    usual = sys.getrefcount(TensorAttribute(module, "only").get())
    params = own_params(modules)
    owners = Counter(id(attribute.get()) for attribute in params.values())
    return {
        name: ref(attribute.get())
        for name, attribute in params.items()
        if sys.getrefcount(attribute.get()) > usual - 1 + owners[id(attribute.get())]
    }


def _optimizers_with(originals: OrigParams) -> dict[str, list[str]]:
    """The names of those parameters that optimizers hold, by the class of the optimizer."""
    names = {id(param): name for name, r in originals.items() if (param := r()) is not None}
    found: dict[str, list[str]] = {}
    for candidate in gc.get_objects():  # slow, but only done if something holds a parameter
        if issubclass(type(candidate), Optimizer):  # isinstance would load lazy modules
            groups = getattr(candidate, "param_groups", [])
            held = [names[id(p)] for group in groups for p in group["params"] if id(p) in names]
            if held:
                found.setdefault(type(candidate).__name__, []).extend(held)
    return found
