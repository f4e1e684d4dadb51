"""The matrix: every combination that users make, against DDP.

    make matrix                              # the table
    python -m tests.matrix transformer odd   # some models
    python -m tests.matrix --pretended-gpu   # as on GPUs, without having any: pretended_gpu.py

In CELLS, models x strategies x offload x precision x 1 to 4 ranks x chunks and rows, and with two
ranks and chunks x ways to initialize; what is not crossed is drawn by lot, so that each meets all
of the others. In SCHEDULES, two ranks and plain parameters, in both layouts, with every prefetch
and every limit. The core alone is in both, with what it has.
"""

import argparse
import itertools
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from torch import nn

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    ForwardPrefetch,
    ShardingStrategy,
    SynchronizeAfterFree,
    core,
)
from minifsdp.core.auto_wrap import has_forward, wrap_inside
from minifsdp.sim.cli.terminal import end_tidily, progress
from tests.core.common import full_parameters
from tests.models import CASES
from tests.parity import (
    BF16,
    BF16_SUMMED_IN_FP32,
    FULL,
    INITS,
    alone,
    build,
    check_equal,
    check_parity,
    check_refused,
    sharded,
)
from tests.ranks import RankFailure, run

STRATEGIES = {s.name.lower().strip("_"): s for s in ShardingStrategy}
OFFLOAD = {"": None, "+offload": CPUOffload(offload_params=True)}
PRECISION = {"fp32": FULL, "bf16": BF16, "bf16 summed in fp32": BF16_SUMMED_IN_FP32}
BACKWARD = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
FORWARD = {"pre": ForwardPrefetch.FORWARD_PRE, "post": ForwardPrefetch.FORWARD_POST, "none": False}
LIMITS = {"2": True, "1": 1, "none": False, "sync": SynchronizeAfterFree()}
WORLDS = (1, 2, 3, 4)
LAYOUTS = {"chunks": False, "rows": True}  # use_orig_params
CORE = "core"  # in chunks too, by the core alone
CORE_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


class Cell(NamedTuple):
    """One training run to compare; all fields are keys of the tables above."""

    model: str
    init: str
    strategy: str
    offload: str
    precision: str
    world_size: int
    backward: str
    forward: str
    limit: str
    layout: str


def _cells() -> Iterator[Cell]:
    lot = random.Random(0)  # what takes turns would meet only half of what takes turns beside it
    schedules = list(itertools.product(BACKWARD, FORWARD, LIMITS))
    for layout, model, strategy, offload, precision in itertools.product(
        LAYOUTS, CASES, STRATEGIES, OFFLOAD, PRECISION
    ):
        for world_size in WORLDS:
            crossed = world_size == 2 and layout == "chunks"
            for init in INITS if crossed else [lot.choice(INITS)]:
                settings = model, init, strategy, offload, precision, world_size
                yield Cell(*settings, *lot.choice(schedules), layout)
    for model, strategy, world_size in itertools.product(CASES, CORE_STRATEGIES, WORLDS):
        schedule = lot.choice(schedules)
        yield Cell(model, "before", strategy, "", "fp32", world_size, *schedule, CORE)


def _schedules() -> Iterator[Cell]:
    for layout, model, strategy, *rest in itertools.product(
        LAYOUTS, CASES, STRATEGIES, BACKWARD, FORWARD, LIMITS
    ):
        yield Cell(model, "before", strategy, "", "fp32", 2, *rest, layout)
    for model, *rest in itertools.product(CASES, CORE_STRATEGIES, BACKWARD, FORWARD, LIMITS):
        strategy, *schedule = rest
        yield Cell(model, "before", strategy, "", "fp32", 2, *schedule, CORE)


WITHOUT_ROWS = ("odd",)  # has a 0-d parameter

CELLS = list(_cells())
SCHEDULES = [*dict.fromkeys((*CELLS, *_schedules()))][len(CELLS) :]  # each cell once


def check(cell: Cell) -> float | None:
    """On each rank: the difference from DDP; None where it has to be refused, and is."""
    if cell.layout == CORE:
        return check_core(cell)
    settings: dict[str, Any] = dict(
        sharding_strategy=STRATEGIES[cell.strategy],
        cpu_offload=OFFLOAD[cell.offload],
        mixed_precision=PRECISION[cell.precision],
        backward_prefetch=BACKWARD[cell.backward],
        forward_prefetch=FORWARD[cell.forward],
        limit_all_gathers=LIMITS[cell.limit],
        use_orig_params=LAYOUTS[cell.layout],
    )
    if cell.layout == "rows" and cell.model in WITHOUT_ROWS:
        with pytest.raises(ValueError, match="has no dimension, so it has no rows"):
            sharded(CASES[cell.model], **settings)
        return None
    if cell.offload and cell.init == "after":
        check_refused(cell.model, **settings)
        return None
    return check_parity(cell.model, init=cell.init, **settings)


def check_core(cell: Cell) -> float:
    """On each rank: the difference of the core alone from DDP."""
    case, strategy = CASES[cell.model], STRATEGIES[cell.strategy]

    def policy(module: nn.Module) -> bool:
        return isinstance(module, case.units) and has_forward(module)

    def build_core(module: nn.Module) -> core.FullyShardedDataParallel:
        experts = [inner for inner in module.modules() if isinstance(inner, case.experts)]
        if experts:
            own = {"process_group": alone(), "sharding_strategy": strategy}
            wrap_inside(module, dict.fromkeys(experts, own), core.FullyShardedDataParallel)
        return core.FullyShardedDataParallel(
            module,
            sharding_strategy=strategy,
            auto_wrap_policy=policy,
            backward_prefetch=BACKWARD[cell.backward],
            forward_prefetch=FORWARD[cell.forward],
            limit_all_gathers=LIMITS[cell.limit],
        )

    return check_equal(cell.model, build_core(build(case)), full_parameters)


def check_all(cells: list[Cell]) -> list[float | None]:
    """On each rank: some cells of one world size, one after the other."""
    results = []
    for cell in cells:
        try:
            results.append(check(cell))
        except BaseException as error:
            error.add_note(f"in {cell}")
            raise
    return results


def main(args: argparse.Namespace) -> None:
    """Run the cells of some models, or all; print a row for each model and way to initialize."""
    end_tidily()
    cells = [cell for cell in CELLS + SCHEDULES if cell.model in (args.models or CASES)]
    found: dict[Cell, float | None] = {}
    failed = 0
    for world_size in WORLDS:
        mine = [cell for cell in cells if cell.world_size == world_size]
        for start in range(0, len(mine), 50):
            some = mine[start : start + 50]
            progress(f"{world_size} ranks: {start} of {len(mine)} cells")
            try:
                ranks = run(check_all, world_size, some, pretended_gpu=args.pretended_gpu)
            except RankFailure as failure:
                failed += 1
                progress("")
                print(f"{failure}\n\n", file=sys.stderr, flush=True)
                continue
            for cell, *results in zip(some, *ranks, strict=True):
                found[cell] = None if None in results else max(results)
    progress("")
    groups: defaultdict[tuple[str, ...], dict[Cell, float | None]] = defaultdict(dict)
    for cell, result in found.items():
        groups[cell.model, cell.init, cell.strategy, cell.offload, cell.layout][cell] = result
    print(f"{len(found)} cells, {failed} failures of up to 50 cells. In each: with 1 and 2 ranks,")
    print("and with 3 and 4, the largest difference from DDP; = equal in every bit; ! refused")
    print()
    for layout, offload in (*itertools.product(LAYOUTS, OFFLOAD), (CORE, "")):
        where = f"{layout}, {offload.strip('+') or 'on the device'}"
        print(f"{where:26}" + "".join(f"{s:>20}" for s in STRATEGIES))
        for model, init in dict.fromkeys(key[:2] for key in groups):
            row = [groups.get((model, init, s, offload, layout), {}) for s in STRATEGIES]
            print(f"{model:14} {init:11}" + "".join(f"{worst(cells):>20}" for cells in row))
        print()
    sys.exit(failed > 0)


def worst(cells: dict[Cell, float | None]) -> str:
    """How far some cells are from DDP."""
    texts = []
    for worlds in ((1, 2), (3, 4)):
        gaps = [gap for cell, gap in cells.items() if cell.world_size in worlds]
        if None in gaps:
            texts.append("!")
        elif gaps:
            texts.append(f"{max(gaps):.0e}" if max(gaps) else "=")
    return "  ".join(texts)


if __name__ == "__main__":
    # nn.TransformerEncoder's, about a path that is not taken. Ranks are processes of their own.
    os.environ["PYTHONWARNINGS"] = "ignore:enable_nested_tensor:UserWarning"
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)}; all if none is named")
    parser.add_argument("--pretended-gpu", action="store_true", help="as on GPUs, without any")
    main(parser.parse_args())
