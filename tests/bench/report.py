"""The table, the ratios and the picture of what `make bench` has measured."""

import statistics
from pathlib import Path
from typing import Any

from tests.bench.models import WORKLOADS
from tutorials.draw import bars

MIB = 2**20
Found = dict[str, dict[str, Any]]


def ratio(found: Found, name: str, other: str) -> tuple[float, float, float]:
    """A step's time to another contender's in the same round: the median, and the quartiles."""
    pairs = zip(found[name]["readings"], found[other]["readings"], strict=True)
    ratios = [mine[0] / theirs[0] for mine, theirs in pairs]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def median(found: Found, name: str, of: int) -> float:
    """Of a part of a contender's readings (meters.Reading)."""
    return statistics.median(reading[of] for reading in found[name]["readings"])


def sending_seconds(found: Found, meanwhile: str) -> float:
    """What the messages of a step take of the cores: by how much longer computing takes while they
    travel.

    Args:
        meanwhile: the contender that does nothing but both (alone.py).
    """
    return max(statistics.median(found[meanwhile]["computing"]) - median(found, "local", 0), 0.0)


def ideal_seconds(workload: str, ranks: int, mbit: float, local: float) -> float:
    """What a step with whole parameters gathered twice and gradients reduced once takes at least,
    if all of it hides: the longer one of computing and of sending."""
    sent = 3 * WORKLOADS[workload].nbytes * (ranks - 1) / ranks
    return max(local, sent * 8 / (mbit * 1e6)) if mbit else local


def perfect_seconds(
    workload: str,
    ranks: int,
    mbit: float,
    local: float,
    gathers: int,
    sending: float = 0,
    ahead: int = 1,
    apart: bool = False,
    crossing: tuple[float, float] | None = None,
    late: float = 0,
) -> float:
    """A step in which nothing but the link and the cores takes time. Each block is a unit, and the
    rest is the root's. Messages travel in the order in which they are asked for.

    Args:
        gathers: of each block in a step. The root is gathered once.
        sending: seconds that the messages of a step take of the cores.
        ahead: units that are gathered before their turn; 1 where two may be unsharded at a time.
        apart: the embeddings and the head are units, too. They stay for the backward, as does the
            last block; while one that stays computes, two others may be unsharded.
        crossing: how much of a unit leaves a machine when it is gathered, and when it is reduced.
            None: each rank is on a machine of its own.
        late: seconds until what was sent arrives.
    """
    given = WORKLOADS[workload]
    crossing = crossing or ((ranks - 1) / ranks, (ranks - 1) / ranks)
    gather, reduce = (share * 8 / (mbit * 1e6) for share in crossing)  # seconds for each byte
    block, root = given.block_nbytes, given.nbytes - given.layers * given.block_nbytes
    first, last = (root / 2, root / 2) if apart else (root, 0.0)
    stay = given.layers if gathers == 1 else int(apart)  # blocks
    messages = ((2 * given.layers - stay) * block + root) * gather + given.nbytes * reduce
    # While the first messages and the last ones travel there is nothing to compute.
    computing = local + sending * (1 - (first + block) * (gather + reduce) / messages)
    forward, head = (share * computing / 3 for share in given.shares_of_computing)
    link = 0.0  # when it will have carried all that was asked for

    def carried(asked: float, seconds: float) -> float:
        nonlocal link
        link = max(link, asked) + seconds
        return link + late

    def run(arrived: list[float], computed: float, seconds: float, reduces: bool) -> float:
        """All blocks in turn, of which some have arrived. Returns when the last is computed."""
        for turn in range(given.layers):
            while len(arrived) < min(turn + 1 + ahead, given.layers):
                arrived.append(carried(computed, block * gather))
            computed = max(computed, arrived[turn]) + seconds
            if reduces:
                carried(computed, block * reduce)
        return computed

    computed = carried(0.0, first * gather)
    computed = run([carried(0.0, block * gather)], computed, forward, reduces=False)
    # The head has been asked for when the last block began.
    computed = max(computed, carried(computed - forward, last * gather) if apart else 0.0) + head
    arrived = [0.0] * stay
    if gathers == 2:
        arrived += [carried(computed, block * gather) for _ in range(1 + stay)]
    # A backward takes twice as long as its forward.
    computed += 2 * head
    carried(computed, last * reduce)
    computed = run(arrived, computed, 2 * forward, reduces=True)
    return carried(computed, first * reduce)  # the embeddings' gradient comes last


def table(found: Found, workload: str, ranks: int, mbit: float) -> str:
    """A row for each contender. Ratios with their quartiles; the rest are medians."""
    reference = next((name for name in ("local", "DDP") if name in found), next(iter(found)))
    head = ["", "ms", f"/ {reference}", "quartiles", "/ ideal", "CPU ms", "MiB sent", "faults"]
    rows = [[*head, "MiB tensors", "MiB RSS"]]
    ideal = ideal_seconds(workload, ranks, mbit, median(found, reference, 0))
    for name, each in found.items():
        middle, low, high = ratio(found, name, reference)
        seconds, cpu, sent, faults = (median(found, name, part) for part in range(4))
        peaks = [f"{each[k] / MIB:.1f}" if k in each else "" for k in ("tensors", "resident")]
        times = [f"{seconds * 1e3:.0f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        times += [f"{seconds / ideal:.2f}", f"{cpu * 1e3:.0f}"]
        rows.append([name, *times, f"{sent / MIB:.1f}", f"{faults:,.0f}", *peaks])
    return columns(rows)


def columns(rows: list[list[str]]) -> str:
    """Rows of words, one below the other; all but the first column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def picture(path: Path, found: Found, title: str) -> None:
    """A bar for each contender: its step's time to that of computing alone."""
    rows = {
        name: {"computing alone": 1.0, "more than that": max(ratio(found, name, "local")[0] - 1, 0)}
        for name in found
        if name != "local"
    }
    bars(path, title, rows, "{:.2f}".format)
