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

**Meetings**, after an exception: a rank that has caught one may be the only one. So before its next
step it waits for all others to come and say that they have stopped, too. If one of them is still
in that step, or in the next, deadlock_watch.py ends the wait.

What is not covered: losses that differ from rank to rank in which outputs they use, where this
decides on a unit that gets no gradient anywhere (it is frozen), or on when a checkpoint runs units
again. Ranks that then wait for each other are told by deadlock_watch.py.

On a GPU this answer costs a wait of the host for the device. There the question is asked in the
first steps, and afterwards only if it ever made a difference.
"""

from collections.abc import Callable
from enum import IntEnum

import torch
import torch.distributed as dist

from minifsdp.checks.rank_circles import Circle, by_rank, circles
from minifsdp.checks.same_model import Notes, describe, forget_values, judge
from minifsdp.comm.collectives import all_gather
from minifsdp.comm.deadlock_watch import watch
from minifsdp.comm.message_tags import Kind, made
from minifsdp.comm.store import exchange
from minifsdp.unit import Unit

CHECKED_STEPS = 2
_MODES = ("", " in train() mode", " in eval() mode")  # see RankAgreement._mode


class Moment(IntEnum):
    """Where a rank is, in words that go before a unit's name."""

    FORWARD_OF = 0
    END_OF_FORWARD_OF = 1
    START_OF_A_BACKWARD_BELOW = 2
    BACKWARD_OF = 3
    END_OF_A_BACKWARD_BELOW = 4
    SUMMON_FULL_PARAMS_OF = 5

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Use(IntEnum):
    """What one rank has for a unit in a backward."""

    NONE = 0
    WAITING = 1  # only what no_sync has left
    GRADIENT = 2


class RankAgreement:
    """The conversations of one root's units.

    Units that all ranks share, in whatever way, are talked about in one circle. Those that belong
    to some of the ranks, such as experts, have circles of their own.

    Args:
        units: the root's first.
        settings: of the root, in words.
    """

    def __init__(self, units: list[Unit], settings: str = "") -> None:
        self.units, self._settings = units, settings
        self.steps = self._said_before = 0  # and messages, before the last one began
        # Some ranks use a unit that others do not: in this backward, in one of all.
        self.diverged = self._ever_diverged = False
        self.late: list[Unit] = []  # reduced at its end: what only no_sync has left; if apart, all
        self._compared = self._compared_values = False
        # This rank's last forward or backward has failed; and all ranks know that all have.
        self._failed = self._all_failed = False
        self._training = False  # it has begun, and a backward may come of it
        self._by_mode = next((u for u in units if u.precision.full_precision_in_eval), None)
        self._circles = circles(units)
        self._circle = {unit: circle for circle in self._circles for unit in circle.members}

    @property
    def checking(self) -> bool:
        """Whether moments are compared now."""
        return self.steps <= CHECKED_STEPS

    def start(self, forward: bool) -> None:
        """A forward begins, or parameters are summoned. The first time, compare the units
        themselves, and before the first forward their values.

        Raises:
            ValueError: ranks have wrapped different modules, or in different ways, or with
                different values. All raise it.
            RuntimeError: an exception ended the last step of this rank, and not of the others.
        """
        if self._failed:
            self._failed = False
            for circle in self._circles:
                for group in circle.groups:
                    exchange(group, "the start after an exception", None, lambda said: None)
            self.steps = 0  # all ranks have stopped; they begin anew, and count alike
        self._all_failed = False
        if not self._compared or (forward and not self._compared_values):
            self._compare(forward)

    def reset(self) -> None:
        """A step begins, or has failed and is forgotten."""
        self.diverged = self._training = False
        self._said_before = made()

    def begin(self) -> None:
        """A forward begins, and nothing has refused it."""
        self.steps += 1
        self._training = torch.is_grad_enabled()

    def compare_values_again(self) -> None:
        """They were changed by hand on this rank, and on all others, or they are no longer those
        of one model. (Units that some ranks share may have changed on those ranks alone.)"""
        self._compared_values &= len(self._circles) > 1

    def failed(self) -> None:
        """An exception has ended a forward or backward. It may have been this rank's alone, so
        before anything else all of them meet: else this rank would be a batch ahead of the others
        from now on. If it had not begun, and nothing was said, nobody has missed anything."""
        self._failed |= not self._all_failed and (self._training or made() != self._said_before)

    def _compare(self, forward: bool) -> None:
        complaint: str | None = None
        for groups, members in self._circles:
            watch(groups)
            said = [describe(unit, forward) for unit in members]
            tags = [unit.tag for unit in members]
            for group in groups:
                mine = Notes(dist.get_rank(), complaint, forward, self._settings, said, tags)
                complaint, all_forward, tags = exchange(
                    group, f"the comparison of what was wrapped ({said[0].name}, ...)", mine, judge
                )
                forward &= all_forward
            for unit, tag in zip(members if complaint is None else [], tags, strict=False):
                unit.tag = tag
        if complaint:
            self._all_failed = True
            raise ValueError(complaint)
        self._compared, self._compared_values = True, forward
        if forward:
            forget_values(self.units)

    def compares(self, unit: Unit) -> bool:
        """Whether ranks compare what they do with ``unit`` now: in the first steps."""
        return self.checking and not self.diverged and unit in self._circle

    def at(self, moment: Moment, unit: Unit) -> None:
        """Compare with the other ranks of ``unit`` where they are; only in the first steps.

        Raises:
            RuntimeError: some rank is elsewhere. All of them raise it.
        """
        if not self.compares(unit):
            return
        circle = self._circle[unit]
        mine = [int(moment), circle.members.index(unit), self._mode()]
        what = f"the comparison of steps ({moment} {unit.label})"
        said = self._tell(circle, Kind.MOMENT, what, mine)
        if len({tuple(place) for place in said.values()}) > 1:
            self._all_failed = True
            self.steps = 0  # all ranks have stopped here; they begin anew, and count alike
            where = {
                rank: f"{Moment(kind)} {circle.members[index].label}{_MODES[mode]}"
                for rank, (kind, index, mode) in said.items()
            }
            raise RuntimeError(
                f"the ranks are not in step ({by_rank(where)}). Every rank has to run the "
                f"same units in the same order, because they gather them together. Look for a "
                f"condition on the rank or on the data; a unit that a rank has no use for must run "
                f"there all the same."
            )

    def _mode(self) -> int:
        """0: it does not matter; 1: as in train(); 2: in full precision, as in eval()."""
        unit = self._by_mode
        return 0 if unit is None else 1 + (unit.unsharded.dtype is unit.padded_shard.dtype)

    def agree(self, use: Callable[[Unit], Use], synchronizes: bool) -> None:
        """Find out whether the ranks are apart in the backward that begins.

        Args:
            use: what this rank has for a unit.
            synchronizes: gradients are reduced; otherwise they wait (no_sync).

        Raises:
            RuntimeError: some ranks are inside of no_sync and others are not. All of them raise it.
        """
        self.diverged, self.late = False, []
        mine = {unit: use(unit) if unit.numel else Use.NONE for unit in self.units}
        highest = dict(mine)
        for circle in self._circles if self.asks else []:
            members = circle.members
            said = self._tell(
                circle,
                Kind.AGREEMENT,
                "the start of a backward",
                [synchronizes, self.diverged, self._mode(), *(mine[unit] for unit in members)],
            )
            for place, unit in enumerate(members):
                uses = [Use(note[3 + place]) for note in said.values()]
                highest[unit] = max(uses)
                self.diverged |= min(uses) < max(uses) == Use.GRADIENT
            self.diverged |= any(note[1] for note in said.values())  # heard of in another circle
            self._ever_diverged |= self.diverged
            if circle is self._circles[-1] and len({(n[0], n[2]) for n in said.values()}) > 1:
                self._all_failed = True
                inside = ("inside", "outside")
                where = {rank: inside[n[0]] + _MODES[n[2]] for rank, n in said.items()}
                raise RuntimeError(
                    f"some ranks run this backward inside of no_sync(), or in another mode, and "
                    f"others do not ({by_rank(where)}). They reduce gradients together, in one "
                    f"precision, or none does."
                )
        if synchronizes:
            late = (Use.WAITING, Use.GRADIENT) if self.diverged else (Use.WAITING,)
            self.late = [unit for unit in self.units if highest[unit] in late]

    @property
    def asks(self) -> bool:
        """Whether ranks compare their backwards: a GPU would have to wait for the answer."""
        return self._device.type == "cpu" or self.checking or self._ever_diverged

    @property
    def _device(self) -> torch.device:
        # Not that of a unit without parameters: nobody has moved it to where the others are.
        return next((unit.device for unit in self.units if unit.numel), self.units[0].device)

    def _tell(self, circle: Circle, kind: Kind, what: str, mine: list[int]) -> dict[int, list[int]]:
        """What each rank of the circle says, by rank. All say equally many numbers."""
        said = [[dist.get_rank(), *mine]]
        for group in circle.groups:
            notes = torch.tensor(said, device=self._device).view(-1)
            heard = notes.new_empty(group.size() * notes.numel())
            all_gather(heard, notes, group, circle.members[0].tag, what, kind)()
            said = heard.view(-1, 1 + len(mine)).tolist()
        return {rank: note for rank, *note in said}
