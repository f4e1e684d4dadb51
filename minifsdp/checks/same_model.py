"""Have all ranks wrapped the same? What each says of its units, and the first difference in words.

Ranks that have built different models wait for each other for ever, or take one unit's parameters
for another's. rank_agreement.py lets them talk, before the first step; this is what they say.

Values are compared, too. If each rank draws its own, the model is made of pieces of all of them,
and replicas are no replicas. (DistributedDataParallel sends rank 0's values to all.) The values of
a sharded unit are only whole when it is wrapped, so a number is made of them there. It counts as
long as nobody has changed the chunk: what was loaded since is compared no more.
"""

from itertools import zip_longest
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from minifsdp.support.fingerprint import fingerprint
from minifsdp.unit import Unit


class Values(NamedTuple):
    """What a unit's values are, as numbers. None: not known."""

    whole: int | None  # the same on all ranks of the unit
    chunk: int | None  # the same on those that hold the same one
    rank: int  # which one it is


_when_wrapped: WeakKeyDictionary[Unit, Values] = WeakKeyDictionary()


class Said(NamedTuple):
    """What one rank says of one unit. All but the values has to be the same on all ranks."""

    name: str
    rest: str
    parameters: list[str]
    groups: dict[str, str]  # ranks -> the name of their group
    values: Values


class Notes(NamedTuple):
    """What one rank says of its units."""

    rank: int
    complaint: str | None  # found in another circle
    forward: bool  # it is about to run one
    settings: str  # of the root
    units: list[Said]
    tags: list[int]


class Outcome(NamedTuple):
    """What all ranks make of it."""

    complaint: str | None
    forward: bool  # all of them are about to run one, so values have been compared
    tags: list[int]


def describe(unit: Unit, forward: bool) -> Said:
    """Its name, and what else has to be the same on all ranks."""
    copies = unit.replicate_group.size() if unit.replicate_group is not None else 1
    low = unit.precision
    kept = unit.padded_shard.dtype
    dtypes = f"{kept}, computed with as {low.param_dtype or kept}"
    trained = "trained" if unit.sharded_flat_param.requires_grad else "frozen"
    when = "freed" if unit.reshard_after_forward else "kept"
    both = [g for g in (unit.shard_group, unit.replicate_group) if g is not None]
    return Said(
        f"unit {unit.label}",
        f" ({unit.numel} elements, {dtypes}, sharded over {unit.shard_world_size} and "
        f"replicated over {copies} ranks, {trained}, {when} after forward, {low})",
        [f"{info.name!r} {list(info.shape)}" for info in unit.param_infos],
        {str(dist.get_process_group_ranks(group)): group.group_name for group in both},
        values_now(unit) if forward else Values(None, None, unit.shard_rank),
    )


def judge(said: list[Notes]) -> Outcome:
    """Whether all ranks say the same; and the units' tags, which differ if a model before this one
    was not built alike."""
    complaint = next((note.complaint for note in said if note.complaint), None)
    forward = all(note.forward for note in said)
    complaint = complaint or difference(said) or (other_values(said) if forward else None)
    tags = [max(tags) for tags in zip(*(note.tags for note in said), strict=False)]
    return Outcome(complaint, forward, tags)


def difference(said: list[Notes]) -> str | None:
    """The first rank that has other units than the first of all, in words; None if all agree."""
    first = said[0]
    nothing = Said("no more units", "", [], {}, Values(None, None, 0))
    for note in said[1:]:
        pairs = list(zip_longest(first.units, note.units, fillvalue=nothing))
        found: tuple[str, str] | None = None
        for words in (1, 2):  # names first: a missing unit also shows in the size of one around it
            for one, other in pairs if found is None else []:
                if one[:words] != other[:words] and found is None:
                    found = one.name + one.rest, other.name + other.rest
        for one, other in pairs if found is None else []:
            for a, b in zip_longest(one.parameters, other.parameters, fillvalue="nothing more"):
                if a != b and found is None:
                    found = f"{a} in {one.name}", f"{b} in {other.name}"
        for one, other in pairs if found is None else []:
            for ranks in one.groups.keys() & other.groups.keys():
                a, b = one.groups[ranks], other.groups[ranks]
                if a != b and found is None:
                    found = f"{one.name} in group {a!r} of the ranks {ranks}", f"it in group {b!r}"
        if found is None and first.settings != note.settings:
            found = first.settings, note.settings
        if found is not None:
            return (
                f"the ranks have wrapped different modules: rank {first.rank} has {found[0]} where "
                f"rank {note.rank} has {found[1]}. Build the same model with the same settings, in "
                f"the same process groups, on all ranks."
            )
    return None


def other_values(said: list[Notes]) -> str | None:
    """The first unit whose values differ between ranks that should have the same, in words."""
    first = said[0]
    for note in said[1:]:
        for one, other in zip(first.units, note.units, strict=True):
            mine, theirs = one.values, other.values
            whole = None not in (mine.whole, theirs.whole) and mine.whole != theirs.whole
            same_chunk = mine.rank == theirs.rank and None not in (mine.chunk, theirs.chunk)
            if whole or (same_chunk and mine.chunk != theirs.chunk):
                return (
                    f"the ranks have different values in their parameters: those of {one.name} "
                    f"differ between the ranks {first.rank} and {note.rank}. Call "
                    f"torch.manual_seed() with the same seed on all ranks before the model is "
                    f"built, load the same checkpoint on all, or wrap with "
                    f"sync_module_states=True, which takes rank 0's."
                )
    return None


def remember_values(unit: Unit, whole: int | None) -> None:
    """Keep what the values of a unit are when it is wrapped, until the first forward."""
    if whole is not None:
        _when_wrapped[unit] = Values(whole, fingerprint([unit.padded_shard]), unit.shard_rank)


def forget_values(units: list[Unit]) -> None:
    """They have been compared."""
    for unit in units:
        _when_wrapped.pop(unit, None)


def values_now(unit: Unit) -> Values:
    """The number that was made of the whole, unless the chunk has been changed since."""
    chunk, before = fingerprint([unit.padded_shard]), _when_wrapped.get(unit)
    whole = before.whole if before is not None and before.chunk == chunk else None
    return Values(whole, chunk, unit.shard_rank)
