"""Which ranks have to agree on which units.

As a rule all units of a model belong to all ranks, and there is one agreement group. But a unit
may have a process group of its own, as experts do. Four ranks, where 0 and 1 share an expert::

    unit        its ranks       agreement group
    root        0 1 2 3         all ranks
    block       0 1 2 3         all ranks
    expert      0 1             the ranks 0 and 1

A unit that belongs to one rank alone is in no agreement group, because there is nothing to compare.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch.distributed as dist

from minifsdp.comm.consensus import groups_with_peers
from minifsdp.core.collectives import Group
from minifsdp.featured_unit import FeaturedUnit


class AgreementGroup(NamedTuple):
    """Ranks that have to agree on some units."""

    process_groups: list[Group]  # one; or two, with hybrid sharding: the row and the column
    units: list[FeaturedUnit]


def agreement_groups(units: list[FeaturedUnit]) -> list[AgreementGroup]:
    """The agreement groups that this rank is in. The one with the most ranks comes last, so that it
    can also hear what was found in the others."""
    widest = max(map(_process_groups, units), key=lambda g: (_count(g), -len(g)), default=[])
    found: dict[tuple[str, ...], AgreementGroup] = {}
    for unit in units:
        groups = _process_groups(unit)
        if _count(groups) == _count(widest) and _ranks(groups) <= _ranks(widest):
            groups = widest  # the same ranks, whether as one row, one column or a grid
        if groups:
            key = tuple(group.group_name for group in groups)
            found.setdefault(key, AgreementGroup(groups, [])).units.append(unit)
    return sorted(found.values(), key=lambda group: _count(group.process_groups))


def format_by_rank(texts: dict[int, str]) -> str:
    """``{0: "this", 1: "that", 2: "that"}`` as ``rank 0: this; ranks 1, 2: that``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}: {text}"
        for text, some in ranks.items()
    )


def format_ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 3]``; of more than eight at equal distances ``[0, 8, ..., 1016]``, so that what
    thousands of ranks send to one of them stays short. Different ranks give different texts."""
    if len(ranks) > 8:
        step = ranks[1] - ranks[0]
        if list(ranks) == [ranks[0] + step * place for place in range(len(ranks))]:
            return f"[{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
    return str(list(ranks))


def _process_groups(unit: FeaturedUnit) -> list[Group]:
    return groups_with_peers((unit.shard_group, unit.replicate_group))


def _count(groups: list[Group]) -> int:
    """How many ranks there are in a row, a column, or a grid."""
    return prod(group.size() for group in groups)


def _ranks(groups: list[Group]) -> set[int]:
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}
