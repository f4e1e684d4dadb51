"""What explorer.html has of a run, packed: figures, a step by units, and curves of memory.

::

    a run      | figures, 4 bytes each | pieces | times | curves |
    a piece    | its token |              lane, kind, unit, what it waits for: the same in many runs
    its times  | launched | start | end | until ... |     parts of the step, 2 bytes each
    a curve    | columns - 1, height | columns - 1, height | ...           2 bytes for each level

Not with zlib, because what that writes depends on its version, and a page that is made again has to
be the same, byte for byte.
"""

import base64
import itertools
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from minifsdp.sim.figures.memory_report import KINDS as MEMORY
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import HOST, STREAMS, Entry, Memory, Op, Phase
from minifsdp.sim.views.pieces import CAST, FREE, OTHER, Piece, pieces
from minifsdp.sim.views.spans import LIMITER, LOSS, OPTIMIZER, STALL

LANES = (HOST, *STREAMS)
KINDS = (
    *("upload", "all-gather", "forward", LOSS, "backward", "reduce", "all-reduce", "download"),
    *(CAST, OPTIMIZER, LIMITER, STALL, FREE, OTHER),
)
LEVELS = ("reserved", "active", "allocated")
FIGURES = (
    *("step", "compute", "communication", "exposed communication", "idle", "bytes sent"),
    *("host stalls in the limiter", "other host stalls", "peak unsharded units"),
    *("peak reserved", "peak active", "peak allocated", "cudaMallocs", "retries"),
    *("tokens/s per GPU", "MFU", "flops"),
)
"""Of those of `minifsdp sim --json`, what the page has."""
OF_ALL_REDUCES = "bytes sent by all-reduces"
NAMES = (*FIGURES, *MEMORY, OF_ALL_REDUCES, "fits")
"""Of all numbers of a run: the memory at the peak by kind, too."""
COLUMNS = 128
"""Of the curves of memory, over a step."""
FULL = 2**16 - 1
"""Times are packed as this many parts of a step."""
KNOWN = {
    "lanes": LANES, "kinds": KINDS, "levels": LEVELS, "names": NAMES, "memory": MEMORY,
    "columns": COLUMNS, "full": FULL,
}  # fmt: skip

Token = tuple[int, ...]
"""Of a piece: lane, kind and unit in 16 bits; and for each that it waits for how many pieces before
it that is, twice, plus 1 if a time follows."""


class Packed(NamedTuple):
    """A run. All of it can be compared and hashed."""

    numbers: bytes  # NAMES, as floats of 32 bits
    binds: str
    peak: str  # where the memory is highest, in words
    units: tuple[str, ...]
    phases: tuple[tuple[str, int], ...]
    tokens: tuple[Token, ...]
    times: bytes
    curves: bytes

    @property
    def figures(self) -> dict[str, float]:
        return dict(zip(NAMES, struct.unpack(f"<{len(NAMES)}f", self.numbers), strict=True))


def packed(figures: dict[str, Any], tape: list[Entry]) -> Packed:
    """A run, from what the virtual GPU says of it."""
    entries, start, end = last_step(tape)
    drawn = pieces(entries)
    units = list(dict.fromkeys(piece.unit for piece in drawn))

    def part(time: float) -> int:
        return round((time - start) / (end - start) * FULL)

    tokens, times = [], []
    for number, piece in enumerate(drawn):
        head = LANES.index(piece.lane) | KINDS.index(piece.kind) << 3
        waits, untils = [head | units.index(piece.unit) << 8], []
        for on, until in piece.waits:
            differs = part(until) != part(drawn[on].end)
            waits.append(2 * (number - on) + differs)
            untils += [part(until)] * differs
        tokens.append(tuple(waits))
        times += [*map(part, _times(piece)), *untils]
    all_reduces = sum(e.sent for e in entries if isinstance(e, Op) and e.stream == "replicate")
    numbers = [
        *(figures[name] for name in FIGURES),
        *(figures["peak allocated is"].get(kind, 0) for kind in MEMORY),
        *(all_reduces, figures["fits"]),
    ]
    return Packed(
        struct.pack(f"<{len(NAMES)}f", *numbers),
        figures["binds"],
        figures["peak is in"],
        tuple(units),
        tuple((e.name, part(e.time)) for e in entries if isinstance(e, Phase)),
        tuple(tokens),
        struct.pack(f"<{len(times)}H", *times),
        b"".join(map(_shorter, curves(entries, start, end))),
    )


def _times(piece: Piece) -> Iterator[float]:
    """Those that are not known from others: a free takes no time, and what the host does is not
    launched before it begins."""
    if piece.lane != HOST:
        yield piece.launched
    yield piece.start
    if piece.kind != FREE:
        yield piece.end


def curves(entries: list[Entry], start: float, end: float) -> list[bytearray]:
    """The highest level in each column of a step: for each of LEVELS a byte for each column, in
    parts of the largest reserved memory, rounded up."""
    memory = [entry for entry in entries if isinstance(entry, Memory)]
    most = max(entry.reserved for entry in memory)
    columns = [min(int((e.time - start) / (end - start) * COLUMNS), COLUMNS - 1) for e in memory]
    columns = [0, *columns[1:], COLUMNS - 1]  # what was there first was there before
    rows = [bytearray(COLUMNS) for _ in LEVELS]
    for place, entry in enumerate(memory):
        for row, level in zip(rows, LEVELS, strict=True):
            height = -(-getattr(entry, level) * 255 // most)
            these = slice(columns[place], columns[place + 1] + 1)
            row[these] = bytes(max(height, other) for other in row[these])
    return rows


def _shorter(curve: bytearray) -> bytes:
    """How many columns after the first are as high as it, and how high; and so on."""
    return b"".join(bytes([len([*its]) - 1, height]) for height, its in itertools.groupby(curve))


def together(runs: list[Packed]) -> dict[str, Any]:
    """All runs, as the page's data: what is the same in many of them is there once, and they have
    its number. `at` is where the numbers of each begin, in bytes."""
    known: dict[str, dict[Any, int]] = {"binds": {}, "peaks": {}, "units": {}, "tokens": {}}

    def number(of: str, what: Any) -> int:
        return known[of].setdefault(what, len(known[of]))

    rows, steps = [], b""
    for its in runs:
        rows.append(
            [
                len(steps), number("binds", its.binds), number("peaks", its.peak),
                number("units", its.units), dict(its.phases), len(its.tokens),
            ]
        )  # fmt: skip
        places = [number("tokens", token) for token in its.tokens]
        steps += its.numbers + struct.pack(f"<{len(places)}H", *places) + its.times + its.curves
    found = {name: list(values) for name, values in known.items()}
    return found | {"runs": rows, "steps": base64.b64encode(steps).decode()}
