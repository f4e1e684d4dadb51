"""A step as one HTML file, to look around in: who was busy, and who held the memory, at any time.

The page is viewer.html with the data of a step put into it. It needs no server and loads nothing,
so it can be sent to somebody.
"""

import json
from bisect import bisect_left
from pathlib import Path
from typing import Any

from minifsdp.sim.figures.memory_report import KINDS, lives
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.figures.words import BYTES, in_words
from minifsdp.sim.tape import HOST, Entry, Memory, Phase, Wait
from minifsdp.sim.views.lanes import ORDER
from minifsdp.sim.views.spans import turns

SHARED = Path(__file__).parent / "shared"
"""What pages have in common: shared.css and shared.js."""


def html(tape: list[Entry], figures: dict[str, Any], title: str = "") -> str:
    """The last step of a tape, as a page.

    Args:
        figures: shown as they are printed, but for the unit of bytes.
    """
    text = json.dumps(data(tape, figures, title), separators=(",", ":"))
    return fill_in(Path(__file__).parent / "viewer.html", {"data": text})


def fill_in(template: Path, places: dict[str, str]) -> str:
    """A page from a template: data for ``/* data */`` and so on, and for ``/* shared.css */`` and
    ``/* shared.js */`` what all pages have in common.

    Raises:
        ValueError: the template has no such place, or several.
    """
    page = template.read_text()
    shared = {kind: (SHARED.with_suffix(kind)).read_text() for kind in (".css", ".js")}
    # In a script "</" could end it.
    its = {name: text.replace("</", "<\\/") for name, text in places.items()}
    for name, text in ({f"shared{kind}": text for kind, text in shared.items()} | its).items():
        before, *after = page.split(f"/* {name} */")
        if len(after) != 1:
            raise ValueError(f"{template.name} has {len(after)} places for {name!r}, not one")
        page = before + text + after[0]
    return page


def data(tape: list[Entry], figures: dict[str, Any], title: str = "") -> dict[str, Any]:
    """What the page knows. Times are in microseconds since the step began; names are places in
    ``names``, of which there are few."""
    entries, start, end = last_step(tape)
    names: dict[str, int] = {}
    first = tape.index(entries[0]) if entries else 0
    levels = [(first + i, e) for i, e in enumerate(entries) if isinstance(e, Memory)]
    places = [place for place, _ in levels]
    held = [(b, n, kind, (at.start, at.stop)) for b, n, kind, at, *_ in lives(tape)]

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def micro(time: float) -> float:
        return round((time - start) * 1e6, 3)

    found = {
        "title": title,
        "figures": in_words(figures) | _bytes(figures),
        "length": micro(end),
        "lanes": ORDER,
        "kinds": KINDS,
        "phases": [[e.name, micro(e.time)] for e in entries if isinstance(e, Phase)],
        # lane, operator, unit, launched, start, end, bytes read and written, bytes sent
        "ops": [
            [
                ORDER.index(op.stream), number(op.name), number(unit),
                *map(micro, (op.launched, op.start, op.end)),
                sum(buffer.nbytes for buffer in (*op.reads, *op.writes)), op.sent,
            ]
            for op, unit in turns(entries)
        ],
        # why, from, until, whether it is the limiter
        "waits": [
            [number(e.why), micro(e.launched), micro(e.until), e.by_limiter]
            for e in entries
            if isinstance(e, Wait) and e.waiter == HOST and e.until > e.launched
        ],
        # when the host changed something, and what there was then
        "levels": [[micro(e.time), e.allocated, e.active, e.reserved] for _, e in levels],
        # what it was allocated for, kind, bytes; the first level that has it, the first without
        "buffers": [
            [number(b.label), KINDS.index(kind), nbytes, *(bisect_left(places, p) for p in span)]
            for b, nbytes, kind, span in held
        ],
    }  # fmt: skip
    return {**found, "names": list(names)}


def _bytes(figures: dict[str, Any]) -> dict[str, float]:
    """Figures that are bytes, as numbers: the page has one unit for all of its sizes."""
    by_kind = {f"  {kind}": nbytes for kind, nbytes in figures.get("peak allocated is", {}).items()}
    return {name: figures[name] for name in BYTES if name in figures} | by_kind
