"""Published training runs, and what the virtual GPU says of them: `make predictions`.

Each run of tests/predictions.toml is one call of ``minifsdp sim``. Its tokens per second
and GPU (or TFLOPS, or memory, whatever was published) stand beside the prediction, in tables in
minifsdp/sim/README.md. Nothing is tuned to a run: constants (sim/hardware/) were chosen by one half
of the models of each family of runs, and the errors that count are those of the other half.
"""

import re
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from minifsdp.sim.cli.run import simulate
from minifsdp.sim.cli.terminal import end_tidily, progress
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.likely import doublings, likely
from minifsdp.sim.tape import Note, Phase
from tests.all_cores import on_all_cores
from tests.claims import parser, table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[no-redef, import-not-found]

ROOT = Path(__file__).parents[1]
SIM_README = ROOT / "minifsdp" / "sim" / "README.md"
PUBLISHED = tomllib.loads((ROOT / "tests" / "predictions.toml").read_text())
GiB = 1024**3


@dataclass(frozen=True)
class Run:
    """One that was published, as in the file."""

    source: str
    used: str  # "fit" or "held out"
    options: str  # of `minifsdp sim`
    quote: str
    micro_batches: int = 1
    tokens: float | None = None  # per second and GPU
    samples: float | None = None  # per second, of all GPUs
    tflops: float | None = None  # per GPU, recomputed ones included
    reserved: float | None = None  # GiB
    allocated: float | None = None

    def option(self, name: str, default: str = "") -> str:
        """As it is written there."""
        return (re.findall(rf"--{name} (\S+)", self.options) or [default])[0]

    @property
    def gpu(self) -> str:
        return self.option("gpu")

    @property
    def model(self) -> str:
        return self.option("model")

    @property
    def family(self) -> str:
        return FAMILIES[self.source]

    @property
    def compiled(self) -> bool:
        return self.option("compile") == "yes"

    @property
    def gpus(self) -> int:
        return int(self.option("nodes", "1")) * int(self.option("gpus", "8"))

    @property
    def published(self) -> float:
        """Tokens per second and GPU, or TFLOPS."""
        if self.samples:
            return self.samples * int(self.option("seq")) / self.gpus
        return self.tokens or self.tflops  # type: ignore[return-value]


@dataclass(frozen=True)
class Prediction:
    """Of a run; nothing but ``why`` where it is said not to fit."""

    tokens: float = 0.0
    tflops: float = 0.0
    reserved: float = 0.0
    allocated: float = 0.0
    factor: float = 1.0  # of the range that is printed, either way
    why: str = ""


ALL = "all"
"""That are not compiled."""
FAMILIES = {source["name"]: source["family"] for source in PUBLISHED["source"]}
RUNS = [Run(**run) for run in PUBLISHED["run"]]


def predict(run: Run) -> Prediction:
    """What the virtual GPU says."""
    options = parser().parse_args(run.options.split())
    try:
        gpu = simulate(options, steps=2)
    except torch.OutOfMemoryError as error:
        return Prediction(why=str(error))
    figures = gpu.report()
    far = sum(
        doublings(gpu.cluster, options.seq, options.precision, options.compile == "yes").values()
    )
    whole = accumulated(figures["step"], optimizer_seconds(gpu), run.micro_batches)
    return Prediction(
        tokens=run.micro_batches * options.batch * options.seq / whole,
        tflops=figures["flops"] / figures["step"] / 1e12,
        reserved=figures["peak reserved"] / GiB,
        allocated=figures["peak allocated"] / GiB,
        factor=likely(1.0, gpu.cluster.gpu, far)[1],
    )


def optimizer_seconds(gpu: VirtualGpu) -> float:
    """Of the last step."""
    (begin,) = [e.time for e in gpu.tape if isinstance(e, Phase) and e.name == "optimizer"][-1:]
    (end,) = [e.time for e in gpu.tape if isinstance(e, Note)][-1:]
    return end - begin


def accumulated(step: float, optimizer: float, micro_batches: int) -> float:
    """Seconds of a step with so many batches. One was simulated: 21 would take 21 times as long to
    say the same. Each has a forward and a backward, all together an optimizer."""
    return micro_batches * (step - optimizer) + optimizer


def ratio(run: Run, found: Prediction) -> float | None:
    """Predicted to published speed; None if it is said not to fit."""
    if found.why:
        return None
    return (found.tflops if run.tflops else found.tokens) / run.published


def memory_ratio(run: Run, found: Prediction) -> float | None:
    """Predicted to published peak memory; None where nothing was published."""
    if found.why or not (run.reserved or run.allocated):
        return None
    if run.reserved:
        return found.reserved / run.reserved
    return found.allocated / run.allocated  # type: ignore[operator]


def error(ratio: float) -> float:
    """By how much the larger one is larger."""
    return max(ratio, 1 / ratio) - 1


def summary(found: list[tuple[Run, Prediction]]) -> str:
    """Errors by family, for each half of the runs, as a table."""
    lines = []
    for used in ("fit", "held out"):
        for family in (*dict.fromkeys(FAMILIES.values()), ALL):
            mine = [
                (r, p)
                for r, p in found
                if r.used == used and (r.family == family or (family, r.compiled) == (ALL, False))
            ]
            ratios = [x for r, p in mine if (x := ratio(r, p)) is not None]
            if not ratios:
                continue
            errors = sorted(map(error, ratios))
            lines.append(
                (
                    used,
                    family,
                    f"{len(ratios)} of {len(mine)}",
                    f"{statistics.median(ratios):.2f}",
                    f"{statistics.median(errors):.0%}",
                    f"{quantile(errors, 3 / 4):.0%}",
                    f"{errors[-1]:.0%}",
                    f"{sum(e <= 0.15 for e in errors)} of {len(mine)}",
                    f"{sum(in_range(r, p) for r, p in mine)} of {len(mine)}",
                )
            )
    head = ("runs", "family", "said to fit", "median ratio", "median error", "3 of 4 within")
    return table((*head, "worst", "within 15 %", "within the printed range"), lines)


def in_range(run: Run, found: Prediction) -> bool:
    """Whether the published speed is in the range that is printed with the prediction."""
    times = ratio(run, found)
    return times is not None and max(times, 1 / times) <= found.factor


def pairs(found: Iterable[tuple[Run, Prediction]]) -> str:
    """Full and hybrid sharding, where both were published for the same run: how many times as fast
    the second is, there and here."""
    full: dict[str, tuple[Run, Prediction]] = {}
    hybrid: dict[str, tuple[Run, Prediction]] = {}
    for run, prediction in found:
        which = hybrid if HYBRID in run.options else full
        which[run.source + run.options.replace(HYBRID, "")] = run, prediction
    lines = []
    for key in full.keys() & hybrid.keys():
        (of_full, there), (of_hybrid, here) = full[key], hybrid[key]
        published = of_hybrid.published / of_full.published
        predicted = here.tokens / there.tokens
        lines.append((of_full.gpus, of_full, f"{published:.2f}", f"{predicted:.2f}"))
    head = ("source", "run", "hybrid to full, published", "predicted")
    ordered = sorted(lines, key=lambda line: (line[1].source, line[0], line[1].options))
    return table(
        head, ((f"{r.source}, {r.used}", f"`{r.options}`", *both) for _, r, *both in ordered)
    )


HYBRID = " --strategy hybrid_shard"


def quantile(ordered: list[float], share: float) -> float:
    """The smallest of these figures that such a share of them does not exceed."""
    return ordered[ceil(len(ordered) * share) - 1]


def rows(found: Iterable[tuple[Run, Prediction]]) -> str:
    """A line for each run."""
    lines = []
    for run, prediction in found:
        published = f"{run.published:,.0f} {'TFLOPS' if run.tflops else 'tokens/s'}"
        speed = prediction.tflops if run.tflops else prediction.tokens
        times = ratio(run, prediction)
        memory = memory_ratio(run, prediction)
        lines.append(
            (
                f"{run.source}, {run.used}",
                f"`{run.options}`" + f", {run.micro_batches} times" * (run.micro_batches > 1),
                published,
                "does not fit" if times is None else f"{speed:,.0f}",
                "" if times is None else f"{times:.2f}",
                "" if memory is None else f"{_memory(run, prediction)}, {memory:.2f} x",
            )
        )
    head = ("source", "run", "published, per GPU", "predicted", "ratio")
    return table((*head, "peak memory: published, predicted"), lines)


def _memory(run: Run, found: Prediction) -> str:
    if run.reserved:
        return f"{run.reserved:.1f}, {found.reserved:.1f} GiB reserved"
    return f"{run.allocated:.1f}, {found.allocated:.1f} GiB allocated"


def sources() -> str:
    """Where the runs are from, and what they do not say."""
    return "\n".join(
        f"- [{source['name']}]({source['link']}). Assumed: {source['assumed']}."
        for source in PUBLISHED["source"]
    )


def with_tables(text: str, **tables: str) -> str:
    """A README in which ``make predictions`` writes, with these tables."""
    for name, new in tables.items():
        between = rf"(<!-- make predictions writes: {name} -->\n)(.*?)(<!-- end -->)"
        (found,) = re.findall(between, text, re.DOTALL)
        text = text.replace("".join(found), f"{found[0]}{new}\n{found[2]}")
    return text


def predicted(runs: list[Run]) -> list[tuple[Run, Prediction]]:
    """All of them, on all cores."""
    found = []
    predictions = on_all_cores(predict, runs)
    for number, (run, prediction) in enumerate(zip(runs, predictions, strict=True), 1):
        progress(f"{number} of {len(runs)} runs")
        found.append((run, prediction))
    progress("")
    return found


if __name__ == "__main__":
    end_tidily()
    every = predicted(RUNS)
    tables = {
        "summary": summary(every),
        "pairs": pairs(every),
        "rows": rows(every),
        "sources": sources(),
    }
    SIM_README.write_text(with_tables(SIM_README.read_text(), **tables))
    print(tables["summary"])
