"""Kinds of picture that pages share: bars to compare, strips of boxes to see how things lie, and a
line of dates. Another, the timeline of a step, is the virtual GPU's own (sim/views/timeline.py).
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path

from minifsdp.sim.views.svg import WIDTH, Drawing

COLOURS = ("blue", "purple", "green", "orange", "gray", "lightblue", "lightpurple")
MARGIN, ROW = 12, 24

Box = tuple[float, str, str]  # how wide; of what colour, "" for a gap; the words inside
Row = tuple[str, list[Box]]  # its name, and what is in it


def bars(
    path: Path,
    title: str,
    rows: dict[str, dict[str, float]],
    words: Callable[[float], str] = "{:g}".format,
) -> None:
    """A bar for each row, of parts that are told apart by colour. ``words`` says the sum."""
    drawing = Drawing(title)
    parts = dict.fromkeys(part for row in rows.values() for part in row)
    colours = dict(zip(parts, COLOURS, strict=False))
    sums = {name: sum(row.values()) for name, row in rows.items()}
    left = _left(rows)
    scale = (WIDTH - left - MARGIN - 7 * max(len(words(s)) for s in sums.values())) / (
        max(sums.values()) or 1
    )
    drawing.text(MARGIN, 20, title, "title")
    for name, row in rows.items():
        y = drawing.bottom + 6
        drawing.text(left - 8, y + 14, name, "lane")
        x = float(left)
        for part, value in row.items():
            drawing.box(x, y, value * scale, ROW - 6, colours[part], tip=f"{part}: {words(value)}")
            x += value * scale
        drawing.text(round(x + 6, 1), y + 13, words(sums[name]))
    if len(parts) > 1:
        drawing.legend(left, {colour: part for part, colour in colours.items()})
    drawing.write(path)


def strips(
    path: Path, title: str, rows: Sequence[Row], legend: dict[str, str] | None = None
) -> None:
    """A strip of boxes for each row, all on one scale. A row without boxes is a heading.

    Args:
        legend: what each colour means.
    """
    drawing = Drawing(title)
    left = _left([name for name, boxes in rows if boxes])
    widest = max(sum(width for width, *_ in boxes) for _, boxes in rows)
    scale = (WIDTH - left - MARGIN) / widest
    drawing.text(MARGIN, 20, title, "title")
    for name, boxes in rows:
        y = drawing.bottom + (6 if boxes else 14)
        drawing.text(left - (8 if boxes else 0), y + 13, name, "lane" if boxes else "")
        x = float(left)
        for width, colour, words in boxes:
            if colour:
                drawing.box(x, y, max(width * scale - 1, 1), ROW - 6, colour, words, tip=words)
            elif words:
                drawing.text(round(x + width * scale / 2, 1), y + 13, words, "middle")
            x += width * scale
    if legend:
        drawing.legend(left, legend)
    drawing.write(path)


def time_line(path: Path, title: str, events: Sequence[tuple[str, str, str, str]]) -> None:
    """Dates on an axis of years, which runs down, and beside it a row for each event.

    Args:
        events: in sequence: the day, as "2022-04-11"; a colour; a name; what happened.
    """
    drawing, row, dates = Drawing(title), 23.0, 66
    drawing.text(MARGIN, 20, title, "title")
    days = [date.fromisoformat(day).toordinal() for day, *_ in events]
    top, height = 48.0, row * (len(events) - 1)
    scale = height / (days[-1] - days[0])

    def at(day: int) -> float:
        return round(top + (day - days[0]) * scale, 1)

    drawing.path(f"M{dates} {top:g}V{top + height:g}", "border")
    for day in map(date.fromordinal, range(days[0], days[-1] + 1)):
        if day.day == 1 and day.month in (1, 7):
            drawing.text(dates - 8, at(day.toordinal()) + 4, f"{day:%b %Y}", "lane")
    for i, (number, (words, colour, name, what)) in enumerate(zip(days, events, strict=True)):
        y = round(top + i * row, 1)
        drawing.path(f"M{dates} {at(number):g}L{dates + 40} {y:g}", "line")
        drawing.box(dates - 3, at(number) - 3, 6, 6, colour, tip=f"{words} {name}")
        drawing.box(dates + 40, y - 6, 11, 11, colour)
        drawing.text(dates + 58, y + 4, words)
        drawing.text(dates + 136, y + 4, name, "strong")
        drawing.text(dates + 262, y + 4, what)
    drawing.write(path)


def _left(names: Iterable[str]) -> int:
    """Where the names of rows end. Capitals are wider."""
    widths = (len(name) * (8.6 if name.isupper() else 6.8) for name in names)
    return MARGIN + 8 + round(max(widths, default=0))
