"""Units for a given memory: merge small ones while that is faster and there is room."""

from collections.abc import Callable
from typing import Any

TryOut = Callable[[set[str]], Any]


def choose_units(sizes: dict[str, int], memory: int, try_out: TryOut) -> set[str]:
    """Begin with a unit for each block. Then take outer modules, small ones first, in place of
    what is in them, wherever a step gets faster and fits."""

    def inside(name: str) -> set[str]:
        return {other for other in sizes if other.startswith(f"{name}.")}

    units = {name for name in sizes if not inside(name)}
    best = try_out(units)
    for outer in sorted((name for name in sizes if inside(name)), key=lambda name: sizes[name]):
        merged = units - inside(outer) | {outer}
        trial = try_out(merged)
        if trial.memory <= memory and trial.seconds < best.seconds:
            units, best = merged, trial
    return units
