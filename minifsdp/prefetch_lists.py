"""Prefetch lists: a program says which units to gather ahead, instead of the recorded order.

The recorded order (prefetch.py) gathers one unit ahead. A program that knows its model can list
more units, or different ones::

    for block, next_one, second in zip(blocks, blocks[1:], blocks[2:]):
        block.set_modules_to_forward_prefetch([next_one, second])

    forward of     0        1        2        3
    gathered       0 1 2    3        4        5        two units ahead: three are alive, not two

Where a program has listed nothing, the recorded order is used. A list is gathered whatever the
limit (limiter.py) is: the list says how much memory to use. What is gathered already is left out.

Source: ``FSDPModule.set_modules_to_forward_prefetch`` (pytorch 2.13), where the lists are given in
the same way. There the forward has no other prefetching.
"""

from collections.abc import Iterable
from typing import Any

from minifsdp.core.parameters import Parameters
from minifsdp.core.unit_state import PREFETCH
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.prefetch_stats import CountedPrefetcher
from minifsdp.wrapping.module_tree import unit_of


class ListedPrefetcher(CountedPrefetcher):
    """Chooses what was listed for a unit. For a unit without a list it chooses from the orders.

    Raises:
        RuntimeError: a unit of another root is listed.
    """

    def pre_forward(self, unit: FeaturedUnit) -> Any:  # type: ignore[override]
        """The forward of ``unit`` begins. Returns its list, or the target of FORWARD_PRE."""
        target = super().pre_forward(unit)  # this records the order, too
        return _listed(unit, unit.forward_targets) or target

    def pre_backward(self, unit: FeaturedUnit) -> Any:  # type: ignore[override]
        """The backward of ``unit`` begins. Returns its list, or the target of BACKWARD_PRE."""
        target = super().pre_backward(unit)
        # Ranks need not agree on whether the backward of a unit without parameters runs.
        return _listed(unit, unit.backward_targets if unit.numel else []) or target


class ListedParameters(Parameters):
    """Gathers lists of units, too."""

    def prefetch(self, target: Any) -> None:
        """As in the core; or start to gather all units of a list. The program has said that there
        is room for them, so the limiter cannot decline."""
        if not isinstance(target, list):
            super().prefetch(target)
            return
        for unit in target:
            if unit.unsharded.needs_unshard and self.prefetcher.is_sound(unit):
                unit.hold(PREFETCH)
                self.limiter.admit(unit, needed=True)
                self.gather(unit)


def units_to_prefetch(modules: Iterable[Any]) -> list[FeaturedUnit]:
    """The units of a list of modules.

    Raises:
        ValueError: one of them was not given to ``fully_shard``.
    """
    units = []
    for module in modules:
        unit = unit_of(module) if hasattr(module, "_modules") else None
        if unit is None:
            raise ValueError(
                f"only modules that were given to fully_shard can be prefetched; there is a "
                f"{type(module).__name__} in the list. List the module around it that was."
            )
        units.append(unit)
    return units


def _listed(unit: FeaturedUnit, targets: list[FeaturedUnit]) -> list[FeaturedUnit]:
    root = (unit.ancestors or [unit])[0]
    for target in targets:
        if (target.ancestors or [target])[0] is not root:
            raise RuntimeError(
                f"unit {target.label} is in the prefetch list of unit {unit.label}, and in another "
                f"model. List modules of one model, below the one that was sharded last."
            )
    return targets
