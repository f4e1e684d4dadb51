"""Whether all ranks have wrapped the same model, with the same values.

Ranks with different models would wait for each other forever, or take the parameters of one unit
for those of another. So before the first step each rank describes its units, and the first rank
compares the descriptions and puts the first difference into words::

    rank 0: unit 'a' (42 elements, ...)        the ranks have wrapped different modules: rank 0 has
    rank 1: unit 'a' (56 elements, ...)   ->   unit 'a' (42 elements, ...) where rank 1 has
                                               unit 'a' (56 elements, ...)

Values are compared too. If each rank drew its own, a sharded model would be made of pieces of
different models, and replicas would differ. (DistributedDataParallel sends rank 0's values to all
ranks instead.) A rank has all values of a sharded unit only while it wraps the unit, so it computes
a fingerprint of them then. That fingerprint counts only if the shard has not been changed since, as
it is when a checkpoint is loaded.

This runs once for each model, not in each step.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from minifsdp.support.fingerprint import fingerprint
from minifsdp.unit import Unit


class Values(NamedTuple):
    """Fingerprints of a unit's values on one rank. None: not known."""

    whole: int | None  # of all values: the same on all ranks of the unit
    chunk: int | None  # of this rank's chunk: the same on all ranks that have this chunk
    shard_rank: int  # which chunk it is


_when_wrapped: WeakKeyDictionary[Unit, Values] = WeakKeyDictionary()


class UnitReport(NamedTuple):
    """How one rank describes one unit. All but the values has to be the same on all ranks."""

    name: str
    details: str
    parameters: list[str]
    groups: dict[str, str]  # the ranks of a process group -> its name
    values: Values

    def __str__(self) -> str:
        return self.name + self.details


_NO_UNIT = UnitReport("no more units", "", [], {}, Values(None, None, 0))


class RankReport(NamedTuple):
    """How one rank describes its model."""

    rank: int
    settings: str  # of the root
    units: list[UnitReport]


class Agreed(NamedTuple):
    """What the ranks have agreed on."""

    problem: str | None
    forward: bool  # all ranks are about to run a forward, so values are compared
    tags: list[int]  # of the units


def describe(unit: Unit, forward: bool) -> UnitReport:
    """This rank's description of a unit.

    Args:
        forward: with fingerprints of the values.
    """
    copies = unit.replicate_group.size() if unit.replicate_group is not None else 1
    precision, dtype = unit.precision, unit.padded_shard.dtype
    dtypes = f"{dtype}, computed with as {precision.param_dtype or dtype}"
    trained = "trained" if unit.sharded_flat_param.requires_grad else "frozen"
    when = "freed" if unit.reshard_after_forward else "kept"
    groups = [group for group in (unit.shard_group, unit.replicate_group) if group is not None]
    return UnitReport(
        f"unit {unit.label}",
        f" ({unit.numel} elements, {dtypes}, sharded over {unit.shard_world_size} and "
        f"replicated over {copies} ranks, {trained}, {when} after forward, {precision})",
        [f"{info.name!r} {list(info.shape)}" for info in unit.param_infos],
        {str(dist.get_process_group_ranks(group)): group.group_name for group in groups},
        current_values(unit) if forward else Values(None, None, unit.shard_rank),
    )


def compare_reports(reports: list[RankReport], agreed: list[Agreed]) -> Agreed:
    """The judge of a consensus (comm/consensus.py) on whether all ranks describe the same model.

    Where they do, they also agree on the tags of the units. Those differ between ranks if these
    have built different models before, of which an error has told.
    """
    problem = next((one.problem for one in agreed if one.problem), None)
    forward = all(one.forward for one in agreed)
    problem = problem or _different_models(reports)
    if problem is None and forward:
        problem = _different_values(reports)
    tags = [max(tags) for tags in zip(*(one.tags for one in agreed), strict=False)]
    return Agreed(problem, forward, tags)


def _different_models(reports: list[RankReport]) -> str | None:
    first = reports[0]
    for other in reports[1:]:
        for differ, here, there in _pairs(first, other):
            if differ:
                return (
                    f"the ranks have wrapped different modules: rank {first.rank} has {here} where "
                    f"rank {other.rank} has {there}. Build the same model with the same settings, "
                    f"in the same process groups, on all ranks."
                )
    return None


def _pairs(one: RankReport, other: RankReport) -> Iterator[tuple[bool, object, object]]:
    """Whether two things differ, and both in words. The most telling difference comes first."""
    units = list(zip_longest(one.units, other.units, fillvalue=_NO_UNIT))
    for a, b in units:  # before sizes: a unit that is missing also changes the size of its parent
        yield a.name != b.name, a, b
    for a, b in units:
        yield a.details != b.details, a, b
    for a, b in units:
        for p, q in zip_longest(a.parameters, b.parameters, fillvalue="nothing more"):
            yield p != q, f"{p} in {a.name}", f"{q} in {b.name}"
    for a, b in units:
        for ranks in a.groups.keys() & b.groups.keys():
            p, q = a.groups[ranks], b.groups[ranks]
            yield p != q, f"{a.name} in group {p!r} of the ranks {ranks}", f"it in group {q!r}"
    yield one.settings != other.settings, one.settings, other.settings


def _different_values(reports: list[RankReport]) -> str | None:
    first = reports[0]
    for other in reports[1:]:
        for one, another in zip(first.units, other.units, strict=True):
            a, b = one.values, another.values
            whole = None not in (a.whole, b.whole) and a.whole != b.whole
            same_chunk = a.shard_rank == b.shard_rank and None not in (a.chunk, b.chunk)
            if whole or (same_chunk and a.chunk != b.chunk):
                return (
                    f"the ranks have different values in their parameters: those of {one.name} "
                    f"differ between the ranks {first.rank} and {other.rank}. Call "
                    f"torch.manual_seed() with the same seed on all ranks before the model is "
                    f"built, load the same checkpoint on all, or wrap with "
                    f"sync_module_states=True, which takes rank 0's."
                )
    return None


def remember_values(unit: Unit, whole: int | None) -> None:
    """Keep the fingerprint ``whole`` of all values of a unit until :func:`forget_values`."""
    if whole is not None:
        _when_wrapped[unit] = Values(whole, fingerprint([unit.padded_shard]), unit.shard_rank)


def forget_values(units: list[Unit]) -> None:
    """Forget the fingerprints of these units, because they have been compared."""
    for unit in units:
        _when_wrapped.pop(unit, None)


def current_values(unit: Unit) -> Values:
    """Fingerprints of the unit's values now. That of the whole is not known if this rank's chunk
    has been changed since it was computed."""
    chunk, before = fingerprint([unit.padded_shard]), _when_wrapped.get(unit)
    whole = before.whole if before is not None and before.chunk == chunk else None
    return Values(whole, chunk, unit.shard_rank)
