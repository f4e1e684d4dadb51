"""Deadlocks: the thread that finds out that a message will never come, and ends the wait.

A rank that waits for another rank cannot see what the other rank does. If that is slow, waiting is
right. But it may have left the common order: it has caught an exception that the others did not
have, its data has ended a batch earlier, or it saves a checkpoint alone. Then both wait for each
other until the timeout of their group, minutes later, and the error says nothing about the cause.

So each process has a thread that checks, twice a second, whether all threads that run a model are
waiting. (As a rule that is the main thread alone.) If they have been waiting at the same places for
a few seconds, the thread

1. writes a report (wait_reports.py) into the store of the process group: what this rank waits for
   and what it has started. The store needs no answer from other ranks, so this works in a deadlock;
2. reads the reports of the others, and finds out whether they prove a deadlock. A rank that is
   slow, but does not wait, has no report and is never suspected;
3. if so, closes the connections of the model's groups, which is the only way to make gloo's waits
   return. Each rank that waited then raises an error that says where all ranks are waiting.

This *verdict* ends the groups for good. Whoever waits in one of them later gets it, too, and closes
the other groups of its model. The reports of those who waited are still in the store, and they may
have gone on with a new group. So a wait that becomes long after a verdict does not believe them.

A rank that never waits, for example because it computes forever, is not noticed; nor is a thread
that waits in vain while another thread of its process trains another model.
"""

import atexit
import pickle
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minifsdp.comm import same_machine
from minifsdp.comm.message_tags import Message, exists
from minifsdp.comm.wait_reports import WaitReport, Waits, all_waits, called_from, deadlocked

POLL = 0.5  # seconds
PATIENCE = 4  # as many polls have to find the rank in the same wait before this reports it
STORE_ANSWERS = 10.0  # seconds within which a store that can be reached answers
# Keys in the store begin with this. <rank>: its report; asked/<rank>: how many new reports other
# ranks have asked it for; why/<group>: number and text of the verdict that has closed the group;
# verdicts: how many there have been.
_KEY = "minifsdp/watch"
waiting: dict[int, Message] = {}
"""What each thread waits for now, by its identifier, if it waits for a message of minifsdp's."""
unfinished: dict[Message, Sequence[Any]] = {}
"""What was started and has not been waited for. An exception may end a forward whose model is then
deleted. If a message arrives for a receive that was deleted, gloo stops reading from that
connection, and the next barrier of the program hangs. So receives are kept here."""

_groups: dict[str, list[dist.ProcessGroup]] = {}  # by name of a group: all groups of its model
_thread: threading.Thread | None = None
_exiting = threading.Event()


def watch(groups: list[dist.ProcessGroup]) -> None:
    """Notice deadlocks in the groups of a model from now on.

    Groups of NCCL are left to NCCL's own watchdog, because their waits cannot be ended from here.
    """
    global _thread
    _close_destroyed()  # groups of the same names perhaps, from before the program made new ones
    gloo = [group for group in groups if "gloo" in dist.get_backend_config(group)]
    for group in gloo:
        _groups[group.group_name] = gloo
    if _thread is None or not _thread.is_alive():  # it does not survive a fork
        _thread = threading.Thread(target=_run, name="minifsdp-watch", daemon=True)
        _thread.start()


def explain_wait(message: Message, error: Exception) -> RuntimeError:
    """What to raise when the wait for ``message`` has ended with ``error``, which says that another
    rank does not come.

    It says where all ranks are, if this rank or another one has found a deadlock; else it says what
    this rank was waiting for, and the error.
    """
    if message.verdict is None:
        reader = threading.Thread(target=_pass_on_verdict, args=[message], daemon=True)
        reader.start()
        # With a limit: else a rank whose machine is cut off would hang here.
        reader.join(STORE_ANSWERS)
    return RuntimeError(
        message.verdict
        or f"rank {dist.get_rank()} waited in {message}{called_from(sys._getframe())}, and lost "
        f"the other ranks: {error}. Look at their output: one of them has raised, ended, or is "
        f"late. All ranks need the same number of batches, and have to run the same units in the "
        f"same order."
    )


def _pass_on_verdict(message: Message) -> None:
    """Another rank may have found the deadlock first, and closed a group of this model."""
    with suppress(RuntimeError):  # the store may be gone, too
        for group in _groups_of(message):
            if (verdict := _verdict_on(group.group_name)) is not None:
                _end_wait(message, verdict)
                return


class _Verdict(NamedTuple):
    number: int  # of all verdicts, from 1
    text: str


def _verdict_on(group: str) -> _Verdict | None:
    """With which verdict the group of this name was closed; None if it was not."""
    key = f"{_KEY}/why/{group}"
    if not _store().check([key]):
        return None
    number, _, text = _store().get(key).decode().partition(" ")
    return _Verdict(int(number), text)


def _groups_of(message: Message) -> list[dist.ProcessGroup]:
    return _groups.get(message.group.group_name, [message.group])


def _end_wait(message: Message, verdict: _Verdict) -> None:
    """Have the thread that waits for a message raise, and close all groups of its model."""
    message.verdict = verdict.text
    # First for all groups: closing one group wakes ranks, which read the verdict at once.
    for group in _groups_of(message):
        if _verdict_on(group.group_name) is None:
            _store().set(f"{_KEY}/why/{group.group_name}", f"{verdict.number} {verdict.text}")
    for group in _groups_of(message):
        _close(group)


def _run() -> None:
    """What the thread does: find out whether this rank has been in one wait for long."""
    seen: Waits = {}
    long_wait: _LongWait | None = None
    polls = 0  # how many have found the rank in the wait that was seen last
    while not _exiting.wait(POLL):
        _close_destroyed()
        try:
            now = all_waits(waiting)
        except Exception:  # a thread has gone on while this read its stack
            now = {}
        if not now or now != seen:
            seen, long_wait, polls = now, None, 0
            continue
        polls += 1
        if polls < PATIENCE:
            continue
        try:
            if long_wait is None:
                long_wait = _LongWait(now)
            # With many ranks less often: each of them reads the reports of all the others.
            ranks = len(long_wait.report.ranks) if long_wait.report is not None else 0
            if ranks and polls % (1 + ranks // 64) == 0:
                long_wait.check()
        except Exception:
            long_wait = None  # the process group is being destroyed, which is no error here


class _LongWait:
    """One wait of this rank that has lasted for a few seconds, of one thread or of several."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.rank, self.store = waits, dist.get_rank(), _store()
        self.verdicts = self.store.add(f"{_KEY}/verdicts", 0)  # how many there were before it
        self.questions: dict[int, int] = {}  # rank -> the number of this rank's question to it
        self.found: set[int] = set()  # the deadlocked ranks, when this looked last
        self.report: WaitReport | None = None  # None: the wait is over
        self.publish(0)

    def publish(self, answered: int) -> None:
        """Write this rank's report, which answers the first ``answered`` questions."""
        report = WaitReport.on(self.waits, answered)
        # If the wait has ended meanwhile, the report may mix what was true before and after that,
        # and other ranks would find a deadlock where there is none.
        if all_waits(waiting) == self.waits:
            self.report = report
            self.store.set(f"{_KEY}/{self.rank}", pickle.dumps(report))

    def check(self) -> None:
        """Read the reports of the others, and end the wait if they prove a deadlock."""
        assert self.report is not None
        if self.report.in_torch:
            asked = self.store.add(f"{_KEY}/asked/{self.rank}", 0)
            if asked > self.report.answered:
                self.publish(asked)
        messages = [wait for wait in self.waits.values() if isinstance(wait, Message)]
        if not messages:  # torch's own, which this could not end
            return
        for message in messages:
            _pass_on_verdict(message)
        if any(message.verdict for message in messages):
            return
        # Also the reports of ranks that only others wait for: a deadlock may go through them.
        reports, unread = {self.rank: self.report}, self.report.ranks
        while unread:
            rank = unread.pop()
            if rank not in reports and (report := self._read(rank)) is not None:
                reports[rank] = report
                unread.update(report.ranks - set(reports))
        found = deadlocked(reports)
        if self.rank in found:
            lasting = {rank: reports[rank] for rank in found if self._lasts(reports[rank])}
            found = deadlocked(lasting)
        before, self.found = self.found, found
        # Only a deadlock that was found twice. By then all ranks that are part of it have written
        # their reports, so the error says where each of them is.
        if self.rank in found and found == before and all_waits(waiting) == self.waits:
            places = "; ".join(f"rank {rank}: in {reports[rank]}" for rank in sorted(found))
            verdict = _Verdict(self.store.add(f"{_KEY}/verdicts", 1), _parted(places))
            for message in messages:
                _end_wait(message, verdict)

    def _read(self, rank: int) -> WaitReport | None:
        if not self.store.check([f"{_KEY}/{rank}"]):
            return None
        report: WaitReport = pickle.loads(self.store.get(f"{_KEY}/{rank}"))
        if report.in_torch:
            # A report about a message stays true (see wait_reports.py). But one about a barrier may
            # be old: the barrier may be over, and this rank's message may be the next thing there.
            # So ask the rank for a new report: one that was written after this rank's wait began.
            if rank not in self.questions:
                self.questions[rank] = self.store.add(f"{_KEY}/asked/{rank}", 1)
            if report.answered < self.questions[rank]:
                return None
        return report

    def _lasts(self, report: WaitReport) -> bool:
        """Whether no verdict had ended the waits in a report when this rank's became long."""
        verdicts = (_verdict_on(awaited.group) for awaited in report.awaited)
        return all(one is None or one.number > self.verdicts for one in verdicts)


def _parted(places: str) -> str:
    """The verdict on a deadlock.

    Args:
        places: where each of its ranks is, in words.
    """
    return (
        f"the ranks have parted ways, and wait for each other in different places ({places}). "
        f"They would wait forever. Every rank has to run the same units in the same order, "
        f"equally often, and in the same mode. Where one rank may catch an exception, raise it "
        f"on all of them, or skip the batch on all. Where one may have fewer batches, give all "
        f"the same number. What gathers parameters (state_dict, load_state_dict, "
        f"summon_full_params), or changes values or an optimizer's state (load_state_dict of "
        f"either), has to be called on every rank. The process group cannot be used any more: "
        f"to go on, call destroy_process_group() on all ranks, init_process_group() with a "
        f"store that was not used before, and wrap a new model."
    )


def _close_destroyed() -> None:
    """Close the connections of process groups that the user has destroyed. Else ranks that wait for
    this one would wait until a timeout, instead of raising at once."""
    for name, groups in list(_groups.items()):
        for group in groups:
            if group.group_name == name and not exists(group):
                _groups.pop(name, None)
                _close(group)
    for message in list(unfinished):
        if not exists(message.group):
            unfinished.pop(message, None)


def _close(group: dist.ProcessGroup) -> None:
    same_machine.leave(group)
    # gloo cannot cancel a receive. But when one times out, gloo closes all connections of its
    # group, and all other waits of the group end with an error. So this one times out at once.
    with suppress(RuntimeError):
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1, device="cpu")], other, 1 << 30).wait(timedelta(milliseconds=1))


@atexit.register
def _stop() -> None:
    """End the thread before Python ends: a thread that is still in C++ would crash the process."""
    _exiting.set()
    if _thread is not None:
        _thread.join(timeout=10)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
