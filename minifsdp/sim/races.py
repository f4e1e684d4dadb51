"""Races: waits that are missing, found from the tape.

On a GPU a missing wait gives wrong numbers on some days. Here it is found every time, because what
counts is not when things happened but what they *must* have waited for. Two operations on the same
memory, one of which writes, have to be ordered by waits; and memory may be given out again only
when all who were known to use it are done. If not, it is a race, however the times fell out.

Each stream, and the host, has a clock that counts its operations, and knows how far it has seen the
others': an event carries what its stream has seen to whoever waits for it. What is launched has
seen all that the host has seen; the host sees nothing but what it waits for.

Source: Lamport, "Time, Clocks, and the Ordering of Events", CACM 1978. torch's CUDA sanitizer
(``torch.cuda._sanitizer``) does the same on a GPU, for kernels, but not for memory that is reused.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from minifsdp.sim.tape import HOST, STREAMS, Buffer, Entry, Mark, Memory, Op, Use, Wait

Clocks = dict[str, int]


class Race(NamedTuple):
    """Two operations on the same memory that nothing orders. ``second`` is None where the memory
    itself is given out again."""

    first: Op
    second: Op | None
    buffer: Buffer

    def __str__(self) -> str:
        # Either the engine's, or the operator's that made it.
        label = self.buffer.label or "somebody"
        what = (
            f"{'memory of' if ' ' in label else 'the result of'} {label} "
            f"({self.buffer.nbytes:,} bytes from the {self.buffer.owner} stream)"
        )
        if self.second is None:
            return f"{what} is given out again while {_said(self.first)} may still use it"
        return f"{_said(self.second)} uses {what} and does not wait for {_said(self.first)}"


def _said(op: Op) -> str:
    return f"{op.name}{f' of {op.label}' if op.label else ''} on {op.stream}"


@dataclass
class _Accesses:
    """The last ones of one buffer, each with its number on its stream."""

    writer: tuple[Op, int] | None = None
    readers: dict[str, tuple[Op, int]] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)  # streams that the allocator knows of

    def unseen(self, seen: Clocks, readers: bool) -> list[Op]:
        last = [
            *([self.writer] if self.writer else []),
            *(self.readers.values() if readers else []),
        ]
        return [op for op, number in last if number > seen[op.stream]]


def find_races(tape: list[Entry]) -> list[Race]:
    """All races on a tape, in its order; of those that look alike the first."""
    names = (HOST, *STREAMS)
    seen: dict[str, Clocks] = {name: dict.fromkeys(names, 0) for name in names}
    marks: dict[Mark, Clocks] = {}
    accesses: dict[Buffer, _Accesses] = {}
    freed: dict[str, list[tuple[Buffer, _Accesses, Clocks]]] = {name: [] for name in names}
    races: dict[str, Race] = {}

    def found(first: Op, second: Op | None, buffer: Buffer) -> None:
        race = Race(first, second, buffer)
        races.setdefault(str(race), race)

    for entry in tape:
        if isinstance(entry, Op):
            mine = seen[entry.stream]
            _merge(mine, seen[HOST])
            mine[entry.stream] += 1
            for buffer in (*entry.reads, *entry.writes):
                known = accesses.setdefault(buffer, _Accesses())
                for other in known.unseen(mine, readers=buffer in entry.writes):
                    found(other, entry, buffer)
            for buffer in entry.reads:
                accesses[buffer].readers[entry.stream] = entry, mine[entry.stream]
            for buffer in entry.writes:
                accesses[buffer].writer = entry, mine[entry.stream]
                accesses[buffer].readers.clear()
        elif isinstance(entry, Mark):
            marks[entry] = dict(seen[entry.stream])
        elif isinstance(entry, Wait):
            for clocks in [marks[entry.mark]] if entry.mark is not None else list(seen.values()):
                _merge(seen[entry.waiter], clocks)
        elif isinstance(entry, Use):
            accesses.setdefault(entry.buffer, _Accesses()).users.add(entry.stream)
        elif isinstance(entry, Memory):
            owner = entry.buffer.owner
            if entry.freed:
                known = accesses.pop(entry.buffer, _Accesses())
                safe = dict(seen[owner])
                for stream in known.users:  # the allocator waits for those
                    _merge(safe, seen[stream])
                freed[owner].append((entry.buffer, known, safe))
            else:
                # Any of them may be the one that is given out now; which one is chance.
                for buffer, known, safe in freed[owner]:
                    _merge(safe, seen[owner])
                    for other in known.unseen(safe, readers=True):
                        found(other, None, buffer)
                freed[owner].clear()
    return list(races.values())


def _merge(clocks: Clocks, others: Clocks) -> None:
    for name, number in others.items():
        clocks[name] = max(clocks[name], number)
