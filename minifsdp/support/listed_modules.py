"""Several modules as one unit: ``fully_shard([model.norm, model.output])``.

Small modules that run one after the other are worth one message, not one each. And a parameter that
two modules share has to be in one unit. Where only the whole model is around both of them, such as
an embedding and a head, a list makes that unit::

    fully_shard([model.norm, model.output])

    before   norm's forward       gather the unit
    after    norm's forward       keep it: output is still to run
    after    output's forward     free it, as after the forward of any unit

Between the first of the modules that runs and the last one the unit is *open*. Modules that do not
run at all would leave it open for ever; so it is closed at the end of the outermost forward at the
latest. In a backward nothing is different: a unit is gathered when the first gradient reaches it,
and freed when its gradient is complete, however many modules it has.

Source: ``fully_shard`` (pytorch 2.13), ``_register_group_forward_hooks``. There the last call of a
list that ran in part is told by the root as well.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from minifsdp.unit import Unit


class ListedModules(nn.Module):
    """What ``unit.module`` is for a list: the modules, by their positions in it. It is in no model,
    and is never called.

    Attributes:
        to_run: those whose forward the unit is still kept for; empty if it is not open.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for position, module in enumerate(modules):
            self.add_module(str(position), module)
        self.to_run: set[nn.Module] = set()


def outermost(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """A module, or those of a list that are not below others of it; each once.

    Raises:
        TypeError: it is something else.
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


def is_list(unit: Unit) -> bool:
    """Whether the unit is that of several modules."""
    return isinstance(unit.module, ListedModules)


def is_open(unit: Unit) -> bool:
    """Whether modules of the unit's list have run in this forward, and others are still to run."""
    return isinstance(unit.module, ListedModules) and bool(unit.module.to_run)


def starts(unit: Unit, module: nn.Module) -> None:
    """The forward of ``module`` begins. The unit is open now, unless ``module`` is the last one."""
    if isinstance(unit.module, ListedModules):
        unit.module.to_run = (unit.module.to_run or set(unit.module.children())) - {module}


def close(unit: Unit) -> None:
    """What has not run by now does not run in this forward."""
    if isinstance(unit.module, ListedModules):
        unit.module.to_run = set()
