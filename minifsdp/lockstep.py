"""All ranks in step.

A collective is a conversation in which everybody has to say their line. If one rank skips a layer,
or takes two in another order, the others wait for it until a timeout, minutes later, and then learn
nothing but that they waited. So ranks compare notes, in two ways.

**Checks**, in the first steps of a root: who has which units, once; then, at each of these moments,
which one it is. That is one tiny message each, and ranks that differ all get the same error, with
the names of both modules, before anything is gathered::

    rank 0   forward of 'a'   forward of 'b'   end of forward
    rank 1   forward of 'a'   end of forward                     error on both

**Agreement**, at the start of each backward: which units get a gradient, on which ranks. A rank
whose loss has no use for a unit is nothing wrong (an auxiliary loss, an expert without tokens), but
its silence would leave the others waiting. If ranks differ, they are *apart* in this backward: all
of them gather all units before it and reduce all gradients after it, with zeros from those who have
nothing to give. So the mean is DistributedDataParallel's, and the order of collectives is the same
on all ranks, whatever each of them computes in between. So is the memory: that of a whole model.

What is not covered, and still leaves ranks waiting for each other: losses that differ from rank to
rank in which outputs they use, where this decides on a unit that gets no gradient anywhere (it is
frozen), or on when a checkpoint runs units again.

On a GPU this answer costs a wait of the host for the device. There the question is asked in the
first steps, and afterwards only if it ever made a difference.
"""

from collections.abc import Callable
from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from minifsdp.collectives import Group, all_gather, gather_objects
from minifsdp.compare import Notes, describe, difference
from minifsdp.unit import Unit

CHECKED_STEPS = 2
_MOMENTS, _AGREEMENT = 0x4D46_0000 - 1, 0x4D46_0000 - 2  # tags; units count up from there


class Moment(IntEnum):
    """Where a rank is, in words that go before a unit's name."""

    FORWARD_OF = 0
    END_OF_FORWARD_OF = 1
    START_OF_A_BACKWARD_BELOW = 2
    BACKWARD_OF = 3
    END_OF_A_BACKWARD_BELOW = 4
    SUMMON_FULL_PARAMS_OF = 5


class Use(IntEnum):
    """What one rank has for a unit in a backward."""

    NONE = 0
    WAITING = 1  # only what no_sync has left
    GRADIENT = 2


class Circle(NamedTuple):
    """Ranks that have to be in step about some units."""

    groups: list[Group]  # word goes along the first and then, with hybrid sharding, the second
    members: list[Unit]


class Lockstep:
    """The conversations of one root's units.

    Units that all ranks share, in whatever way, are talked about in one circle. Those that belong
    to some of the ranks, such as experts, have circles of their own.

    Args:
        units: the root's first.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.steps = 0
        self.apart = False  # in this backward: some ranks use a unit that others do not
        self.late: list[Unit] = []  # reduced at its end: what only no_sync has left; if apart, all
        self._compared = False
        self._ever_apart = False
        widest = max(map(_groups, units), key=lambda groups: (_breadth(groups), -len(groups)))
        circles: dict[tuple[str, ...], Circle] = {}
        self._circle: dict[Unit, Circle] = {}
        for unit in units:
            groups = _groups(unit)
            if _breadth(groups) == _breadth(widest) and _ranks(groups) <= _ranks(widest):
                groups = widest
            if groups:
                key = tuple(group.group_name for group in groups)
                self._circle[unit] = circles.setdefault(key, Circle(groups, []))
                self._circle[unit].members.append(unit)
        # The one of all ranks comes last: so it hears what was found in the others.
        self._circles = sorted(circles.values(), key=lambda circle: _breadth(circle.groups))

    @property
    def checking(self) -> bool:
        """Whether moments are compared now."""
        return self.steps <= CHECKED_STEPS

    def start(self) -> None:
        """A forward begins, or parameters are summoned; the first time, compare the units
        themselves.

        Raises:
            ValueError: ranks have wrapped different modules, or in different ways. All raise it.
        """
        if self._compared:
            return
        complaint: str | None = None
        for groups, members in self._circles:
            tags = [unit.tag for unit in members]
            said = [Notes(dist.get_rank(), complaint, [describe(unit) for unit in members], tags)]
            for group in groups:
                said = [note for notes in gather_objects(said, group) for note in notes]
            complaint = next((n.complaint for n in said if n.complaint), None) or difference(said)
            for place, unit in enumerate(members if complaint is None else []):
                # They differ, if a model before this one was not built alike.
                ranks = _ranks(_groups(unit)[:1])
                unit.tag = max(note.tags[place] for note in said if note.rank in ranks)
        if complaint:
            raise ValueError(complaint)
        self._compared = True

    def at(self, moment: Moment, unit: Unit) -> None:
        """Compare with the other ranks of ``unit`` where they are; only in the first steps.

        Raises:
            RuntimeError: some rank is elsewhere. All of them raise it.
        """
        circle = self._circle.get(unit)
        if circle is None or not self.checking or self.apart:
            return
        said = self._tell(circle, _MOMENTS, [int(moment), circle.members.index(unit)])
        if len({tuple(place) for place in said.values()}) > 1:
            self.steps = 0  # all ranks have stopped here; they begin anew, and count alike
            where = {
                rank: f"{Moment(kind).name.lower().replace('_', ' ')} {circle.members[index].label}"
                for rank, (kind, index) in said.items()
            }
            raise RuntimeError(
                f"the ranks are not in step ({_by_rank(where)}). Every rank has to run the "
                f"same units in the same order, because they gather them together. Look for a "
                f"condition on the rank or on the data; a unit that a rank has no use for must run "
                f"there all the same."
            )

    def agree(self, use: Callable[[Unit], Use], synchronizes: bool) -> None:
        """Find out whether the ranks are apart in the backward that begins.

        Args:
            use: what this rank has for a unit.
            synchronizes: gradients are reduced; otherwise they wait (no_sync).

        Raises:
            RuntimeError: some ranks are inside of no_sync and others are not. All of them raise it.
        """
        self.apart, self.late = False, []
        mine = {unit: use(unit) if unit.numel else Use.NONE for unit in self.units}
        highest = dict(mine)
        for circle in self._circles if self._asks() else []:
            members = circle.members
            said = self._tell(
                circle, _AGREEMENT, [synchronizes, self.apart, *(mine[unit] for unit in members)]
            )
            for place, unit in enumerate(members):
                uses = [Use(note[2 + place]) for note in said.values()]
                highest[unit] = max(uses)
                self.apart |= min(uses) < max(uses) == Use.GRADIENT
            self.apart |= any(note[1] for note in said.values())  # heard of in another circle
            self._ever_apart |= self.apart
            if circle is self._circles[-1] and len({note[0] for note in said.values()}) > 1:
                where = {rank: "outside" if note[0] else "inside" for rank, note in said.items()}
                raise RuntimeError(
                    f"some ranks run this backward inside of no_sync() and others do not "
                    f"({_by_rank(where)}). They reduce gradients together, or none does."
                )
        if synchronizes:
            late = (Use.WAITING, Use.GRADIENT) if self.apart else (Use.WAITING,)
            self.late = [unit for unit in self.units if highest[unit] in late]

    def _asks(self) -> bool:
        return self._device.type == "cpu" or self.checking or self._ever_apart

    @property
    def _device(self) -> torch.device:
        # Not that of a unit without parameters: nobody has moved it to where the others are.
        return next((unit.device for unit in self.units if unit.numel), self.units[0].device)

    def _tell(self, circle: Circle, tag: int, mine: list[int]) -> dict[int, list[int]]:
        """What each rank of the circle says, by rank. All say equally many numbers."""
        said = [[dist.get_rank(), *mine]]
        for group in circle.groups:
            notes = torch.tensor(said, device=self._device).view(-1)
            heard = notes.new_empty(group.size() * notes.numel())
            all_gather(heard, notes, group, tag)()
            said = heard.view(-1, 1 + len(mine)).tolist()
        return {rank: note for rank, *note in said}


def _groups(unit: Unit) -> list[Group]:
    """Those in which there is somebody to talk to. (torch's fake ranks never answer.)"""
    both = [g for g in (unit.shard_group, unit.replicate_group) if g is not None and g.size() > 1]
    return [group for group in both if "fake" not in dist.get_backend_config(group)]


def _breadth(groups: list[Group]) -> int:
    """How many ranks there are in a row, a column, or a grid."""
    return prod(group.size() for group in groups)


def _ranks(groups: list[Group]) -> set[int]:
    return {rank for group in groups for rank in dist.get_process_group_ranks(group)}


def _by_rank(what: dict[int, str]) -> str:
    """``rank 0: this; ranks 1, 2: that``."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(what.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    )
