"""All cores for what `make claims predictions` simulate: hundreds of runs, each by itself."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import torch

from minifsdp.sim.cli.terminal import out_of_reach

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_all_cores(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What ``function`` returns of each item, in their order, each as soon as it and those before
    it are there. It has to be importable, and items and results are pickled.

    The caller has called ``end_tidily()``: Ctrl-C then ends the processes, too. Raises what
    ``function`` raises.
    """
    pool = ProcessPoolExecutor(initializer=_begin)  # without `with`, which waits after Ctrl-C
    with out_of_reach():
        results = pool.map(function, items)
    yield from results
    pool.shutdown()


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    gc.freeze()  # or Python looks for garbage in all that torch has imported, again and again
