"""Who has to be in step with whom.

Units that all ranks share, in whatever way, are talked about in one circle of ranks. Those that
belong to some of the ranks, such as experts, have circles of their own. A unit that one rank has
for itself has none, because there is nobody to ask.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch.distributed as dist

from minifsdp.comm.collectives import Group
from minifsdp.unit import Unit


class Circle(NamedTuple):
    """Ranks that have to be in step about some units."""

    groups: list[Group]  # word goes along the first and then, with hybrid sharding, the second
    members: list[Unit]


def circles(units: list[Unit]) -> list[Circle]:
    """The circles of one root. That of all ranks comes last: it hears what was found in others."""
    widest = max(map(_groups, units), key=lambda groups: (_breadth(groups), -len(groups)))
    found: dict[tuple[str, ...], Circle] = {}
    for unit in units:
        groups = _groups(unit)
        if _breadth(groups) == _breadth(widest) and _ranks(groups) <= _ranks(widest):
            groups = widest
        if groups:
            key = tuple(group.group_name for group in groups)
            found.setdefault(key, Circle(groups, [])).members.append(unit)
    return sorted(found.values(), key=lambda circle: _breadth(circle.groups))


def by_rank(what: dict[int, str]) -> str:
    """``rank 0: this; ranks 1, 2: that``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(what.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    )


def groups_with_peers(groups: Iterable[dist.ProcessGroup | None]) -> list[dist.ProcessGroup]:
    """Those with other ranks that answer. (torch's fake ranks never answer.)"""
    both = [group for group in groups if group is not None and group.size() > 1]
    return [group for group in both if "fake" not in dist.get_backend_config(group)]


def _groups(unit: Unit) -> list[Group]:
    return groups_with_peers((unit.shard_group, unit.replicate_group))


def _breadth(groups: list[Group]) -> int:
    """How many ranks there are in a row, a column, or a grid."""
    return prod(group.size() for group in groups)


def _ranks(groups: list[Group]) -> set[int]:
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}
