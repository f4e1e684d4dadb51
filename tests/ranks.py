"""Ranks for tests: processes that are started once and handed one function after another.

    @on_ranks(2)
    def test_something():       # the body runs on both ranks at once, in one process group
        ...

Starting processes for each test is what makes suites like this one slow (importing torch alone
takes a second). Here each world size has its own processes, forked from a server that has torch
imported already, with their own rendezvous file and no port. A failure on any rank is reported with
what *every* rank was doing. Where all ranks have come to an end, they get a new process group, in
which nothing is under way; where one hangs or has died, all processes of that world are killed, and
the next test gets new ones. So it does where tests have left many process groups behind: each of
gloo's has a thread that wakes up a hundred times a second, and a thousand of them take both cores
of a small machine. (To destroy a group is not enough: its threads live for as long as anything
refers to it, such as torch's caches for DTensors.) For the same reason the processes of all worlds
but the one that was called last are stopped, as Ctrl-Z stops a program.

A rank that hangs is given up after a while. Limits are in seconds of an idle machine (patience.py),
and count from when all ranks are there.

What a world computes on, and what carries its messages, is said in gpus.py.
"""

import atexit
import ctypes
import faulthandler
import functools
import gc
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from minifsdp.sim.cli.terminal import out_of_reach
from tests.gpus import SHARED, Place, compute_on, gpus_of
from tests.patience import Patience
from tests.pretended_gpu import NCCL, PretendedGpu

TIMEOUT = float(os.environ.get("RANKS_TIMEOUT", 60))  # seconds for one test's function
START = 120.0  # seconds for the processes of a world to find each other
GRACE = 3.0  # seconds for the other ranks to report, once one has failed
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent has ended
MANY = 8  # process groups of gloo's in a rank; each has three threads

PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "tests", "minifsdp", "tests.fuzz"]
"""Imported once, by the server that ranks are forked from. The first optimizer and the first
checkpoint import torch._dynamo, which takes each rank a second. `tests` comes before minifsdp, of
which it may replace files (see replace.py). See also :func:`fork_server`."""

# So that to ask for a GPU takes none: what is forked from a process that has one could not.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
PRETENDED_GPU = "PRETENDED_GPU" in os.environ  # then there are as many of them as anybody wants
on_cpu = False  # whether the test that runs now has no GPU (conftest.py)

_worlds: dict[tuple[int, Place], "World"] = {}


@dataclass(frozen=True)
class Skipped:
    """What a rank returns that has called `pytest.skip`, as all of them do then."""

    reason: str


class Report(NamedTuple):
    """What a rank sends when it has done something."""

    ok: bool
    result: Any  # the traceback, if it has failed
    groups: int = 0  # of gloo's whose threads it has now; 0 where not known, or they are few


class RankFailure(AssertionError):  # noqa: N818
    """Some rank failed; the message tells of all of them."""

    all_ended = False  # no rank hangs, and none has died


def on_ranks(
    world_size: int, *, timeout: float = TIMEOUT, pretended_gpu: bool = False
) -> Callable[[Callable], Callable]:
    """Run the decorated function of a test module on every rank of a world."""

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            if any(isinstance(value, pytest.MonkeyPatch) for value in (*args, *kwargs.values())):
                # A copy of it, whose changes nobody takes back: the next test has the same ranks.
                raise TypeError(
                    "ranks would keep what monkeypatch changes; use unittest.mock.patch"
                )
            run(test, world_size, *args, timeout=timeout, pretended_gpu=pretended_gpu, **kwargs)

        test.body = body  # what a rank runs, found under the test's own name
        return test

    return decorate


def run(
    function: Callable,
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT,
    pretended_gpu: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on each rank; the results, by rank.

    `function` has to be importable by its name. With `pretended_gpu` the ranks have such a GPU
    (pretended_gpu.py) for as long as they live. Raises RankFailure.
    """
    kind = world_size, Place.PRETENDED_GPU if pretended_gpu else place_of(world_size)
    world = _worlds.get(kind)
    if world is None:
        world = _worlds[kind] = World(*kind)
    for other in _worlds.values():
        other.stop(other is not world)
    try:
        results = world.call(function, args, kwargs, timeout)
        if world.groups > MANY:
            world.kill()
            del _worlds[kind]
        return results
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        if not (isinstance(error, RankFailure) and error.all_ended and world.renew()):
            world.kill()
            del _worlds[kind]
        raise


def cached_in_a_world(function: Callable) -> Callable:
    """Like `functools.cache`, for process groups: a world that is renewed needs others."""
    _cached.append(functools.cache(function))
    return _cached[-1]


_cached: list[Any] = []


def device() -> torch.device:
    """In a rank: where its tensors belong."""
    if dist.get_backend() == "nccl" or PretendedGpu.current is not None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def fork_server() -> Any:
    """What starts processes as forks of a server that has imported what ranks need: PRELOADED, and
    the test modules whose functions they may get to run, so that not each rank imports each."""
    context = multiprocessing.get_context("forkserver")
    known = [name for name, module in sys.modules.items() if _has_ranks(name, module)]
    context.set_forkserver_preload([*PRELOADED, *known])
    return context


def _has_ranks(name: str, module: Any) -> bool:
    given = vars(module) if name.startswith("tests.") else {}
    return given.get("on_ranks") is on_ranks or given.get("run") is run


def place_of(world_size: int) -> Place:
    """Where the ranks of a world run, if a test does not say it."""
    if on_cpu:
        return Place.CPU
    if PRETENDED_GPU:
        return Place.PRETENDED_GPU
    needed = 1 if SHARED else world_size
    return Place.GPU if torch.cuda.device_count() >= needed else Place.CPU


class World:
    """The ranks of one world size, all in the same place."""

    def __init__(self, world_size: int, place: Place = Place.CPU) -> None:
        context = fork_server()
        self.folder = tempfile.TemporaryDirectory(prefix="minifsdp-")
        self.processes, self.connections = [], []
        self.ready = False  # all ranks have found each other
        self.stops = place is not Place.GPU and sys.platform == "linux"  # see _serve
        self.stopped = False
        self.groups = 0  # of gloo's whose threads there are, the most that a rank has
        gpus = gpus_of(world_size) if place is Place.GPU else [None] * world_size
        for rank, gpu in enumerate(gpus):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world_size, place, gpu, self.folder.name),
                daemon=True,
            )
            resource_tracker.ensure_running()
            with out_of_reach():  # the server, too, which the first one starts
                process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def call(self, function: Callable, args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        if not self.ready:
            self.results(START)  # not counted as the function's own time
            self.ready = True
        for connection in self.connections:
            connection.send((function, args, kwargs))
        return self.results(timeout)

    def results(self, timeout: float) -> list[Any]:
        """What the ranks return from what they do now, by rank."""
        reports: dict[int, Report] = {}
        patience = Patience(timeout)
        while len(reports) < len(self.connections) and patience.left:
            waiting = [c for r, c in enumerate(self.connections) if r not in reports]
            for connection in wait(waiting, patience.turn):
                rank = self.connections.index(connection)
                reports[rank] = self._receive(rank)
                if not reports[rank].ok:  # the others may now wait for it for ever
                    patience.at_most(GRACE)
            patience.count()
        self.groups = max([report.groups for report in reports.values()], default=0)
        if len(reports) == len(self.connections) and all(r.ok for r in reports.values()):
            results = [reports[rank].result for rank in range(len(reports))]
            if isinstance(results[0], Skipped):
                pytest.skip(results[0].reason)
            return results
        failure = RankFailure(self._describe(reports, timeout))
        failure.all_ended = len(reports) == len(self.connections) and all(
            process.is_alive() for process in self.processes
        )
        raise failure

    def stop(self, stopped: bool) -> None:
        """Stop its processes until it is called again, or let them go on."""
        if self.stops and self.ready and stopped != self.stopped:
            self.stopped = stopped
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def renew(self) -> bool:
        """Give all ranks a new process group. Returns whether they have found each other in it."""
        try:
            self.call(join_another_group, (self.folder.name,), {}, START)
        except RankFailure:
            return False
        return True

    def _receive(self, rank: int) -> Report:
        try:
            return self.connections[rank].recv()
        except EOFError:
            self.processes[rank].join(GRACE)
            died = f"died with exit code {self.processes[rank].exitcode}"
            stack = Path(self.folder.name, f"stack{rank}")  # empty if it was killed
            return Report(False, f"{died}\n{stack.read_text() if stack.exists() else ''}".rstrip())

    def _describe(self, reports: dict[int, Report], timeout: float) -> str:
        silent = [rank for rank in range(len(self.processes)) if rank not in reports]
        stacks = {rank: Path(self.folder.name, f"stack{rank}") for rank in silent}
        for rank in silent:
            if stacks[rank].exists():  # it has come so far that it listens
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler writes its stack
        patience = Patience(GRACE)
        while patience.left and not all(map(_is_written, stacks.values())):
            time.sleep(0.1)
            patience.count()
        lines = []
        for rank in range(len(self.processes)):
            if rank in silent:
                stack = stacks[rank].read_text() if stacks[rank].exists() else "it was starting"
                lines.append(
                    f"rank {rank} did not finish (limit {timeout:g} s); it was here:\n{stack}"
                )
            elif reports[rank].ok:
                lines.append(f"rank {rank} finished")
            else:
                lines.append(f"rank {rank} failed:\n{reports[rank].result}")
        return "\n\n".join(lines)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()


def _is_written(stack: Path) -> bool:
    """Whether faulthandler has written all of a stack: its last line is of the outermost function,
    which is this file's or Python's own."""
    return stack.exists() and stack.read_text().rstrip().endswith("in <module>")


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    place: Place,
    gpu: int | None,
    folder: str,
) -> None:
    """What a rank does all its life."""
    if not os.path.isdir(folder):
        return  # Ctrl-C has ended who has started this rank
    if sys.platform == "linux":  # a process that is stopped does not notice that the server is gone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115  # for as long as the rank lives
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    faulthandler.enable(stack)
    torch.set_num_threads(1)
    gc.freeze()  # or each rank would copy all memory of the server when it looks for garbage
    if gpu is not None:
        compute_on(gpu, rank)
    backends = {Place.CPU: "gloo", Place.GPU: "nccl", Place.PRETENDED_GPU: NCCL}
    _join(backends[place], rank, world_size, folder)
    if place is Place.PRETENDED_GPU:
        PretendedGpu().__enter__()  # for as long as the rank lives
    warnings.simplefilter("error", FutureWarning)  # of functions that torch renames
    connection.send(Report(True, None))
    for calls in range(10**9):
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            os._exit(0)
        groups = c10d._world.group_count
        try:
            torch.manual_seed(0)
            ok, result = True, getattr(function, "body", function)(*args, **kwargs)
        except pytest.skip.Exception as skip:
            ok, result = True, Skipped(str(skip))
        except BaseException:
            ok, result = False, traceback.format_exc()
        if c10d._world.group_count != groups:
            forget_meshes()
        connection.send(Report(ok, result, _groups()))
        if calls % 100 == 99:
            gc.collect()


def _groups() -> int:
    """How many process groups of gloo's this rank has the threads of, destroyed ones included."""
    tasks = Path("/proc/self/task")
    if not tasks.exists() or len(os.listdir(tasks)) <= 3 * MANY:  # the usual case, and this is fast
        return 0
    # By name, or those of CUDA and NCCL would count, which are there anyway. Each group has two
    # threads of this name. Its third, which wakes up, has one of gloo's only since torch 2.13: were
    # it counted too, ranks on an older torch would go on until they had half as many groups more.
    names = []
    for path in tasks.glob("*/comm"):
        with suppress(OSError):  # a thread may end meanwhile
            names.append(path.read_text().strip())
    return names.count("pt_gloo_runloop") // 2


def _join(backend: str, rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous{next(_joined)}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )


def forget_meshes() -> None:
    """Keep DTensors of the next test away from the groups of this one. torch remembers how the
    result of an operation was distributed, and on which mesh. For another mesh of the same ranks it
    gives that one again, whose group may have been destroyed by then."""
    _clear_sharding_prop_cache()


def join_another_group(folder: str) -> None:
    """In all ranks: the end of their process group, and another one."""
    mine = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    for function in _cached:
        function.cache_clear()
    _join(*mine, folder)


_joined = itertools.count()  # process groups; the same number on all ranks


@atexit.register
def _end_all() -> None:
    for world in _worlds.values():
        world.kill()
