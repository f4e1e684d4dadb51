"""Whether minifsdp is as fast and as lean as it is to be, on this machine: `make bench-check`.

Each bound is a ratio of two contenders of one run, or an amount that no noise changes. It is not a
part of `make test`: a busy machine falls short of some of them, and takes a quarter of an hour.
"""

import sys
from dataclasses import dataclass

from tests.bench import net
from tests.bench.host import ONE_FILE, host_times, over_local
from tests.bench.models import WORKLOADS
from tests.bench.report import MIB, Found, median, ratio
from tests.bench.steps import measured


@dataclass(frozen=True)
class Bound:
    """A step of ``name`` takes at most ``most`` times that of ``other``. ``alone`` is who sends the
    same messages after computing, and does nothing else: where that takes longer than the bound,
    only what hides behind computing could meet it."""

    name: str
    other: str
    most: float
    alone: str = "messages"


RUNS: dict[tuple[str, int, float], list[Bound]] = {
    ("comm", 2, 0): [
        Bound("mini prefetch", "local", 2.2),
        Bound("mini prefetch", "FSDP1", 0.45),
        Bound("mini grad_op", "local", 1.9, alone="messages grad_op"),
        Bound("mini rows", "mini prefetch", 1.15),
        Bound("mini rows", "FSDP2", 0.60),
    ],
    ("comp", 2, 0): [Bound("mini prefetch", "local", 1.2)],
    ("comp", 2, 1000): [
        Bound("mini prefetch", "local", 1.45),
        Bound("mini grad_op", "local", 1.30, alone="messages grad_op"),
    ],
    ("comm", 4, 0): [Bound("mini prefetch", "FSDP1", 0.5)],
}
"""By model, ranks, and Mbit/s of a link (0: no limit)."""
SENT = 2.6
"""Times (ranks - 1) / ranks of the parameters, if the last block keeps its own: a reduction, and
two gathers of what is not kept. It is 2.66 here: the root, a quarter of this model, and one block
of eight are kept."""
TENSORS = 0.75
"""Of FSDP1's peak."""
HOST_MICROSECONDS, HOST = 60.0, 0.15
"""For each unit and step, and to FSDP1's."""


def judged(what: str, found: float, most: float, reason: str = "") -> bool:
    """Print it, and say whether it is within its bound.

    Args:
        reason: printed where it is not.
    """
    fits = found <= most
    verdict = "ok" if fits else f"TOO MUCH{reason and f' ({reason})'}"
    print(f"  {what:48} {found:8.2f}  at most {most:.2f}  {verdict}")
    return fits


def amounts(found: Found, ranks: int, workload: str) -> list[bool]:
    """What no noise changes: bytes and memory."""
    whole = WORKLOADS[workload].nbytes * (ranks - 1) / ranks
    sent = median(found, "mini rows keep last", 2)
    reason = "a reduction, and two gathers of all but the root and one block"
    verdicts = [judged("MiB that a rank sends", sent / MIB, SENT * whole / MIB, reason)]
    if "tensors" in found["FSDP1"]:
        mine, ends, theirs = (
            found[name]["tensors"] / MIB for name in ("mini", "mini ends", "FSDP1")
        )
        reason = f"embeddings and the head as units of their own: {ends:.1f}"
        verdicts.append(judged("MiB of tensors at the peak", mine, TENSORS * theirs, reason))
    return verdicts


def main(rounds: int = 15) -> int:
    verdicts = []
    for (workload, ranks, mbit), bounds in RUNS.items():
        print(f"{workload}, {ranks} ranks, {f'{mbit:g} Mbit/s' if mbit else 'no limit'}")
        why = net.missing() if mbit else ""
        if why:
            print(f"  skipped: no such link can be made here: {why}")
            continue
        names = dict.fromkeys(n for bound in bounds for n in (bound.other, bound.name, bound.alone))
        counts = workload == "comm" and ranks == 2
        if counts:
            names |= dict.fromkeys(["mini", "mini ends", "mini rows keep last"])
        found = measured(workload, list(names), ranks, rounds, mbit, counts=counts)
        for bound in bounds:
            middle, alone = (
                ratio(found, name, bound.other)[0] for name in (bound.name, bound.alone)
            )
            reason = f"computing and then the messages, and nothing else: {alone:.2f}"
            verdicts.append(judged(f"{bound.name} / {bound.other}", middle, bound.most, reason))
        if counts:
            verdicts += amounts(found, ranks, workload)
    times = host_times(rounds)
    mine, theirs, least = (over_local(times, name) for name in ("mini", "FSDP1", ONE_FILE))
    print("deep")
    reason = "the least that shards at all, tutorials/fsdp_in_one_file.py: {:.{}f}"
    verdicts += [
        judged(
            "microseconds for each unit and step", mine, HOST_MICROSECONDS, reason.format(least, 0)
        ),
        judged("mini / FSDP1", mine / theirs, HOST, reason.format(least / theirs, 2)),
    ]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
