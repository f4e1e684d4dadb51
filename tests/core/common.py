"""What the core's tests share: ranks, models, and full parameters to compare."""

import functools
import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.core import FullyShardedDataParallel, ModuleWrapPolicy


@dataclass(eq=False)
class StubUnit:
    """What a limiter and a prefetcher know of a unit."""

    label: str
    ancestors: list["StubUnit"] = field(default_factory=list)
    reshard_after_forward: bool = True
    numel: int = 1
    is_limited: bool = True


# ------------------------------------------------------------------------------------------ ranks


def on_ranks(count: int) -> Callable:
    """Decorates a test whose body runs in so many processes at once, in one process group."""

    def decorate(body: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(body)
        def test() -> None:
            # Forked from a server that has torch: to import it again would take seconds.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, "torch._dynamo"])
            with tempfile.TemporaryDirectory() as folder:
                it = (count, folder, body.__module__, body.__name__)
                ranks = [context.Process(target=_run, args=(rank, *it)) for rank in range(count)]
                for rank in ranks:
                    rank.start()
                for rank in ranks:
                    rank.join(timeout=600)  # of a rank that hangs; no limit for a slow machine
                    rank.kill()
                    rank.join()
                errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            assert not errors, "\n".join(errors)
            assert [rank.exitcode for rank in ranks] == [0] * count, "a rank hung, or was killed"

        test.body = body
        return test

    return decorate


def _run(rank: int, count: int, folder: str, module: str, name: str) -> None:
    try:
        torch.set_num_threads(1)
        store = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
        getattr(importlib.import_module(module), name).body()
    except BaseException:
        Path(folder, f"error of rank {rank}").write_text(traceback.format_exc())
    else:
        with suppress(RuntimeError):
            dist.destroy_process_group()


# ----------------------------------------------------------------------------------------- models


class Block(nn.Sequential):
    """Becomes a unit of its own."""


def mlp(blocks: int = 3) -> nn.Sequential:
    """A root with two layers of its own, and blocks, of sizes that two ranks do not divide."""
    torch.manual_seed(0)
    inner = [Block(nn.Linear(5, 5), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(3, 5), *inner, nn.Linear(5, 1))


def sharded(module: nn.Module, **settings) -> FullyShardedDataParallel:
    settings.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return FullyShardedDataParallel(module, **settings)


def batch(step: int = 0, width: int = 3) -> Tensor:
    """Another one for each rank and each step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.rand(4, width, generator=generator)


def full_parameters(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """The parameters as they are on all ranks together, by the names they had before wrapping."""
    return {name: tensor for name, (tensor, _) in _full(model).items()}


def full_gradients(model: FullyShardedDataParallel) -> dict[str, Tensor | None]:
    """The same for their gradients; None for what has none."""
    return {name: grad for name, (_, grad) in _full(model).items()}


def _full(model: FullyShardedDataParallel) -> dict[str, tuple[Tensor, Tensor | None]]:
    found = {}
    for unit in model.engine.units:
        shard = unit.sharded_flat_param
        values = unit.layout.unflatten(_gathered(unit, shard.detach()))
        grads = [None] * len(values)
        if shard.grad is not None:
            grads = unit.layout.unflatten(_gathered(unit, shard.grad))
        for info, *both in zip(unit.param_infos, values, grads, strict=True):
            found[f"{unit.name}.{info.name}".lstrip(".")] = tuple(both)
    return found


def _gathered(unit, shard: Tensor) -> Tensor:
    if unit.shard_group is None or not unit.param_infos:
        return shard
    padded = torch.zeros_like(unit.padded_shard)
    padded[: shard.numel()] = shard
    parts = [torch.empty_like(padded) for _ in range(unit.shard_world_size)]
    dist.all_gather(parts, padded, group=unit.shard_group)
    return torch.cat(parts)
