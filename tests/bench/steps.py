"""Training steps of all contenders: timed in one process for each rank, where they take turns, and
counted in processes of their own, where no other's memory is in the way.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.bench import net
from tests.bench.alone import MessagesAlone
from tests.bench.contenders import ALONE, CONTENDERS, Setting
from tests.bench.meters import (
    Reading,
    Tensors,
    build_counter,
    forget_resident_peak,
    read,
    resident_peak,
)
from tests.bench.models import WORKLOADS
from tests.bench.net import Link

WARM_UP = 3


@dataclass(frozen=True)
class Job:
    """What is measured. Ranks find each other, and report, in ``folder``. With a link they are on
    several machines."""

    workload: str
    names: list[str]
    ranks: int
    rounds: int
    bf16: bool
    offload: bool
    folder: str
    parent: int
    link: Link | None = None

    def on_all_ranks(self, function: Callable[..., None], *args: Any) -> Any:
        """What rank 0 reports. ``function`` is called with the rank, the job, and ``args``."""
        report = Path(self.folder, "report")
        self.start(function, *args)
        found = json.loads(report.read_text())
        report.unlink()
        return found

    def start(self, function: Callable[..., None], *args: Any) -> None:
        """Call it on all ranks, and wait for their end."""
        mp.spawn(_rank, (function, self, *args), self.ranks)
        Path(self.folder, "ranks").unlink(missing_ok=True)


def on_gpus(ranks: int) -> bool:
    """Whether there is a GPU for each rank. NCCL refuses two ranks on one, so else all of them run
    on the CPU."""
    return torch.cuda.device_count() >= ranks


def _rank(rank: int, function: Callable[..., Any], job: Job, *args: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job.link:
        net.enter(rank // job.link.ranks, job.parent)
    cuda = on_gpus(job.ranks)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{job.folder}/ranks",
        rank=rank,
        world_size=job.ranks,
    )
    found = function(rank, job, Setting(device, job.bf16, job.offload), *args)
    if rank == 0:
        Path(job.folder, "report").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter otherwise


class Trainer:
    """One contender's model, and its optimizer. SGD, since all of them compute that alike."""

    def __init__(
        self,
        name: str,
        rank: int,
        job: Job,
        setting: Setting,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        workload = WORKLOADS[job.workload]
        self.model = CONTENDERS[name](workload.model(), setting)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.batches = workload.batches(rank, setting.device)
        self.losses: list[float] = []

    def step(self) -> None:
        loss = self.gradients()
        self.update()
        self.losses.append(loss.item())  # waits for a GPU

    def gradients(self) -> Tensor:
        """Forward and backward; the loss."""
        tokens = self.batches[len(self.losses) % len(self.batches)]
        loss: Tensor = self.model(tokens).float().logsumexp(-1).mean()
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def timed(rank: int, job: Job, setting: Setting) -> dict[str, Any]:
    """Each contender's readings of this rank's steps, and its losses; where messages travel while a
    rank computes, also how long that took."""
    trainers = {name: Trainer(name, rank, job, setting) for name in job.names}
    readings: dict[str, list[Reading]] = {name: [] for name in trainers}
    for turn in range(WARM_UP + job.rounds):
        for name, trainer in trainers.items():
            dist.barrier()
            before = read()
            trainer.step()
            dist.barrier()
            if turn >= WARM_UP:
                readings[name].append(read().since(before))
    found: dict[str, dict[str, Any]] = {
        name: {"readings": readings[name], "losses": trainer.losses}
        for name, trainer in trainers.items()
    }
    for name, trainer in trainers.items():
        if isinstance(trainer.model, MessagesAlone) and trainer.model.meanwhile:
            found[name]["computing"] = trainer.model.slowest()[WARM_UP:]
    return found


def counted(rank: int, job: Job, setting: Setting, name: str) -> dict[str, int]:
    """Bytes of rank 0 in a step: of its tensors at most, all there are; and by how much the
    process's resident set grows."""
    trainer, tensors = Trainer(name, rank, job, setting), Tensors()
    for _ in range(WARM_UP):
        trainer.step()
    dist.barrier()
    tensors.forget_peak()
    resident = forget_resident_peak()
    trainer.step()
    return {"tensors": tensors.peak(), "resident": resident_peak() - resident}


def memory(job: Job) -> dict[str, dict[str, int]]:
    """Of each contender; empty where it cannot be counted."""
    library = build_counter(Path(job.folder))
    if library is None or on_gpus(job.ranks):
        print("memory: not counted; it takes a C compiler, and models on the CPU")
        return {}
    with environment(LD_PRELOAD=str(library)):
        return {name: job.on_all_ranks(counted, name) for name in job.names}


@contextmanager
def environment(**words: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, word in before.items():
            os.environ.pop(name)
            if word is not None:
                os.environ[name] = word


def measured(
    workload: str,
    names: list[str],
    ranks: int,
    rounds: int,
    link: Link | None = None,
    bf16: bool = False,
    offload: bool = False,
    counts: bool = True,
) -> dict[str, dict[str, Any]]:
    """By contender: ``readings``, ``losses``; with ``counts`` also ``tensors`` and ``resident``.

    Args:
        link: None: as fast as the machine is.

    Raises:
        ValueError: the losses of two contenders differ.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = Job(workload, names, ranks, rounds, bf16, offload, folder, os.getpid(), link)
        if link:
            stack.enter_context(net.links(ranks // link.ranks, link))
        found: dict[str, dict[str, Any]] = job.on_all_ranks(timed)
        for name, peaks in memory(job).items() if counts else ():
            found[name] |= peaks
    check_losses({name: each["losses"] for name, each in found.items() if name not in ALONE}, bf16)
    return found


def check_losses(losses: dict[str, list[float]], bf16: bool) -> None:
    """Nothing is fast by being wrong: all contenders' losses agree with the first one's. They add
    the same numbers in other sequences, so the last bits may differ.

    Raises:
        ValueError: they do not.
    """
    bound = 1e-2 if bf16 else 1e-5
    (first, expected), *others = losses.items()
    for name, found in others:
        for at, (a, b) in enumerate(zip(found, expected, strict=True)):
            if not abs(a - b) <= bound * abs(b):
                raise ValueError(f"step {at}: {name} has the loss {a}, {first} has {b}")
