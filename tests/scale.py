"""From 8 GPUs to 4,096 on the virtual GPU, by three schedules: `make scale`.

minifsdp's schedule, FSDP1's and FSDP2's train the same model on the same cluster. Weak scaling:
each GPU has as many sequences, however many GPUs there are. Strong scaling: all of them together
have as many. Writes the tables in the section "At scale" of minifsdp/sim/README.md, and the picture
there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from minifsdp.sim.cli.options import ENGINES
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.cli.terminal import end_tidily, progress
from minifsdp.sim.views.svg import WIDTH, Drawing
from tests.all_cores import on_all_cores
from tests.claims import README, MiB, parser, readme_with, table
from tests.predictions import accumulated, optimizer_seconds

PICTURE = README.parent / "scale.svg"
SEQ, WEAK, STRONG = 2048, 8, 4096
"""Tokens of a sequence; sequences of a GPU; sequences of all GPUs together."""
MODEL = f"--model gpt-7b --gpu h100 --network 3200 --attention flash --recompute full --seq {SEQ}"
GPUS = (8, 64, 512, 4096)
FULL, HYBRID = "full_shard", "hybrid_shard"
COLOURS = {"minifsdp": "blue", "FSDP1": "orange", "FSDP2": "teal"}
NAMES = dict(zip(ENGINES, COLOURS, strict=True))


class Point(NamedTuple):
    """What a row of a table is about."""

    strategy: str
    gpus: int
    batch: int  # sequences that a GPU computes at once
    times: int  # how often it does, in a step


class Figures(NamedTuple):
    """Of one engine there."""

    step: float  # seconds
    speed: float  # tokens of a GPU in a second, to minifsdp's on 8 GPUs
    reserved: float  # MiB, at the peak
    waits: float  # seconds of the host in the limiter, for one batch


def weak(strategy: str, gpus: int) -> Point:
    """Each GPU has WEAK sequences."""
    return Point(strategy, gpus, WEAK, 1)


def strong(strategy: str, gpus: int) -> Point:
    """All GPUs together have STRONG sequences; each computes at most WEAK of its own at once."""
    batch = min(WEAK, STRONG // gpus)
    return Point(strategy, gpus, batch, STRONG // gpus // batch)


Scaling = Callable[[str, int], Point]


def points(scaling: Scaling) -> list[Point]:
    """The rows. Within one node both strategies are the same, so hybrid begins with 64 GPUs."""
    return [scaling(FULL, n) for n in GPUS] + [scaling(HYBRID, n) for n in GPUS[1:]]


Place = tuple[str, str, int, int]
"""An engine, and of a point the strategy, the GPUs and the batch: what is simulated."""

Reports = dict[Place, dict[str, Any]]


def place(engine: str, point: Point) -> Place:
    return engine, point.strategy, point.gpus, point.batch


def report(place: Place) -> dict[str, Any]:
    """Of a step with one batch there; the optimizer's seconds, too."""
    engine, strategy, gpus, batch = place
    command = f"{MODEL} --engine {engine} --strategy {strategy} --nodes {gpus // 8} --batch {batch}"
    # From the second step on FSDP1's queue lets in a unit more, and nothing changes any further.
    gpu = simulate(parser().parse_args(command.split()), steps=2)
    return {**gpu.report(), "optimizer": optimizer_seconds(gpu)}


def all_places() -> list[Place]:
    """Of both tables, each once."""
    every = [*points(weak), *points(strong)]
    return list(dict.fromkeys(place(engine, point) for point in every for engine in ENGINES))


def all_reports() -> Reports:
    """By place; on all cores."""
    places, reports = all_places(), {}
    for here, found in zip(places, on_all_cores(report, places), strict=True):
        reports[here] = found
        progress(f"{len(reports)} of {len(places)} runs")
    progress("")
    return reports


def step_seconds(reports: Reports, engine: str, point: Point) -> float:
    """Of all batches, and the optimizer."""
    found = reports[place(engine, point)]
    return accumulated(found["step"], found["optimizer"], point.times)


def figures(reports: Reports, engine: str, scaling: Scaling, point: Point) -> Figures:
    found, first = reports[place(engine, point)], scaling(FULL, GPUS[0])
    sequences, of_first = (p.batch * p.times for p in (point, first))
    step = step_seconds(reports, engine, point)
    return Figures(
        step,
        sequences / step / (of_first / step_seconds(reports, "minifsdp", first)),
        found["peak reserved"] / MiB,
        found["host stalls in the limiter"],
    )


def rows(reports: Reports, scaling: Scaling) -> str:
    """A table: each engine's figures for each strategy and number of GPUs."""
    lines = []
    for point in points(scaling):
        found = [figures(reports, engine, scaling, point) for engine in ENGINES]
        lines.append(
            (
                f"`{point.strategy.upper()}`",
                f"{point.gpus:,}",
                f"{point.times} x {point.batch}" if scaling is strong else f"{point.batch}",
                *(f"{each.step * 1e3:,.0f}" for each in found),
                f"{found[0].speed:.0%}",
                *(f"{each.reserved:,.0f}" for each in found),
                *(f"{each.waits * 1e3:,.0f}" for each in found if scaling is weak),
            )
        )
    first, *others = NAMES.values()
    head = ("strategy", "GPUs", "sequences", f"a step, ms: {first}", *others)
    head += ("its tokens/s", f"reserved, MiB: {first}", *others)
    waits = (f"host waits, ms: {first}", *others) if scaling is weak else ()
    return table((*head, *waits), lines)


LEFT, GAP, BAR, HEIGHT = 40, 60, 14, 120
PANELS: dict[str, Callable[[Figures], float]] = {
    "tokens/s of a GPU, %": lambda found: 100 * found.speed,
    "reserved, GiB": lambda found: found.reserved / 1024,
}


def picture(reports: Reports) -> Drawing:
    """Bars: above the speed, below the memory; to the left weak scaling, to the right strong."""
    drawing = Drawing("Speed and memory of three schedules on 8 to 4,096 GPUs")
    width = (WIDTH - LEFT - GAP) / 2
    drawing.text(12, 20, drawing.label, "title")
    drawing.bottom -= 2
    drawing.legend(12, {colour: f"{name}'s schedule" for name, colour in COLOURS.items()})
    begin = drawing.bottom + 26
    for row, (title, value) in enumerate(PANELS.items()):
        for column, scaling in enumerate((weak, strong)):
            left, top = LEFT + column * (width + GAP), begin + row * (HEIGHT + 90)
            each = f"{WEAK} sequences a GPU" if scaling is weak else f"{STRONG:,} sequences in all"
            drawing.text(left, top, f"{title}: {each}", "title")
            values = {
                (point, engine): value(figures(reports, engine, scaling, point))
                for point in points(scaling)
                for engine in ENGINES
            }
            _panel(drawing, values, left, top + 24, width)
    return drawing


def _panel(
    drawing: Drawing,
    values: dict[tuple[Point, str], float],
    left: float,
    top: float,
    width: float,
) -> None:
    """Three bars for each point, by the values of the engines there."""
    places = list(dict.fromkeys(point for point, _ in values))
    pitch, floor = width / len(places), top + HEIGHT
    scale = HEIGHT / max(values.values())
    step = next(s for s in (10, 25) if s * 5 > max(values.values()))
    for at in range(0, int(max(values.values())) + 1, step):
        y = round(floor - at * scale, 1)
        drawing.text(left - 6, y + 4, str(at), "lane")
        drawing.path(f"M{left - 3:g} {y:g}h{width + 3:.1f}", "grid")
    for number, point in enumerate(places):
        x = left + number * pitch
        for bar, (engine, name) in enumerate(NAMES.items()):
            height = values[point, engine] * scale
            tip = f"{name}, {point.strategy}, {point.gpus} GPUs: {values[point, engine]:.1f}"
            y = round(floor - height, 1)
            drawing.box(x + bar * BAR, y, BAR - 1, round(height, 1), COLOURS[name], tip=tip)
        middle, first = round(x + 1.5 * BAR, 1), values[point, ENGINES[0]]
        drawing.text(middle, round(floor - first * scale - 6, 1), f"{first:.0f}", "tick")
        drawing.text(middle, floor + 16, f"{point.gpus:,}", "tick")
    drawing.path(f"M{left:g} {floor:g}h{width:.1f}", "line")
    drawing.text(left, floor + 33, "GPUs, full_shard", "strong")
    drawing.text(round(left + len(GPUS) * pitch, 1), floor + 33, "GPUs, hybrid_shard", "strong")


if __name__ == "__main__":
    end_tidily()
    found = all_reports()
    tables = {"weak_scaling": rows(found, weak), "strong_scaling": rows(found, strong)}
    README.write_text(readme_with("scale", **tables))
    picture(found).write(PICTURE)
