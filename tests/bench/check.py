"""Whether minifsdp is as fast and as lean as it is to be, on this machine: `make bench-check`.

Each bound is a ratio of two contenders of one run, or an amount that no noise changes. It is not a
part of `make test`: a busy machine falls short of some of them, and takes a quarter of an hour.
"""

import sys
from dataclasses import dataclass

from tests.bench import net
from tests.bench.host import BARE, ONE_FILE, host_times, over_local
from tests.bench.models import WORKLOADS
from tests.bench.report import MIB, Found, median, perfect_seconds, ratio, sending_seconds
from tests.bench.steps import measured


@dataclass(frozen=True)
class Bound:
    """A step of ``name`` takes at most ``most`` times that of ``other``. Each block is gathered
    ``gathers`` times in it. ``apart``: see :func:`~tests.bench.report.perfect_seconds`."""

    name: str
    other: str
    most: float
    gathers: int = 2
    apart: bool = False

    def alone(self, slow_link: bool) -> str:
        """Who sends the same messages and does nothing else: after computing or, where that can
        hide most of them, meanwhile."""
        who = "meanwhile" if slow_link else "messages"
        return who if self.gathers == 2 else f"{who} grad_op"


RUNS: dict[tuple[str, int, float], list[Bound]] = {
    ("comm", 2, 0): [
        Bound("mini prefetch", "local", 2.2),
        Bound("mini prefetch", "FSDP1", 0.45),
        Bound("mini grad_op", "local", 1.9, gathers=1),
        Bound("mini rows", "mini prefetch", 1.15),
        Bound("mini rows", "FSDP2", 0.60),
    ],
    ("comp", 2, 0): [Bound("mini prefetch", "local", 1.2)],
    ("comp", 2, 1000): [
        Bound("mini prefetch", "local", 1.45),
        Bound("mini grad_op", "local", 1.30, gathers=1),
        Bound("mini slow link", "local", 1.45, apart=True),
        Bound("mini slow link grad_op", "local", 1.30, gathers=1, apart=True),
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


def why_not(found: Found, bound: Bound, workload: str, ranks: int, mbit: float) -> str:
    """What the same messages take without an engine. A link that is the machine's own memory takes
    the cores' time, so that they hide nothing: they come after computing. A slow link sends while
    the cores compute, if the schedule is perfect, and takes some of their time, too: computing
    takes longer than it does where nothing is sent."""
    alone = bound.alone(mbit > 0)
    if not mbit:
        found_alone = ratio(found, alone, bound.other)[0]
        return f"computing and then the messages, and nothing else: {found_alone:.2f}"
    local, other = median(found, "local", 0), median(found, bound.other, 0)
    sending = sending_seconds(found, alone)
    two, more, free = (
        perfect_seconds(workload, ranks, mbit, local, bound.gathers, cores, ahead, bound.apart)
        / other
        for cores, ahead in ((sending, 1), (sending, 100), (0, 1))
    )
    return (
        f"with two units unsharded at a time, a schedule that loses no time takes {two:.2f}; "
        f"{more:.2f} with any number of units; {free:.2f} if computing did not take "
        f"{sending * 1e3:.0f} ms longer while messages travel"
    )


def amounts(found: Found, ranks: int, workload: str) -> list[bool]:
    """What no noise changes: bytes and memory."""
    given = WORKLOADS[workload]
    whole = given.nbytes * (ranks - 1) / ranks
    sent = median(found, "mini rows keep last", 2)
    reason = "a reduction, and two gathers of all but the root and one block"
    verdicts = [judged("MiB that a rank sends", sent / MIB, SENT * whole / MIB, reason)]
    if "tensors" in found["FSDP1"]:
        mine, lean, theirs = (
            found[name]["tensors"] / MIB for name in ("mini", "mini lean", "FSDP1")
        )
        # The root's gradient is complete last of all. What arrives for it is the last shard.
        root = given.nbytes - given.layers * given.block_nbytes
        least = (2 * given.nbytes / ranks + root) / MIB
        reason = (
            f"all shards, those of the gradients, and the root's gradient that is being reduced: "
            f"{least:.1f}; with embeddings and the head as units, and BACKWARD_POST: {lean:.1f}"
        )
        verdicts.append(judged("MiB of tensors at the peak", mine, TENSORS * theirs, reason))
    return verdicts


def host(rounds: int) -> list[bool]:
    """The engine itself, without the ranks and without communication."""
    print("deep")
    times = host_times(rounds)
    names = ("mini", "FSDP1", BARE, ONE_FILE)
    mine, theirs, bare, least = (over_local(times, name) for name in names)

    def reason(unit: float) -> str:
        return (
            f"without the promises in tests/bench/without.py, nothing but the five moments: "
            f"{bare / unit:.2f}; tutorials/fsdp_in_one_file.py, which knows one kind of model: "
            f"{least / unit:.2f}"
        )

    return [
        judged("microseconds of each unit", mine, HOST_MICROSECONDS, reason(1)),
        judged("mini / FSDP1", mine / theirs, HOST, reason(theirs)),
    ]


def main(rounds: int = 15) -> int:
    verdicts = []
    for (workload, ranks, mbit), bounds in RUNS.items():
        print(f"{workload}, {ranks} ranks, {f'{mbit:g} Mbit/s' if mbit else 'no limit'}")
        why = net.missing() if mbit else ""
        if why:
            print(f"  skipped: no such link can be made here: {why}")
            continue
        names = {"local", *(name for bound in bounds for name in (bound.name, bound.other))}
        names |= {bound.alone(mbit > 0) for bound in bounds}
        counts = workload == "comm" and ranks == 2
        if counts:
            names |= {"mini", "mini lean", "mini rows keep last"}
        link = net.Link(mbit) if mbit else None
        found = measured(workload, sorted(names), ranks, rounds, link, counts=counts)
        for bound in bounds:
            middle = ratio(found, bound.name, bound.other)[0]
            reason = why_not(found, bound, workload, ranks, mbit)
            verdicts.append(judged(f"{bound.name} / {bound.other}", middle, bound.most, reason))
        if counts:
            verdicts += amounts(found, ranks, workload)
    return 0 if all(verdicts + host(rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
