"""minifsdp over several links: `make bench ARGS="--net table"`.

A row for each link. Each has few contenders, of each library the one with the best settings, and
runs for about a minute; the slowest link has the smallest model. A step is held against computing
alone, against FSDP1 and FSDP2, and against a schedule that loses no time (report.py).

Two machines of two ranks have one link between them. Within a machine ranks read each other's
memory (minifsdp), or send through the system's network code (torch).
"""

from dataclasses import dataclass

from tests.bench.net import Link
from tests.bench.report import MIB, Found, columns, median, perfect_seconds, ratio, sending_seconds
from tests.bench.steps import measured

WORD = "table"  # which `--net` takes
THEIRS_AND_MINE = ("FSDP1 prefetch", "FSDP2 tuned", "mini prefetch")
SET = ("mini slow link", "mini far link")  # minifsdp, set for it (contenders.py)
SLOW, FAR = (("local", "meanwhile", name, *THEIRS_AND_MINE) for name in SET)
HYBRID = ("local", "FSDP1 hybrid", "FSDP2 hybrid", "mini hybrid")


@dataclass(frozen=True)
class Row:
    """One link, and who trains over it: the last of ``names`` is minifsdp, before it the others."""

    about: str
    workload: str
    link: Link
    ranks: int = 2
    names: tuple[str, ...] = SLOW

    @property
    def crossing(self) -> tuple[float, float]:
        """How much of a unit has to leave a machine when it is gathered, and when it is reduced. An
        all-reduce of replicas is as two of the latter."""
        machines = self.ranks // self.link.ranks
        share = (machines - 1) / machines
        return (0.0, 2 * share) if self.names is HYBRID else (share, share)

    def at_best(self, found: Found) -> list[float]:
        """A step to computing alone, where nothing but the link and the cores takes time: if cores
        need no time for messages, and with what they need here."""
        local = median(found, "local", 0)
        busy = [sending_seconds(found, "meanwhile")] if "meanwhile" in found else []
        return [
            perfect_seconds(
                self.workload, self.ranks, self.link.mbit, local, 2, cores,
                crossing=self.crossing, late=self.link.ms / 1e3,
            ) / local
            for cores in (0.0, *busy)
        ]  # fmt: skip


ROWS = (
    Row("100 Mbit/s", "tiny", Link(100)),
    Row("1 Gbit/s", "comp", Link(1_000)),
    Row("10 Gbit/s", "comp", Link(10_000)),
    Row("1 Gbit/s, 20 ms later", "comp", Link(1_000, ms=20), names=FAR),
    Row("the same, 64 MiB under way", "comp", Link(1_000, ms=20, buffers=64), names=FAR),
    Row("1 Gbit/s, two machines of two ranks", "comp", Link(1_000, ranks=2), 4),
    Row("the same, hybrid sharding", "comp", Link(1_000, ranks=2), 4, HYBRID),
)
TIMES = ["/ alone", "at best", "set for it", "/ FSDP1", "/ FSDP2"]
HEAD = ["", "model", *TIMES, "MiB sent", "FSDP1's", "FSDP2's"]


def main(rounds: int) -> dict[str, Found]:
    """Print the table, and return all that was measured."""
    print(f"a step of minifsdp, medians of {rounds} rounds; what the first machine sends in it")
    found, words = {}, [HEAD]
    for row in ROWS:
        print(f"... {row.about}", flush=True)
        found[row.about] = measured(
            row.workload, [*row.names], row.ranks, rounds, row.link, counts=False
        )
        words.append(in_words(row, found[row.about]))
    print(columns(words))
    return found


def in_words(row: Row, found: Found) -> list[str]:
    """A line of the table."""
    *theirs, mine = row.names[-3:]
    ratios = [f"{ratio(found, mine, other)[0]:.2f}" for other in ("local", *theirs)]
    best = " to ".join(f"{each:.2f}" for each in row.at_best(found))
    tuned = "".join(f"{ratio(found, name, 'local')[0]:.2f}" for name in SET if name in found)
    sent = [f"{median(found, name, 4) / MIB:.1f}" for name in (mine, *theirs)]
    return [row.about, row.workload, ratios[0], best, tuned, *ratios[1:], *sent]
