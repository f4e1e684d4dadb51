"""What of the tests would run where on a machine with GPUs. No test is run, and it takes no GPU.

    python -m tests.where 8                 # with eight GPUs: how many tests on them, how many not
    python -m tests.where 8 --files         # the same for each file
    python -m tests.where 1 -m "not slow"   # of what `make test` runs; other options are pytest's

gpus.py decides it.
"""

import argparse
import sys
from collections import Counter, defaultdict
from inspect import isfunction, ismodule
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests import ranks
from tests.gpus import Place, why_on_cpu


class Started(Exception):  # noqa: N818
    """Raised where the ranks of a world would start."""

    def __init__(self, world_size: int, place: Place) -> None:
        super().__init__(world_size, place)
        self.world_size, self.place = world_size, place


class DryRun:
    """A plugin of pytest: each test comes no further than to where its ranks would start.

    Attributes:
        found: by file, how many of its tests run where.
    """

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        where = NO_RANKS
        if starts_ranks(pyfuncitem.function):
            names = pyfuncitem._fixtureinfo.argnames
            try:
                pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
            except Started as started:
                where = _where(started, why_on_cpu(pyfuncitem.nodeid))
        self.found[pyfuncitem.nodeid.partition("::")[0]][where] += 1
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self.found[report.nodeid.partition("::")[0]][f"not: {reason}"] += 1


NO_RANKS = "without ranks"


def _where(started: Started, why: str | None) -> str:
    many = f"{started.world_size} rank{'s' * (started.world_size > 1)} on {started.place.value}"
    if started.place is not Place.CPU:
        return many
    too_few = torch.cuda.device_count() < started.world_size
    return f"{many}: {why or ('there are too few GPUs' if too_few else 'the test says so')}"


def starts_ranks(function: Any, depth: int = 3) -> bool:
    """Whether a function names :func:`tests.ranks.run`, or a function of tests that does."""
    if function in (ranks.run, ranks.World) or hasattr(function, "body"):
        return True
    if not isfunction(function) or not depth or not function.__module__.startswith("tests."):
        return False
    places = [function.__globals__, *map(vars, filter(ismodule, _named(function)))]
    return any(starts_ranks(named, depth - 1) for named in _named(function, *places))


def _named(function: Any, *places: dict[str, Any]) -> list[Any]:
    """What a function's names mean in these modules; in its own, where none is given."""
    places = places or (function.__globals__,)
    return [place.get(name) for place in places for name in function.__code__.co_names]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gpus", type=int, help="how many there are to be")
    parser.add_argument("--files", action="store_true", help="for each file as well")
    options, rest = parser.parse_known_args(argv)
    dry = DryRun()
    with (
        patch("torch.cuda.device_count", lambda: options.gpus),
        patch("torch.cuda.is_available", lambda: options.gpus > 0),
        patch.object(ranks.World, "__init__", _start),
    ):
        status = pytest.main(["-q", "--no-header", "--no-summary", *rest], plugins=[dry])
    in_all: Counter[str] = sum(dry.found.values(), Counter())
    print(f"\nwith {options.gpus} GPUs: {in_all.total():,} tests")
    for where, count in sorted(in_all.items()):
        print(f"  {count:6,} {where}")
    for file in sorted(dry.found) if options.files else ():
        print(file)
        for where, count in sorted(dry.found[file].items()):
            print(f"  {count:6,} {where}")
    return status


def _start(self: ranks.World, world_size: int, place: Place = Place.CPU) -> None:
    raise Started(world_size, place)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
