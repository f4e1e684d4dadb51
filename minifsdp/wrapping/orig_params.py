"""Parameters as they were before wrapping, which nothing should refer to any more.

A unit copies its original parameters into the flat parameter and lets them go. Whatever still has
one has a tensor that no layer computes with::

    another module    shares the parameter with a unit that it is not in; refused by auto_wrap.py
    an optimizer      its steps would change nothing; refused here, before anything is changed. In
                      rows one of torch.optim's that has not stepped gets the DTensors instead
    a variable        no harm, but the memory of that parameter is not freed
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.tensor_attribute import TensorAttribute
from minifsdp.wrapping.module_tree import Modules, own_params

OrigParams = dict[str, "ref[nn.Parameter]"]
"""Parameters of modules before wrapping, by name. Weak, so that the memory can be freed."""


def orig_params(modules: Modules) -> OrigParams:
    """The parameters that these modules have now."""
    return {name: ref(attribute.get()) for name, attribute in own_params(modules).items()}


def set_unit(originals: OrigParams, unit: FeaturedUnit) -> None:
    """Record on the original parameters which unit they are in, for :func:`unit_of_orig_param`."""
    for name, original in reversed(originals.items()):  # a shared one keeps its first name
        param = original()
        if param is not None:
            param._minifsdp_unit = (ref(unit), name)  # type: ignore[attr-defined]


def unit_of_orig_param(param: nn.Parameter) -> tuple[FeaturedUnit | None, str]:
    """The unit that an original parameter was sharded into, and its name there; else None, ""."""
    unit, name = getattr(param, "_minifsdp_unit", (lambda: None, ""))
    return unit(), name


def end_of_full_params(unit: FeaturedUnit, params: Iterable[nn.Parameter]) -> None:
    """Record the full parameters of ``unit`` that its modules have had for the time of a block
    (``summon_full_params``, ``as_dtensors``), for :func:`unit_of_full_param`."""
    for info, param in zip(unit.param_infos, params, strict=False):  # some, if an error ended it
        _full_params[param] = ref(unit), info.name


def unit_of_full_param(param: nn.Parameter) -> tuple[FeaturedUnit | None, str]:
    """The unit that had shown this as a full parameter, and its name there; else None, ""."""
    unit, name = _full_params.get(param, (lambda: None, ""))
    return unit(), name


_full_params: Any = WeakTensorKeyDictionary()  # with an attribute they could not be pickled


class Held(NamedTuple):
    """Where an optimizer has a parameter."""

    params: list[Any]  # of one of its groups
    position: int
    name: str  # of the parameter


def check_optimizers(modules: Modules, in_rows: bool) -> list[Held]:
    """Refuse an optimizer that was built before wrapping: it would step tensors that no layer uses.

    Called before anything is wrapped, so that the model stays as it was.

    Args:
        modules: the modules whose parameters are about to be sharded, by name.
        in_rows: there will be a DTensor for each parameter, to be put into the optimizer.

    Returns:
        Where optimizers have them, for :func:`hand_over`. Empty if not ``in_rows``.

    Raises:
        RuntimeError: an optimizer holds one of these parameters, and cannot get a DTensor for it:
            in chunks there is none; the optimizer has a state for the parameter; or it is not one
            of torch.optim's, and may hold the parameter in other places, too.
    """
    held = _held_elsewhere(modules)
    found = _optimizers_with(held) if held else []
    if any(_cannot_change(*one, in_rows) for one in found):
        found.clear()
        gc.collect()  # an optimizer that is garbage may still be in memory; that is no mistake
        found = _optimizers_with(held)
    for optimizer, places in found:
        if how := _cannot_change(optimizer, places, in_rows):
            raise RuntimeError(
                f"an optimizer ({type(optimizer).__name__}) was built before wrapping. It holds "
                f"{', '.join(place.name for place in places)}, which wrapping replaces by {how}, "
                f"so its steps would change nothing. Wrap first (this model is as it was), and "
                f"build the optimizer after that, from the wrapped model's parameters()."
            )
    return [place for _, places in found for place in places]


def _cannot_change(optimizer: Optimizer, places: list[Held], in_rows: bool) -> str:
    """In words what an optimizer cannot get in place of its parameters; empty if it can."""
    if not in_rows:
        return "a sharded flat parameter"
    if not type(optimizer).__module__.startswith("torch.optim."):
        return "DTensors (it is not one of torch.optim's, which would get them instead)"
    if any(place.params[place.position] in optimizer.state for place in places):
        return "DTensors (it has a state for them already; without one it would get them)"
    return ""


def hand_over(held: list[Held], unit: FeaturedUnit) -> None:
    """Give optimizers the DTensors of a unit in rows in place of the parameters from before."""
    params = {
        info.name: param
        for info, param in zip(unit.param_infos, unit.optimized_params, strict=False)
    }
    for place in held:
        if place.name in params:  # else a param_init_fn has put another module there
            place.params[place.position] = params[place.name]


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
    # Counted in the same way, because the number depends on the version of Python.
    usual = sys.getrefcount(TensorAttribute(module, "only").get())
    params = own_params(modules)
    owners = Counter(id(attribute.get()) for attribute in params.values())
    return {
        name: ref(attribute.get())
        for name, attribute in params.items()
        if sys.getrefcount(attribute.get()) > usual - 1 + owners[id(attribute.get())]
    }


def _optimizers_with(originals: OrigParams) -> list[tuple[Optimizer, list[Held]]]:
    """The optimizers that hold these parameters, and where."""
    # A shared one has its first name, as its unit calls it.
    named = [(r(), name) for name, r in reversed(originals.items())]
    names = {id(param): name for param, name in named if param is not None}
    found: list[tuple[Optimizer, list[Held]]] = []
    for candidate in gc.get_objects():  # slow, but only done if something holds a parameter
        if issubclass(type(candidate), Optimizer):  # isinstance would load lazy modules
            held = [
                Held(group["params"], position, names[id(param)])
                for group in getattr(candidate, "param_groups", [])
                for position, param in enumerate(group["params"])
                if id(param) in names
            ]
            if held:
                found.append((candidate, held))
    return found
