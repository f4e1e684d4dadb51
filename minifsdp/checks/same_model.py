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

This runs before the first step, and again when a program has set values, but not in each step.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from minifsdp.checks.agreement_groups import AgreementGroup, format_ranks
from minifsdp.comm.consensus import consensus
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.fingerprint import fingerprint


class Values(NamedTuple):
    """Fingerprints of a unit's values on one rank. None: not known."""

    whole: int | None  # of all values: the same on all ranks of the unit
    chunk: int | None  # of this rank's chunk: the same on all ranks that have this chunk
    shard_rank: int  # which chunk it is


_when_wrapped: WeakKeyDictionary[FeaturedUnit, Values] = WeakKeyDictionary()


class UnitReport(NamedTuple):
    """How one rank describes one unit. All except the values has to be the same on all ranks."""

    name: str
    details: str  # sizes, dtypes and settings, in words
    parameters: list[str]  # names and shapes
    # The ranks of a process group -> its name. Ranks that use different groups of the same ranks
    # would wait for each other forever.
    groups: dict[str, str]
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
    """What the ranks have agreed on so far."""

    problem: str | None
    forward: bool  # all ranks are about to run a forward, so values are compared
    tags: list[int]  # of the units


def compare_models(
    groups: list[AgreementGroup], settings: str, forward: bool, problem: str | None = None
) -> tuple[str | None, bool]:
    """Compare with the other ranks what was wrapped, and agree on the tags of the units.

    Args:
        groups: all of a model. What is found in one is handed on to the next, and the last one has
            all ranks, so all ranks find the same.
        settings: of the root, in words.
        forward: this rank is about to run a forward, so it can compare values.
        problem: of this rank's model, in words, of which all ranks are to hear.

    Returns:
        The first problem or difference in words, or None; and whether values have been compared,
        too.
    """
    agreed = Agreed(problem and f"rank {dist.get_rank()}: {problem}", forward, [])
    for group in groups:
        units = [_describe(unit, agreed.forward) for unit in group.units]
        report = RankReport(dist.get_rank(), settings, units)
        agreed = agreed._replace(tags=[unit.tag for unit in group.units])
        about = "the comparison of what was wrapped"
        agreed = consensus(group.process_groups, about, report, agreed, _judge)
        if agreed.problem is None:
            for unit, tag in zip(group.units, agreed.tags, strict=True):
                unit.tag = tag
    return agreed.problem, agreed.forward


def _describe(unit: FeaturedUnit, with_values: bool) -> UnitReport:
    copies = unit.replicate_group.size() if unit.replicate_group is not None else 1
    precision, dtype = unit.precision, unit.padded_shard.dtype
    dtypes = f"{dtype}, computed with as {precision.param_dtype or dtype}"
    if unit.mixed is not None:
        dtypes += f", {unit.mixed.dtypes}"
    trained = "trained" if unit.sharded_flat_param.requires_grad else "frozen"
    when = "freed" if unit.reshard_after_forward else "kept"
    if unit.post_forward_lines is not None:
        when = f"kept by {len(unit.post_forward_lines[0])} ranks together"
    hook = "" if unit.comm_hook is None else f", reduced by {unit.comm_hook.name}"
    hook += str(unit.users_comm)
    groups = [group for group in (unit.shard_group, unit.replicate_group) if group is not None]
    targets = ("forward", unit.forward_targets), ("backward", unit.backward_targets)
    lists = "".join(f", prefetches {[u.name for u in us]} in {at}" for at, us in targets if us)
    return UnitReport(
        f"unit {unit.label}",
        f" ({unit.numel} elements, {dtypes}, sharded over {unit.shard_world_size} and "
        f"replicated over {copies} ranks, {trained}, {when} after forward, "
        f"{precision}{lists}{hook})",
        [
            f"{info.name!r} {list(info.shape)}" + f", Shard({info.dim})" * (info.dim > 0)
            for info in unit.param_infos
        ],
        {format_ranks(dist.get_process_group_ranks(group)): group.group_name for group in groups},
        _current_values(unit) if with_values else Values(None, None, unit.shard_rank),
    )


def _judge(reports: list[RankReport], agreed: list[Agreed]) -> Agreed:
    # Called on one rank of a group, with what all its ranks say; see comm/consensus.py.
    problem = next((one.problem for one in agreed if one.problem), None)
    forward = all(one.forward for one in agreed)
    problem = problem or _different_models(reports)
    # Compare values only of equal models, and only if all ranks have described them: a rank that
    # summons parameters while the others run a forward has not, and is told so at its first moment.
    if problem is None and forward:
        problem = _different_values(reports)
    # Tags differ where ranks have built different models before this one. Without this, their
    # messages would never match.
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
            # The whole differs between ranks with different seeds, and a chunk between replicas.
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


def remember_values(unit: FeaturedUnit, whole: int | None) -> None:
    """Keep the fingerprint ``whole`` of all values of a unit until :func:`forget_values`.

    Called when a unit has been built, and when its values have been set: at these moments this rank
    has all of them. With None (not known) the last one is kept.
    """
    if whole is not None:
        _when_wrapped[unit] = Values(whole, fingerprint([unit.padded_shard]), unit.shard_rank)


def forget_values(units: list[FeaturedUnit]) -> None:
    """Forget the fingerprints of these units, because they have been compared."""
    for unit in units:
        _when_wrapped.pop(unit, None)


def _current_values(unit: FeaturedUnit) -> Values:
    # If this rank's chunk has been changed since, by a checkpoint for example, the fingerprint of
    # the whole is that of other values. Comparing it would refuse models that are alike.
    chunk, before = fingerprint([unit.padded_shard]), _when_wrapped.get(unit)
    whole = before.whole if before is not None and before.chunk == chunk else None
    return Values(whole, chunk, unit.shard_rank)
