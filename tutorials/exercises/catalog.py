"""The exercises, as exercises.toml has them, and the checks that belong to them."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tutorials import grow

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib  # type: ignore[no-redef, import-not-found]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGE = ROOT / "minifsdp"
PROGRAM = "fsdp"
"""The module of track one: the student's fsdp.py, a program of its own."""


@dataclass(frozen=True, eq=False)
class Check:
    """What to look at in one exercise.

    Attributes:
        function: a generator of observations (observe.py). Imports minifsdp in its body only: where
            it is imported, the student's functions have to be in place already.
        ranks: processes that run it, each as one rank of a gloo group; 1: a single one, no group.
        seconds: it is stopped after this time, on a machine that has nothing else to do.
        because: (what, expected, found) -> the likely mistake, or None.
    """

    function: Callable[[], Iterator[Any]]
    ranks: int
    seconds: float
    because: Callable[[str, Any, Any], str | None]


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        key: file and number, such as "limiter.2".
        title: what is to be written, in a few words.
        module: the file, as a path below minifsdp/ without its ending; or PROGRAM.
        takes: the functions, classes and methods to write, in the order of the file. None: all
            of the track at once, or the whole program.
        hides: helpers of the reference that would give the solution away.
        points, minutes: what it is worth, and about how long it takes.
        page: the tutorial's name.
        hints: three, from a nudge to nearly the answer.
        program: with PROGRAM, the one that is the reference; a name of grow.py.
        needs: names that a program of the student's uses as soon as the exercise is begun.
        calls: of some functions what they need, for the student's file.
    """

    key: str
    title: str
    module: str
    takes: tuple[str, ...]
    points: int
    minutes: int
    page: str
    hints: tuple[str, ...]
    hides: tuple[str, ...] = ()
    program: str = ""
    needs: tuple[str, ...] = ()
    calls: dict[str, str] = field(default_factory=dict, compare=False)
    checks: list[Check] = field(default_factory=list, compare=False)

    @property
    def track(self) -> int:
        """One: the program that grows. Two: the concepts of minifsdp."""
        return 1 if self.program else 2

    @property
    def file(self) -> str:
        """The name of the file in the student's folder."""
        return self.module.rpartition("/")[2] + ".py" if self.module else ""

    @property
    def where(self) -> str:
        """What to write in which file."""
        return f"{', '.join(self.takes)} in {self.file}" if self.takes else self.file

    @property
    def takes_all(self) -> bool:
        """Whether it is graded with all that the student has written, and nothing else."""
        return not self.takes

    @property
    def reference(self) -> str:
        """The text of the file that has the solution."""
        if self.program:
            return grow.text(self.program)
        return (PACKAGE / f"{self.module}.py").read_text()

    @property
    def todo(self) -> str:
        """What an unwritten function says."""
        return f"{self.key}: see tutorials/{self.page}.md; make hint EX={self.key}"


@cache
def exercises() -> dict[str, Exercise]:
    """All exercises by key, in the order in which they are best done, with their checks."""
    data = tomllib.loads((HERE / "exercises.toml").read_text())
    found: dict[str, Exercise] = {}
    lists = ("takes", "hides", "hints", "needs")
    for entry in data["exercise"]:
        entry |= {name: tuple(entry[name]) for name in lists if name in entry}
        found[entry["key"]] = Exercise(**entry)
    for path in sorted((HERE / "checks").glob("[a-z]*.py")):
        importlib.import_module(f"tutorials.exercises.checks.{path.stem}")
    for key, made in _registered:
        if key not in found:
            raise ValueError(
                f"checks: {made.function.__name__} is for {key!r}, which is not in exercises.toml"
            )
        found[key].checks.append(made)
    return found


def exercises_alone(*tracks: int) -> list[Exercise]:
    """Those of some tracks, or of all, that are graded each by itself, over the reference."""
    every = [exercise for exercise in exercises().values() if not exercise.takes_all]
    return [exercise for exercise in every if exercise.track in (tracks or (1, 2))]


_registered: list[tuple[str, Check]] = []


def check(
    key: str,
    ranks: int = 1,
    seconds: float = 8,
    because: Callable[[str, Any, Any], str | None] = lambda what, expected, found: None,
) -> Callable[[Callable[[], Iterator[Any]]], Callable[[], Iterator[Any]]]:
    """Decorates a check of exercise ``key``; the arguments are those of :class:`Check`."""

    def register(function: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        _registered.append((key, Check(function, ranks, seconds, because)))
        return function

    return register


class Wrong(NamedTuple):
    """A wrong solution: the reference with a change. ``says`` is a part of the grader's message."""

    exercise: str
    mistake: str
    original: str
    replacement: str
    says: str


def wrong_solutions() -> list[Wrong]:
    """All that are in wrong/."""
    files = sorted((HERE / "wrong").glob("*.toml"))
    return [Wrong(**w) for file in files for w in tomllib.loads(file.read_text())["wrong"]]
