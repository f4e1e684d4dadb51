"""What the engine itself takes, on one rank without the others, whose collectives do nothing.

`make bench ARGS="--model deep"`: for each unit and step. 100 nested units of one small layer on two
ranks. The time is that of the CPU, all threads, beyond a plain module's. And what minifsdp spends
it on, by a profile, which makes short functions look longer than they are.

`make bench ARGS="--model ranks"`: whether it takes longer where there are more ranks, for wrapping,
for the first step and for a later one. Collectives of torch's "fake" backend copy a chunk for each
rank, so they would take longer themselves; here they fill their results with one operation.
"""

import cProfile
import pstats
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import minifsdp
from minifsdp import core
from minifsdp.comm.pieces import Pieces, whole
from minifsdp.core.collectives import TorchCollectives
from tests.bench.without import PROMISES, without
from tutorials import fsdp_in_one_file

UNITS, WARM_UP = 100, 3
ONE_FILE, BARE = "one file", "mini bare"
RANKS = (8, 1024)


def _nested(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return wrap(nn.Sequential(*(wrap(nn.Linear(16, 16)) for _ in range(UNITS - 1))))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "local": lambda module: module,
    "FSDP1": lambda module: TorchFSDP(module, device_id=torch.device("cpu")),
    "FSDP2": lambda module: fully_shard(module),
    "mini": lambda module: minifsdp.FullyShardedDataParallel(module),
    "mini rows": lambda m: minifsdp.FullyShardedDataParallel(m, use_orig_params=True),
    "mini core": lambda module: core.FullyShardedDataParallel(module),
}


def _model(name: str) -> nn.Module:
    if name == ONE_FILE:
        return _one_file()
    with without(*PROMISES) if name == BARE else nullcontext():
        return _nested(WRAPS[name.removesuffix(" bare")])


def _one_file() -> nn.Module:
    """The same layers, sharded by tutorials/fsdp_in_one_file.py. They do what no
    FSDP can do without: views, memory that comes and goes, hooks. They check nothing, wait for each
    message, and know one kind of model."""
    model = _nested(lambda module: module)
    fsdp_in_one_file.fsdp(model, nn.Linear)
    return model


@contextmanager
def _one_of(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0, and there is no other one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _nothing_sent() -> Iterator[None]:
    """Inside, this process is one of two ranks, and messages take no time."""

    def half(flat: torch.Tensor | Pieces, *_: Any, **__: Any) -> tuple[torch.Tensor, Any]:
        flat = whole(flat)  # one copy, as of what is small in a message
        return flat[: flat.numel() // 2].clone(), lambda: None

    nothing = lambda *_, **__: lambda: None  # noqa: E731
    half_of_unit = lambda self, unit, flat, scale: half(flat)  # noqa: E731
    # gloo's messages are ours, so that the fake group's functions do not stand in for them.
    with (
        _one_of(2),
        patch("minifsdp.comm.unit_messages.all_gather", nothing),
        patch("minifsdp.comm.unit_messages.reduce_scatter", half),
        patch.object(TorchCollectives, "all_gather", nothing),
        patch.object(TorchCollectives, "reduce_scatter", half_of_unit),
        patch.object(fsdp_in_one_file, "torch_all_gather", nothing),
        patch.object(fsdp_in_one_file, "torch_reduce_scatter", nothing),
    ):
        yield


def host_times(rounds: int) -> dict[str, list[float]]:
    """Microseconds for each unit and step, by contender; they take turns."""
    with _nothing_sent():
        models = {name: _model(name) for name in (*WRAPS, BARE, ONE_FILE)}
        x, times = torch.randn(4, 16), {name: list[float]() for name in models}
        for turn in range(-WARM_UP, rounds):
            for name, model in models.items():
                start = time.process_time()
                model(x).sum().backward()
                seconds = time.process_time() - start
                if turn >= 0:
                    times[name].append(seconds / UNITS * 1e6)
    return times


def over_local(times: dict[str, list[float]], name: str) -> float:
    """The median of what it takes beyond a plain module."""
    pairs = zip(times[name], times["local"], strict=True)
    return statistics.median(time - local for time, local in pairs)


def calls_and_shares(name: str, steps: int = 10) -> tuple[float, dict[str, float]]:
    """How many functions a contender calls for each unit and step, and what share of the time is
    spent in those of each file or folder of minifsdp; "torch" is all that is not minifsdp's."""
    profile, shares = cProfile.Profile(time.process_time), defaultdict[str, float](float)
    with _nothing_sent():
        model, x = _model(name), torch.randn(4, 16)
        for step in range(-WARM_UP, steps):
            if step == 0:
                profile.enable()
            model(x).sum().backward()
        profile.disable()
    stats: Any = pstats.Stats(profile)
    package = Path(minifsdp.__file__).parent
    for (file, *_), (_, _, seconds, *_) in stats.stats.items():
        inside = Path(file).is_relative_to(package)
        shares[_part(Path(file).relative_to(package)) if inside else "torch"] += seconds
    whole_time = sum(shares.values())
    ordered = sorted(shares, key=lambda name: -shares[name])
    return stats.total_calls / steps / UNITS, {n: shares[n] / whole_time for n in ordered}


def _part(path: Path) -> str:
    """The file of the core, or the folder or file of minifsdp."""
    return path.name if path.parts[0] == "core" else path.parts[0]


def calls_without(steps: int = 10) -> dict[str, float]:
    """How many fewer functions minifsdp calls for each unit and step without each of its promises,
    and without all of them."""
    kept = calls_and_shares("mini", steps)[0]
    fewer = dict[str, float]()
    for name, promises in {**{p: (p,) for p in PROMISES}, "all of these": tuple(PROMISES)}.items():
        with without(*promises):
            fewer[name] = kept - calls_and_shares("mini", steps)[0]
    return fewer


class Layer(nn.Module):
    """Two parameters with a row for each of 1,024 ranks, so that no layout pads them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(max(RANKS), 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.up.T @ self.down


class Work(NamedTuple):
    """Of one contender, in what the meter counts."""

    wrapping: float
    first: float  # forward and backward
    later: float


Meter = Callable[[Callable[[], Any]], float]


def milliseconds(function: Callable[[], Any]) -> float:
    """Of the CPU."""
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e3


class Results(TorchDispatchMode):
    """Counts the tensors that operators return. One that cuts a tensor for 1,024 ranks is one call,
    and returns as many."""

    count = 0
    sees_engine = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.count += len(found) if isinstance(found, (list, tuple)) else 1
        return found


def results(function: Callable[[], Any]) -> int:
    """Of all operators."""
    with Results() as counter:
        function()
    return counter.count


def work(meter: Meter, ranks: int, units: int = UNITS, rounds: int = 3) -> dict[str, Work]:
    """By contender, on so many ranks: the least of some rounds, so that other programs matter less.
    What is made only once is not counted."""
    found = {}
    with _one_of(ranks), _silent_collectives():
        for name, wrap in list(WRAPS.items())[1:]:
            _work(meter, wrap, 1)
            every = [_work(meter, wrap, units) for _ in range(rounds)]
            found[name] = Work(*map(min, zip(*every, strict=True)))
    return found


def _work(meter: Meter, wrap: Callable[[nn.Module], nn.Module], units: int) -> Work:
    layers, wrapped = [Layer() for _ in range(units)], list[nn.Module]()

    def build() -> None:
        wrapped.append(wrap(nn.Sequential(*map(wrap, layers))))

    def step() -> None:
        wrapped[0](torch.ones(1, 4)).sum().backward()

    return Work(meter(build), meter(step), meter(step))


@contextmanager
def _silent_collectives() -> Iterator[None]:
    """Inside, a collective fills its result, by one operation whatever the number of ranks."""

    def fill(*args: Any, **named: Any) -> None:
        result, *_ = (*args, *named.values())
        if isinstance(result, list):  # FSDP1 on a CPU has one for each rank, which are views
            result = result[0]._base
        result.fill_(0.01)

    def fill_at_once(*args: Any, **named: Any) -> Any:
        fill(*args, **named)
        return SimpleNamespace(wait=int)  # a function that is not Python's, as a work's own

    names = ("all_gather_single", "all_gather_into_tensor", "all_gather")
    names += ("reduce_scatter_single", "reduce_scatter_tensor")
    with ExitStack() as stack:
        stack.enter_context(patch("minifsdp.comm.collectives.NATIVE", True))
        for name in ("torch_all_gather", "torch_reduce_scatter"):
            stack.enter_context(patch(f"minifsdp.core.collectives.{name}", fill_at_once))
        for name in names:
            if hasattr(dist, name):  # torch 2.13 has renamed some
                stack.enter_context(patch.object(dist, name, fill))
        yield


def ratios(few: dict[str, Work], many: dict[str, Work]) -> list[str]:
    """A line for each contender: what it takes on many ranks, and how many times that on few."""
    lines = []
    for name, at in many.items():
        pairs = zip(Work._fields, at, few[name], strict=True)
        parts = (f"{what} {a:7,.1f} ({a / b:.2f} x)" for what, a, b in pairs)
        lines.append(f"  {name:10}{'   '.join(parts)}")
    return lines
