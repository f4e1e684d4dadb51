"""Have all ranks wrapped the same? What each says of its units, and the first difference in words.

Ranks that have built different models wait for each other for ever, or take one unit's parameters
for another's. lockstep.py lets them talk, before the first step; this is what they say.
"""

from itertools import zip_longest
from typing import NamedTuple

from minifsdp.unit import Unit


class Notes(NamedTuple):
    """What one rank says of its units."""

    rank: int
    complaint: str | None  # found in another circle
    units: list[tuple[str, str]]
    tags: list[int]


def describe(unit: Unit) -> tuple[str, str]:
    """Its name, and what else has to be the same on all ranks."""
    copies = unit.replicate_group.size() if unit.replicate_group is not None else 1
    dtypes = (
        f"{unit.chunk.dtype}, computed with as {unit.precision.param_dtype or unit.chunk.dtype}"
    )
    trained = "trained" if unit.shard.requires_grad else "frozen"
    when = "freed" if unit.reshard_after_forward else "kept"
    return f"unit {unit.label}", (
        f" ({unit.numel} elements, {dtypes}, sharded over {unit.ranks} and replicated over "
        f"{copies} ranks, {trained}, {when} after forward)"
    )


def difference(said: list[Notes]) -> str | None:
    """The first rank that has other units than the first of all, in words; None if all agree."""
    first = said[0]
    for note in said[1:]:
        for words in (1, 2):  # names first: a missing unit also shows in the size of one around it
            for one, other in zip_longest(first.units, note.units, fillvalue=("no more units", "")):
                if one[:words] != other[:words]:
                    return (
                        f"the ranks have wrapped different modules: rank {first.rank} has "
                        f"{''.join(one)} where rank {note.rank} has {''.join(other)}. Build the "
                        f"same model with the same settings on all ranks; only the values of "
                        f"parameters may differ."
                    )
    return None
