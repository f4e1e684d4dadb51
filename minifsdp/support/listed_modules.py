"""Several modules as one unit: ``fully_shard([model.norm, model.output])``.

Small modules that run one after the other should share one message. And a parameter that two
modules share has to be in one unit. If only the whole model contains both modules, as it is with an
embedding and a head, a list makes that unit::

    fully_shard([model.norm, model.output])

    before   norm's forward       gather the unit
    after    norm's forward       hold it for LIST: output is still to run
    before   output's forward     it is there
    after    output's forward     let go of LIST; it is freed, as after the forward of any unit

A module that does not run would keep the unit for ever; so LIST is let go at the end of the
outermost forward at the latest. In a backward nothing is different: a unit is gathered when the
first gradient reaches it, and freed when its gradient is complete, however many modules it has.

Source: ``fully_shard`` (pytorch 2.13), ``_register_group_forward_hooks``. There, too, the root ends
a list of which only a part has run.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from minifsdp.core.layers import Call, Layer
from minifsdp.core.unit_state import FORWARD
from minifsdp.featured_unit import FeaturedUnit

LIST = "its list of modules"  # a reason to stay: some have run in this forward, some are to run


class ListedModules(nn.Module):
    """What ``unit.module`` is for a list: the modules, by their positions in it. It is in no model,
    and is never called.

    Attributes:
        to_run: those for whose forward the unit is still kept.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for position, module in enumerate(modules):
            self.add_module(str(position), module)
        self.to_run: set[nn.Module] = set()


class Lists(Layer):
    """Keeps the units of lists until all of their modules have run.

    Args:
        units: of the root.
    """

    def __init__(self, units: Sequence[FeaturedUnit]) -> None:
        self._units = [unit for unit in units if unit.is_list]

    def before_forward(self, call: Call) -> None:
        """In the order of a step the unit comes where its first module does."""
        if call.unit.is_list:
            call.notes["in a step"] = call.in_order
            call.in_order &= call.unit.reasons.isdisjoint((LIST, FORWARD))

    def after_forward(self, call: Call, output: object) -> object:
        """Hold the unit for its other modules; after the last one, what comes next is gathered."""
        if call.unit.is_list and call.notes["in a step"]:
            has_run(call.unit, call.module)
            call.in_order = LIST not in call.unit.reasons
        return output

    def end_of_forward(self, unit: FeaturedUnit) -> None:
        """Those that have not run by now do not run in this forward."""
        self.reset()

    def reset(self) -> None:
        """No forward is running."""
        for unit in self._units:
            close(unit)


def outermost(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The given module; or of a list, each module once, without those inside of another one.

    Raises:
        TypeError: ``given``, or an item of the list, is something else.
        ValueError: the list is empty.
    """
    if isinstance(given, nn.Module):
        return [given]
    modules: dict[Any, None] = dict.fromkeys(given if isinstance(given, (list, tuple)) else [given])
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"fully_shard takes a module, or a list of modules to make one unit of, not a "
                f"{type(module).__name__} (in a {type(given).__name__}): {module!r}."
            )
    if not modules:
        raise ValueError("fully_shard was given an empty list: there is no module to shard.")
    below = {inner for module in modules for inner in module.modules() if inner is not module}
    return [module for module in modules if module not in below]


def has_run(unit: FeaturedUnit, module: nn.Module) -> None:
    """The forward of ``module``, one of the unit's list, is over. Hold the unit for the others."""
    listed: Any = unit.module
    listed.to_run = (listed.to_run or set(listed.children())) - {module}
    if listed.to_run:
        unit.hold(LIST)
    else:
        unit.reasons.discard(LIST)  # its forward, which is about to end, holds it


def close(unit: FeaturedUnit) -> None:
    """What has not run by now does not run in this forward."""
    listed: Any = unit.module
    listed.to_run = set()
    unit.let_go(LIST)
