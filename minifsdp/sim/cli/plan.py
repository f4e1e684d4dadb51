"""Which settings: the fastest that fit, and why the others lose.

There are thousands of combinations, and each run takes a second. So this begins with the usual
settings, or if they do not fit with those that need the least memory, and changes one at a time:
for each setting in turn every value is tried and the fastest that fits is kept, until a whole round
has changed nothing. What cannot be run at all, as attention by a kernel that does not know 32 bits,
is left out. Then settings that make no difference are made the usual ones again. With those another
change may pay, so that it goes on from there, until that changes nothing, too. That finds settings
that no single change makes better; a pair of changes might.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from minifsdp.sim.cli.options import BACKWARD, FORWARD, PRECISION, STRATEGIES, UNITS, YES
from minifsdp.sim.cli.run import measure, no_run
from minifsdp.sim.cli.terminal import Progress
from minifsdp.sim.cli.values import ImpossibleError

LEAN = {
    "offload": "yes",
    "recompute": "full",
    "precision": "bf16",
    "strategy": "full_shard",
    "unit": "part",
    "limit": "1",
    "backward": "none",
    "forward": "none",
}
"""The least memory. What saves most, and costs most, comes first: it is given up first."""
VALUES: dict[str, tuple[str, ...]] = {
    "offload": YES,
    "recompute": ("none", "selective", "full"),
    "precision": PRECISION,
    "strategy": STRATEGIES,
    "unit": UNITS,
    "limit": ("none", "1", "true", "4"),
    "backward": BACKWARD,
    "forward": FORWARD,
}
SAME = 0.005
"""Step times that differ by less count as equal; then the one with less memory is better."""

Settings = dict[str, str]


class Search:
    """Looks for the best settings.

    Args:
        fixed: options that are given.
        usual: the others, with the values that they have where nobody says anything.
        progress: told which run is being made.
    """

    def __init__(self, fixed: argparse.Namespace, usual: Settings, progress: Progress) -> None:
        self._fixed, self._usual, self._progress = fixed, usual, progress
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}

    def figures(self, settings: Settings, **more: Any) -> dict[str, Any]:
        """Of one run, perhaps with ``more`` options; each is made once.

        Raises:
            ImpossibleError: there is no such run, and it is the first: the settings that are given
                are in the way.
        """
        key = (*settings.values(), *map(str, more.values()))
        if key not in self._known:
            options = argparse.Namespace(**{**vars(self._fixed), **settings, **more})
            self._progress(f"run {len(self._known) + 1}: {' '.join(key)}")
            try:
                self._known[key], _ = measure(options, steps=2)
            except ImpossibleError as error:
                if not self._known:
                    raise
                self._known[key] = no_run(error)
        return self._known[key]

    def best(self) -> Settings:
        """That no single change makes better."""
        best = dict(self._usual)
        if not self.figures(best)["fits"]:
            best = {name: LEAN[name] for name in self._usual}
        seen: list[Settings] = []
        while best not in seen:  # "better" forgives small differences, so it may go in a circle
            seen.append(best)
            best = self._as_usual(self._no_worse(best))
        return best

    def _no_worse(self, best: Settings) -> Settings:
        """Changed, one setting at a time, until nothing is better."""
        seen: list[Settings] = []
        while best not in seen:
            seen.append(best)
            for name in self._usual:
                for value in VALUES[name]:
                    other = {**best, name: value}
                    if better(self.figures(other), self.figures(best)):
                        best = other
        return best

    def _as_usual(self, best: Settings) -> Settings:
        """With the usual value where it makes no difference."""
        for name, value in self._usual.items():
            usual = {**best, name: value}
            fits = self.figures(usual)["fits"]  # else what needs the least memory is told
            if fits and not better(self.figures(best), self.figures(usual)):
                best = usual
        return best

    def largest_batch(self, settings: Settings) -> int:
        """Samples on each GPU that fit, at least the given number, which does."""
        fits = int(self._fixed.batch)
        too_many = 2 * fits
        while self.figures(settings, batch=too_many)["fits"]:
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.figures(settings, batch=middle)["fits"]:
                fits = middle
            else:
                too_many = middle
        return fits


def better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Fits and is faster; or is as fast and needs less."""
    if not (one["fits"] and other["fits"]):
        return bool(one["fits"] and not other["fits"])
    if abs(one["step"] / other["step"] - 1) < SAME:
        return bool(one["peak reserved"] < other["peak reserved"])
    return bool(one["step"] < other["step"])


def why(figures: dict[str, Any], best: dict[str, Any]) -> str:
    """What is wrong with a run, next to the best one."""
    if "impossible" in figures:
        return f"not possible: {figures['why']}"
    if not figures["fits"]:
        return "does not fit"
    slower = figures["step"] / best["step"]
    memory = (figures["peak reserved"] - best["peak reserved"]) / 2**20
    if abs(slower - 1) < SAME:
        return f"as fast, {memory:+,.0f} MiB" if round(memory) else "the same"
    more = {
        "computes": figures["compute"] - best["compute"],
        "waits for the network": figures["exposed communication"] - best["exposed communication"],
        "waits for the host": figures["idle"] - best["idle"],
    }
    reason = max(more, key=lambda what: more[what])
    return (
        f"{slower:.2f} x the time, {reason} {more[reason] * 1e3:,.1f} ms more; {memory:+,.0f} MiB"
    )


def plan(parser: argparse.ArgumentParser, arguments: Sequence[str], progress: Progress) -> int:
    """Search for the fastest settings that fit. Settings that are given are kept as they are."""
    usual = {name: parser.get_default(name) for name in VALUES}
    parser.set_defaults(**dict.fromkeys(VALUES))
    options = parser.parse_args(arguments)
    free = {name: value for name, value in usual.items() if getattr(options, name) is None}
    search = Search(options, free, progress)
    chosen = search.best()
    best = search.figures(chosen)
    progress("")
    if not best["fits"]:
        if options.json:
            print(json.dumps({"settings": chosen, **best}))
        else:
            tried = f"Nothing fits, not even {_words(chosen)}." if free else "It does not fit."
            print(f"{tried}\n{best['why']}")
        return 1
    if not options.json:
        print(f"{_words(chosen) or 'All settings are given.'}\n")
        print(
            f"step {best['step'] * 1e3:,.1f} ms, {best['peak reserved'] / 2**20:,.0f} MiB "
            f"reserved, bound by {best['binds']}"
        )
    batch = search.largest_batch(chosen)
    others = [
        {"setting": name, "value": value, **search.figures({**chosen, name: value})}
        for name in free
        for value in VALUES[name]
        if value != chosen[name]
    ]
    for other in others:
        other["instead"] = why(other, best)
    progress("")
    if options.json:
        print(json.dumps({"settings": chosen, **best, "largest batch": batch, "others": others}))
        return 0
    print(f"the largest batch that fits with these settings: {batch}\n")
    for other in others:
        name, value = other["setting"], other["value"]
        default = " (default)" if value == usual[name] else ""
        print(f"{f'--{name} {value}{default}':38} {other['instead']}")
    return 0


def _words(settings: Settings) -> str:
    return " ".join(f"--{name} {value}" for name, value in settings.items())
