"""All ranks run the same units in the same order; and what happens if they do not.

A collective needs all ranks. If a rank skips a layer, or runs two layers in a different order, the
others wait for it until a timeout, minutes later, and the error does not say why. So the ranks of a
model compare what they do, in three ways:

**Checks**, in the first steps. Before the first one the ranks compare which units they have
(same_model.py). Then each rank says at certain moments where it is (:class:`Moment`), in one tiny
message. If they differ, all ranks raise one error, which names both units, before a gather::

    rank 0   forward of 'a'   forward of 'b'   end of forward
    rank 1   forward of 'a'   end of forward                     error on both ranks

**Agreement**, at the start of each backward: which units get a gradient on which ranks, and from
which of several forwards. It is no mistake if a loss does not use a unit on some ranks (an
auxiliary loss, an expert without tokens). But these ranks would never start the unit's reduction,
and the others would wait for it. If ranks differ in that, they *diverge* in this backward: all of
them gather all units before it and reduce all gradients after it, with zeros on the ranks that have
no gradient. So the mean is that of DistributedDataParallel, and all ranks start the same
collectives in the same order, whatever each of them computes in between. The price is the memory of
a whole model.

**Meeting after an exception.** A rank that has caught an exception may be the only one that had it.
So before its next step it waits until all ranks say that they have stopped, too. If one of them has
gone on, deadlock_watch.py ends the wait.

One case is left to deadlock_watch.py: ranks whose losses use different outputs, if that decides
whether a frozen unit has a backward, or when an activation checkpoint runs units again.

After the first steps one message for each backward is left. On a GPU the host would have to wait
for its answer, so there even this message stops, unless ranks have ever diverged. Only
same_launches.py is left there.
"""

from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from zlib import crc32

import torch

from minifsdp.checks.agreement_groups import AgreementGroup, agreement_groups, format_by_rank
from minifsdp.checks.same_model import compare_models, forget_values
from minifsdp.comm.collectives import direct
from minifsdp.comm.consensus import first_problem, gather_numbers, groups_with_peers
from minifsdp.comm.deadlock_watch import watch
from minifsdp.comm.message_tags import Kind, messages_started
from minifsdp.comm.neighbors import find_neighbors
from minifsdp.core.collectives import Group
from minifsdp.core.layers import Call, Layer
from minifsdp.core.reduce import Reduction
from minifsdp.core.unit_state import Purpose
from minifsdp.featured_hooks import FeaturedHooks
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.no_sync import NoSync
from minifsdp.support.several_forwards import SeveralForwards

CHECKED_STEPS = 2
DIVERGED = "ranks that use different units"  # a reason to stay, and one for a gradient to wait
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


class GradSource(IntEnum):
    """What one rank has to reduce for a unit after a backward."""

    NONE = 0
    NO_SYNC = 1  # only what backwards inside of no_sync have left
    BACKWARD = 2  # this backward computes a gradient


class RankAgreement(Layer):
    """What the ranks of one root compare.

    Attributes:
        steps: how many steps have begun, since the last exception if there was one.
        diverged: in this backward some ranks get a gradient for a unit and others do not. So all
            units are gathered before it and held for DIVERGED: one rank may need a unit again when
            the others do not, and it cannot gather the unit alone.
        late: the units whose gradients are reduced at the end of this backward. A gradient that
            comes earlier waits for DIVERGED: some ranks may never have it.
    """

    def __init__(self, hooks: FeaturedHooks, no_sync: NoSync, several: SeveralForwards) -> None:
        self._hooks, self._no_sync, self._engine = hooks, no_sync, hooks.engine
        self._several = several
        self.units = units = hooks.engine.units
        limiter, prefetcher = hooks.engine.limiter, hooks.engine.prefetcher
        room, more = (getattr(limiter, name, 0) for name in ("limit", "freeing"))
        limit = True if (room, more) == (2, 1) else (room, more) if more else room or False
        self._settings = (  # as the program has chosen them; the device may decide on the last
            f"limit_all_gathers={limit}, "
            f"backward_prefetch={prefetcher.backward}, forward_prefetch={prefetcher.forward}"
        )
        self.sharded = any(unit.shard_group is not None for unit in units)  # not all replicated
        self.steps = self._started_before = 0  # messages that were started before this step
        self.diverged = self._ever_diverged = False
        self.late: list[FeaturedUnit] = []
        self._compared = self._compared_values = False
        # This rank's last forward or backward has failed; and it is known to have failed on all.
        self._failed = self._all_failed = False
        self._training = False  # a forward has begun that a backward may follow
        self._by_mode = next((u for u in units if u.precision.full_precision_in_eval), None)
        self._groups = agreement_groups(units)
        self._group_of = {unit: group for group in self._groups for unit in group.units}

    # ------------------------------------------------------------------------------------- steps

    def start(self, purpose: Purpose, problem: str | None = None) -> None:
        """Compare what was wrapped, the first time; and values, the first time before a forward.

        Args:
            problem: what this rank has found wrong with its model already, in words.

        Raises:
            ValueError: ranks have wrapped different modules, or the same with other settings or
                other values; or one has a problem. All ranks raise it.
            RuntimeError: an exception has ended the last step of this rank, but not of the others;
                or the process group was destroyed.
        """
        forward = purpose is not Purpose.LOOK
        if not forward and not self.sharded:
            return  # each rank has all parameters, and looks at them alone
        if not (forward and self._compared):  # before torch is asked for them
            self._process_groups()
        if self._failed:
            self._failed = False
            for group in self._groups:
                first_problem(group.process_groups, "the start after an exception", None)
            self.steps = 0  # on all ranks, so that they check the same steps from here on
        self._all_failed = False
        if not self._compared or (forward and not self._compared_values):
            self._compare(forward, problem)
        if forward:
            self.steps += 1
            self._training = torch.is_grad_enabled()

    def reset(self) -> None:
        """Ranks are together again, or will have to meet."""
        self._end_backward()
        self._training = False
        self._started_before = messages_started()

    def compare_values_again(self) -> None:
        """The user has set values, which should be the same on all ranks. (Not with several
        agreement groups: units of some ranks may have been set on those ranks alone, and the other
        ranks would not come to compare.)"""
        self._compared_values &= len(self._groups) > 1

    def failed(self) -> None:
        """An exception has ended a forward or backward, perhaps on this rank only. Then all ranks
        have to meet before the next step; else this rank would be a batch ahead of the others. An
        exception before anything was started concerns no other rank."""
        active = self._training or messages_started() != self._started_before
        self._failed |= not self._all_failed and active

    def _compare(self, forward: bool, problem: str | None) -> None:
        for group in self._groups:
            watch(group.process_groups)
        problem, forward = compare_models(self._groups, self._settings, forward, problem)
        if problem is not None:
            self._all_failed = True
            raise ValueError(problem)
        for process_group in self._process_groups() if direct(self._device) else ():
            find_neighbors(process_group)
        self._compared, self._compared_values = True, forward
        if forward:
            forget_values(self.units)

    def _process_groups(self) -> list[Group]:
        """Those that units are sharded and replicated in, in the order of the units. Raises if one
        of them was destroyed."""
        found = [groups_with_peers((unit.shard_group, unit.replicate_group)) for unit in self.units]
        return list(dict.fromkeys(group for groups in found for group in groups))

    # ----------------------------------------------------------------------------------- moments

    @property
    def checking(self) -> bool:
        """Whether ranks compare where they are: in the first steps only."""
        return self.steps <= CHECKED_STEPS

    def compares(self, unit: FeaturedUnit) -> bool:
        """Whether ranks compare now what they do with ``unit``."""
        return self.checking and not self.diverged and unit in self._group_of

    def at(self, moment: Moment, unit: FeaturedUnit) -> None:
        """Compare with the other ranks of ``unit`` where they are. Only in the first steps.

        Raises:
            RuntimeError: some rank is at another moment, or at another unit. All ranks raise it.
        """
        if not self.compares(unit):
            return
        group = self._group_of[unit]
        about = f"the comparison of steps ({moment} {unit.label})"
        mine = [int(moment), group.units.index(unit), self._mode()]
        found = self._gather(group, Kind.MOMENT, about, mine)
        if len(set(map(tuple, found.values()))) > 1:
            self._all_failed = True
            self.steps = 0  # on all ranks, so that they check the same steps from here on
            where = {
                rank: f"{Moment(moment)} {group.units[index].label}{_MODES[mode]}"
                for rank, (moment, index, mode) in found.items()
            }
            raise RuntimeError(
                f"the ranks are not in step ({format_by_rank(where)}). Every rank has to run the "
                f"same units in the same order, because they gather them together. Look for a "
                f"condition on the rank or on the data; a unit that a rank has no use for must run "
                f"there all the same."
            )

    def before_forward(self, call: Call) -> None:
        """Raises RuntimeError: see :meth:`at`."""
        if self.steps > CHECKED_STEPS:
            return
        # When a checkpoint runs a part again, a unit with nothing to gather needs no other rank.
        if call.unit.unsharded.needs_unshard or not self._hooks.backward.running:
            self.at(Moment.FORWARD_OF, call.unit)

    def end_of_forward(self, unit: FeaturedUnit) -> None:
        """Raises RuntimeError: see :meth:`at`."""
        self.at(Moment.END_OF_FORWARD_OF, unit)

    def start_backward(self, call: Call | None) -> None:
        """Find out whether ranks diverge, and if so gather all units: others may not be there to
        gather with later. Raises RuntimeError: see :meth:`at` and :meth:`agree`."""
        self.at(Moment.START_OF_A_BACKWARD_BELOW, self._engine.root)
        self.agree(_source, self._no_sync.unreduced)
        for unit in self.units if self.diverged else ():
            self._engine.parameters.unshard(unit, DIVERGED)

    def before_backward(self, call: Call) -> None:
        """Raises RuntimeError: see :meth:`at`."""
        if self.steps <= CHECKED_STEPS and call.unit.unsharded.needs_unshard:
            self.at(Moment.BACKWARD_OF, call.unit)

    def end_of_backward(self) -> None:
        """Reduce what waits for all ranks. Raises RuntimeError: see :meth:`at`."""
        self.at(Moment.END_OF_A_BACKWARD_BELOW, self._engine.root)
        for unit in self.late:
            self._engine.gradients.reduce_held(unit)

    def complete(self, reductions: Sequence[Reduction]) -> None:
        """Ranks are together again. If they had diverged, each has recorded a pre-backward
        order of its own: forget it."""
        if self.diverged:
            self._engine.prefetcher.pre_backward_order.forget()
        self._end_backward()

    def _end_backward(self) -> None:
        for unit in self.late:
            unit.waits.discard(DIVERGED)
        for unit in self.units if self.diverged else ():
            unit.let_go(DIVERGED)
        self.diverged, self.late = False, []

    def agree(
        self, source: Callable[[FeaturedUnit], GradSource], unreduced: Collection[FeaturedUnit]
    ) -> None:
        """A backward begins: find out whether ranks diverge in it, and set ``late``.

        Args:
            source: what this rank will have to reduce for a unit.
            unreduced: the units whose gradients are not reduced; inside of no_sync all of them.

        Raises:
            RuntimeError: some ranks are inside of no_sync and others are not, or their precision
                depends on the mode and they are in different modes. All ranks raise it.
        """
        mine = {unit: source(unit) if unit.numel else GradSource.NONE for unit in self.units}
        highest = dict(mine)  # of all ranks
        found: dict[int, list[int]] = {}
        which = self._which(unreduced) if unreduced else 0
        # autograd.grad() for an input reaches no unit's gradient, though its graph has parameters.
        # What waits is then reduced with a later backward. (While all units are in reentrant
        # checkpoints, no graph has parameters.) Python's collector may decide when a graph is gone.
        # So where the ranks do not compare, every backward is taken to reach some gradient.
        reaches = (
            not self.compares_backwards
            or GradSource.BACKWARD in mine.values()
            or not any(unit.unsharded.is_saved for unit in mine)
        )
        self._several.look_ahead()
        for group in self._groups if self.compares_backwards else []:
            checksum = self._several.checksum({*group.units})
            numbers = [which, self._mode(), self.diverged, reaches, checksum]
            numbers += [mine[unit] for unit in group.units]
            found = self._gather(group, Kind.AGREEMENT, "the start of a backward", numbers)
            _, _, diverged, reached, checksums, *by_unit = zip(*found.values(), strict=True)
            self.diverged |= len({*checksums}) > 1  # some leave out the loss of a forward
            self.diverged |= any(diverged)  # in an agreement group of fewer ranks, asked before
            reaches |= any(reached)
            for unit, sources in zip(group.units, by_unit, strict=True):
                highest[unit] = GradSource(max(sources))
                self.diverged |= min(sources) < max(sources) == GradSource.BACKWARD
        self._ever_diverged |= self.diverged
        # The last group has all ranks, so either all of them raise or none.
        if len({tuple(numbers[:2]) for numbers in found.values()}) > 1:
            self._all_failed = True
            of = len(self.units)
            words = {0: "outside", of: "inside"}
            where = {
                rank: words.get(n[0] >> 32, f"inside for {n[0] >> 32} of {of} units") + _MODES[n[1]]
                for rank, n in found.items()
            }
            raise RuntimeError(
                f"some ranks run this backward inside of no_sync(), or in another mode, and others "
                f"do not, or for different units ({format_by_rank(where)}). They reduce gradients "
                f"together, in one precision, or none does."
            )
        late = [GradSource.NO_SYNC] if reaches else []
        if self.diverged:
            late.append(GradSource.BACKWARD)
        self.late = [u for u in self.units if highest[u] in late and u not in unreduced]
        for unit in self.late:
            unit.waits.add(DIVERGED)

    def _which(self, unreduced: Collection[FeaturedUnit]) -> int:
        """How many units these are, and, in the lower 32 bits, a checksum of which ones."""
        left_out = bytes(unit in unreduced for unit in self.units)
        return sum(left_out) << 32 | crc32(left_out)

    @property
    def compares_backwards(self) -> bool:
        """Whether :meth:`agree` asks the other ranks. On a GPU the host would have to wait for the
        answer, so there it asks in the first steps, and later only if ranks have ever diverged."""
        return self._device.type == "cpu" or self.checking or self._ever_diverged

    @property
    def _device(self) -> torch.device:
        # A unit without parameters may be on another device, because there is nothing to move.
        units: Sequence[FeaturedUnit] = self.units
        return next((unit.device for unit in units if unit.numel), units[0].device)

    def _mode(self) -> int:
        """0: the mode does not matter; 1: train(); 2: eval(), in full precision."""
        unit = self._by_mode
        if unit is None:
            return 0
        kept = unit.unsharded.dtype is unit.padded_shard.dtype
        return 1 + (kept and unit.mixed in (None, unit.layout))

    def _gather(
        self, group: AgreementGroup, kind: Kind, about: str, mine: list[int]
    ) -> dict[int, list[int]]:
        tag = group.units[0].tag
        return gather_numbers(group.process_groups, mine, self._device, tag, about, kind)


def _source(unit: FeaturedUnit) -> GradSource:
    """Where this rank's gradient of a unit comes from, in the backward that has just begun."""
    for node in unit.unsharded_by_dtype.grad_accumulators:
        if torch._C._will_engine_execute_node(node):  # as torch's own multi-grad hooks ask
            return GradSource.BACKWARD
    return GradSource.NO_SYNC if unit.unreduced_grad is not None else GradSource.NONE
