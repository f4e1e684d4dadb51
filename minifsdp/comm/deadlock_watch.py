"""Waiting in vain: finding out that a message will never come, and saying why.

A rank that waits for another cannot see what that one does. It may be slow, and then waiting is
right. But it may have left: it caught an exception that the others did not have, its data ended a
batch earlier, it saves a checkpoint alone. Then both wait for each other until the timeout of their
group, minutes later.

So each process has a thread that looks, twice a second, whether the main thread has been waiting
for a few seconds. If so, it writes a *report* into the store of the process group (no collective,
so that nobody has to answer): what this rank waits for, and how many messages of each kind it has
started. Then it reads what the others have written::

    rank 0   waits for gather 7 of unit a      has started reduction 3 of b
    rank 1   waits for reduction 4 of b        has started gather 6 of a

Each waits for something that the other has not started, and cannot start while it waits. That is a
proof, whatever the speed of network and ranks; a slow rank that does not wait is never suspected.
Rank 0 learns the same from the same reports. Both close the connections of their groups, which is
the only way to make gloo's waits return, and raise what they have read.

Calls of torch's own collectives by the user, such as ``dist.barrier()``, are recognized in the main
thread's stack. What a rank does without waiting for others, be it for ever, is not.
"""

import atexit
import pickle
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.comm.message_tags import Message, started
from minifsdp.comm.wait_reports import Elsewhere, Report, elsewhere, main_frame, stuck, where

POLL = 0.5  # seconds
PATIENCE = 4  # polls that find the main thread in the same place, before it says so
_KEY = "minifsdp/watch"
waiting: Message | None = None
"""What this process waits for now. Set and cleared around each wait; that costs next to nothing."""

_groups: dict[str, list[dist.ProcessGroup]] = {}  # by name: those of the same model
_thread: threading.Thread | None = None
_exiting = threading.Event()


def watch(groups: list[dist.ProcessGroup]) -> None:
    """From now on, notice when the groups of a model wait in vain."""
    global _thread
    gloo = [group for group in groups if "gloo" in dist.get_backend_config(group)]
    for group in gloo:
        _groups[group.group_name] = gloo
    if _thread is None or not _thread.is_alive():  # it does not survive a fork
        _thread = threading.Thread(target=_run, name="minifsdp-watch", daemon=True)
        _thread.start()


def explain(message: Message, error: Exception) -> RuntimeError:
    """What to raise when a wait for ``message`` has ended with ``error``."""
    if message.verdict is None:
        with suppress(RuntimeError):  # the store may be gone, too
            # Perhaps the connection was closed by another rank, which was the first to find out.
            for group in _groups.get(message.group.group_name, [message.group]):
                if message.verdict is None and _store().check([f"{_KEY}/why/{group.group_name}"]):
                    message.verdict = _store().get(f"{_KEY}/why/{group.group_name}").decode()
    return RuntimeError(
        message.verdict
        or f"rank {dist.get_rank()} waited in {message}{where(sys._getframe())}, and lost the "
        f"other ranks: {error}. Look at their output: one of them has raised, ended, or is late. "
        f"All ranks need the same number of batches, and have to run the same units in the same "
        f"order."
    )


def _run() -> None:
    seen: Message | Elsewhere | None = None
    watcher: _Wait | None = None
    polls = 0
    while not _exiting.wait(POLL):
        if not dist.is_initialized():
            _close_all()
        try:
            now = waiting or elsewhere()
        except Exception:  # the main thread has gone on while its stack was read
            now = None
        if now is None or now != seen:
            seen, watcher, polls = now, None, 0
            continue
        polls += 1
        if polls < PATIENCE:
            continue
        try:
            if watcher is None:
                watcher = _Wait(now)
            if watcher.report is not None and polls % (1 + len(watcher.report.ranks) // 64) == 0:
                watcher.look()
        except Exception:
            watcher = None  # the process group is being destroyed; this thread must not speak of it


class _Wait:
    """One wait of this rank that has lasted for a while."""

    def __init__(self, now: Message | Elsewhere) -> None:
        self.now, self.rank, self.store = now, dist.get_rank(), _store()
        self.questions: dict[int, int] = {}  # rank -> which of its answers to believe
        self.found: set[int] = set()  # that wait in vain
        self.report: Report | None = None
        self.publish(0)

    def publish(self, asked: int) -> None:
        if isinstance(self.now, Message):
            ranks = tuple(dist.get_process_group_ranks(self.now.group))
            what, awaited = str(self.now), (self.now.key, self.now.count)
        else:
            what, ranks, awaited = f"torch.distributed.{self.now.name}()", self.now.ranks, None
        report = Report(what + where(main_frame()), ranks, awaited, dict(started), asked)
        if (waiting or elsewhere()) == self.now:  # else it has gone on while this was read
            self.report = report
            self.store.set(f"{_KEY}/{self.rank}", pickle.dumps(report))

    def look(self) -> None:
        """Read the others' reports; if they prove that this wait is in vain, end it."""
        assert self.report is not None
        if not isinstance(self.now, Message):
            asked = self._number(f"{_KEY}/asked/{self.rank}")
            if asked > self.report.asked:
                self.publish(asked)
            return
        reports, unread = {self.rank: self.report}, set(self.report.ranks)
        while unread:
            rank = unread.pop()
            if rank not in reports and (report := self._read(rank)) is not None:
                reports[rank] = report
                unread.update(set(report.ranks) - set(reports))
        found = stuck(reports)
        before, self.found = self.found, found
        # Seen twice, so that all who are part of it have had the time to say so.
        if self.rank in found and found == before and waiting is self.now:
            self.end(self.now, "; ".join(f"rank {r}: in {reports[r].what}" for r in sorted(found)))

    def _read(self, rank: int) -> Report | None:
        if not self.store.check([f"{_KEY}/{rank}"]):
            return None
        report: Report = pickle.loads(self.store.get(f"{_KEY}/{rank}"))
        if report.awaited is None:
            # What a report says of messages is true as long as it matters. But a barrier may be
            # over since, so ask: the answer comes after this rank has begun to wait.
            if rank not in self.questions:
                self.questions[rank] = self.store.add(f"{_KEY}/asked/{rank}", 1)
            if report.asked < self.questions[rank]:
                return None
        return report

    def _number(self, key: str) -> int:
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def end(self, message: Message, places: str) -> None:
        message.verdict = (
            f"the ranks have parted ways, and wait for each other in different places ({places}). "
            f"They would wait for ever. Every rank has to run the same units in the same order, "
            f"equally often, and in the same mode. Where one rank may catch an exception, raise it "
            f"on all of them, or skip the batch on all. Where one may have fewer batches, give all "
            f"the same number. What gathers parameters (state_dict, load_state_dict, "
            f"summon_full_params), or changes values or an optimizer's state (load_state_dict of "
            f"either), has to be called on every rank. The process group cannot be used any more."
        )
        groups = _groups.get(message.group.group_name, [message.group])
        for group in groups:
            self.store.set(f"{_KEY}/why/{group.group_name}", message.verdict)
        for group in groups:
            _close(group)


def _close_all() -> None:
    """The user has destroyed the process group. Nothing will be said any more, and who still waits
    for it should know."""
    for name in list(_groups):
        for group in _groups.pop(name):
            _close(group)


def _close(group: dist.ProcessGroup) -> None:
    # gloo has no way to cancel a receive; but if one times out, it closes all connections of its
    # group, and everything that waits for them is woken with an error.
    with suppress(RuntimeError):
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], other, 1 << 30).wait(timedelta(milliseconds=1))


@atexit.register
def _stop() -> None:
    """A thread that is in C++ when Python ends is torn out of it, which takes the process down."""
    _exiting.set()
    if _thread is not None:
        _thread.join(timeout=10)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
