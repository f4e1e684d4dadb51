"""A sheet to draw on: SVG that is read at the width of a README, on light and on dark ground.

The sheet brings its own ground, so that it can be read wherever it is shown: a page may be dark
while the reader's system is light, and only the system is known to an SVG.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path

WIDTH = 860  # pixels; a code host shows that many beside its margins
UNITS = ("#1f6feb", "#bf3989", "#0a7f8f", "#8250df", "#7a6a10")
"""Colours of units, in turn; white letters can be read on all of them."""


BRIGHT = ("amber", "lightblue", "lightpurple")
"""Colours on which letters are dark, in both themes."""
SHEER = ("gray", "lightgray", "lightgreen")
"""Those that the ground is seen through: letters are those of the ground."""


class Drawing:
    """Boxes, words and paths. ``kind`` is a class of the style below, a colour for most things.

    Args:
        label: what is drawn, for those who cannot see it.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._parts: list[str] = []
        self.bottom = 0.0  # as far down as there is something

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words that stand on ``y``. They begin at ``x``; those of kind "lane" end there, and
        "middle", "tick" and "unit" have it in their middle."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')
        self.reach(y + 3)

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, words: str = "",
        tip: str = "",
    ) -> None:  # fmt: skip
        """A box, with words inside if there is room for them, and a tip under the mouse."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
            f'class="{kind}">{title}</rect>'
        )
        if words and width > room(words):
            self.text(round(x + width / 2, 1), y + height / 2 + 4.5, words, letters(kind))
        self.reach(y + height)

    def path(self, steps: str, kind: str) -> None:
        """A path in SVG's own words."""
        self._parts.append(f'<path d="{steps}" class="{kind}"/>')

    def legend(self, left: float, names: Mapping[str, str]) -> None:
        """What each kind means, below all that is there, in as many rows as it takes."""
        x, top = left, self.bottom + 8
        for kind, words in names.items():
            width = 28 + 6.7 * len(words) if words else 14
            if x > left and x + width > WIDTH:
                x, top = left, top + 18
            self.box(round(x, 1), top, 11, 11, kind)
            self.text(round(x + 16, 1), top + 10, words, "legend")
            x += width

    def reach(self, y: float) -> None:
        """Make the sheet at least this long; a path does not do it by itself."""
        self.bottom = max(self.bottom, y)

    def __str__(self) -> str:
        height = self.bottom + 10
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
                f'width="{WIDTH}" height="{height:g}" role="img" '
                f'aria-label="{escape(self.label, quote=True)}">',
                _STYLE,
                f'<path d="M0 0H{WIDTH}V{height:g}H0Z" class="ground"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def write(self, path: str | Path) -> None:
        """As a file."""
        Path(path).write_text(str(self))


def of_unit(number: int) -> str:
    """The kind of box that a unit's work is; -1 is nobody's."""
    return f"unit{number % len(UNITS)}" if number >= 0 else "nobody"


def letters(kind: str) -> str:
    """The kind of words that can be read on a box: white, dark, or as on the ground behind it."""
    return "unit" + {**dict.fromkeys(BRIGHT, " dark"), **dict.fromkeys(SHEER, " inked")}.get(
        kind, ""
    )


def room(words: str) -> float:
    """That words take in a box, in pixels."""
    return 7.5 * len(words) + 3


_COLOURS = "\n".join(
    f".unit{i} {{ fill: {c}; }} .launch{i} {{ stroke: {c}; stroke-width: 1.5; fill: none; }} "
    f".thread{i} {{ stroke: {c}; stroke-width: .8; stroke-opacity: .7; fill: none; }}"
    for i, c in enumerate(UNITS)
)
_STYLE = (
    f"<style>\n{_COLOURS}"
    + """
text { font: 12px system-ui, sans-serif; fill: #424a53; }
.ground { fill: #fff; }
.title { font-size: 14px; font-weight: 600; } .strong { font-weight: 600; }
.lane { text-anchor: end; } .tick, .unit, .middle { text-anchor: middle; }
.unit { fill: #fff; } .dark { fill: #1f2328; } .inked { fill: #24292f; }
.line { stroke: #8c959f; stroke-opacity: .4; fill: none; }
.grid { stroke: #8c959f; stroke-opacity: .25; fill: none; }
.border { stroke: #57606a; stroke-dasharray: 3 3; fill: none; }
.peak { fill: #424a53; }
.blue { fill: #1f6feb; } .lightblue { fill: #80ccff; }
.purple { fill: #8250df; } .lightpurple { fill: #c297ff; }
.orange { fill: #bc4c00; } .amber { fill: #d4a72c; } .red { fill: #cf222e; }
.teal { fill: #1b7c83; } .nobody { fill: #6e7781; } .optimizer { fill: #424a53; }
.several { fill: #57606a; } .threads { stroke: #8c959f; fill: none; }
.green { fill: #1a7f37; } .lightgreen { fill: #2da44e; fill-opacity: .45; }
.gray { fill: #8c959f; fill-opacity: .55; } .lightgray { fill: #8c959f; fill-opacity: .35; }
@media (prefers-color-scheme: dark) { text { fill: #d1d9e0; } .unit { fill: #fff; }
  .dark { fill: #1f2328; } .inked { fill: #d1d9e0; }
  .ground { fill: #0d1117; } .border { stroke: #adbac7; } .peak { fill: #d1d9e0; }
  .optimizer { fill: #6e7781; } .nobody { fill: #57606a; } .several { fill: #6e7781; } }
</style>"""
)
