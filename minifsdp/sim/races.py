"""Races: waits that are missing, found from the tape.

On a GPU a missing wait gives wrong numbers on some days. Here it is found every time, because what
counts is not when things happened but what they *must* have waited for. There are four ways:

- Two operations on the same memory, one of which writes, have to be ordered by waits.
- Memory may be given out again only when all who used it are done: those that the stream of its
  pool has waited for, or that the allocator was told of by ``record_stream``.
- Given out, it is at once for the stream of its pool alone. What that stream did with it before may
  still run, and another stream that writes to it first has to have waited for that.
- Memory that was freed is used by nobody: not even by who still has a tensor that was in it.

If not, it is a race, however the times fell out. Each stream, and the host, has a clock that counts
its operations, and knows how far it has seen the others': an event carries what its stream has seen
to whoever waits for it. What is launched has seen all that the host has seen; the host sees nothing
but what it waits for.

Source: Lamport, "Time, Clocks, and the Ordering of Events", CACM 1978. torch's CUDA sanitizer
(``torch.cuda._sanitizer``) does the same on a GPU, for kernels, but not for memory that is reused.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from minifsdp.sim.tape import HOST, STREAMS, Buffer, Entry, Mark, Memory, Op, Use, Wait

Clocks = dict[str, int]
Numbered = tuple[Op, int]  # on its stream


class Race(NamedTuple):
    """Two operations on the same memory that nothing orders. ``second`` is None where the memory
    itself is given out again, ``first`` where it has been freed and not been given out again."""

    first: Op | None
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
        if self.first is None:
            return f"{_said(self.second)} uses {what} that has been freed"
        what = f"{_said(self.second)} uses {what} and does not wait for {_said(self.first)}"
        ours = self.buffer in (*self.first.reads, *self.first.writes)
        return what if ours else f"{what}, which may still use what was there before"


def _said(op: Op | None) -> str:
    assert op is not None
    return f"{op.name}{f' of {op.label}' if op.label else ''} on {op.stream}"


@dataclass
class _Accesses:
    """The last ones of one buffer."""

    writer: Numbered | None = None
    readers: dict[str, Numbered] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)  # other streams that the allocator knows of

    def unseen(self, seen: Clocks, readers: bool) -> list[Numbered]:
        last = [
            *([self.writer] if self.writer else []),
            *(self.readers.values() if readers else []),
        ]
        return [(op, number) for op, number in last if number > seen.get(op.stream, 0)]


@dataclass
class _Pool:
    """What was freed of a stream's memory: any of it may be given out next; which one is chance."""

    # Since the last allocation, with what the allocator itself waits for.
    freed: list[tuple[Buffer, _Accesses, Clocks]] = field(default_factory=list)
    # Since the beginning: the last operations of each stream with any of it.
    used: dict[str, Numbered] = field(default_factory=dict)


def find_races(tape: list[Entry]) -> list[Race]:
    """All races on a tape, in its order; of those that look alike the first."""
    names = (HOST, *STREAMS)
    seen: dict[str, Clocks] = {name: dict.fromkeys(names, 0) for name in names}
    pools = {name: _Pool() for name in names}
    marks: dict[Mark, Clocks] = {}
    accesses: dict[Buffer, _Accesses] = {}
    gone: set[Buffer] = set()
    races: dict[str, Race] = {}

    def found(first: Op | None, second: Op | None, buffer: Buffer) -> None:
        race = Race(first, second, buffer)
        races.setdefault(str(race), race)

    for entry in tape:
        if isinstance(entry, Op):
            mine = seen[entry.stream]
            _merge(mine, seen[HOST])
            mine[entry.stream] += 1
            for buffer in (*entry.reads, *entry.writes):
                if buffer in gone:
                    found(None, entry, buffer)
                known = accesses.setdefault(buffer, _Accesses())
                for other, _ in known.unseen(mine, readers=buffer in entry.writes):
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
            if entry.stream != entry.buffer.owner:
                accesses.setdefault(entry.buffer, _Accesses()).users.add(entry.stream)
        elif isinstance(entry, Memory) and entry.freed:
            known, waits = accesses.pop(entry.buffer, _Accesses()), Clocks()
            for stream in known.users:
                _merge(waits, seen[stream])
            pools[entry.buffer.owner].freed.append((entry.buffer, known, waits))
            gone.add(entry.buffer)
        elif isinstance(entry, Memory):
            pool, safe = pools[entry.buffer.owner], dict(seen[entry.buffer.owner])
            _merge(safe, seen[HOST])
            for buffer, known, waits in pool.freed:
                for op, number in known.unseen(waits, readers=True):
                    if number > safe[op.stream]:
                        found(op, None, buffer)
                    elif number > pool.used.get(op.stream, (op, 0))[1]:
                        pool.used[op.stream] = op, number
            pool.freed.clear()
            # As if they had read it: who writes to it first has to have seen them.
            accesses[entry.buffer] = _Accesses(readers=dict(pool.used))
    return list(races.values())


def _merge(clocks: Clocks, others: Clocks) -> None:
    for name, number in others.items():
        clocks[name] = max(clocks.get(name, 0), number)
