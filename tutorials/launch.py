"""Ranks for the pages: a function that runs in several processes at once.

    @on_ranks(2)
    def average() -> None:  # the body, on both ranks
        mean = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        print(mean)

    average()  # starts the ranks; what they print comes out in their order

Under torchrun the ranks are there already; the first ones run the body, the others look on. On a
machine with enough GPUs each rank has one, NCCL between them, and new tensors are made there.
"""

import contextlib
import functools
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from build import load

TIMEOUT, GRACE = 900.0, 3.0  # seconds for all ranks, to end what hangs; for others once one fails
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "minifsdp.fsdp_module",
]
"""What ranks would import late, with the first optimizer, DDP or FSDP: most of what their start
takes. (The package `minifsdp` alone imports next to nothing before it is used.)"""
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
if UNDER_TORCHRUN and os.environ["RANK"] != "0":
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what all ranks do alike is told once


def on_ranks(count: int) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """Run a function of a page on ``count`` ranks. Calling it gives what they returned, by rank.

    Raises:
        RuntimeError: a rank has failed; with its traceback.
        SystemExit: torchrun has not started enough of them.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(body)
        def launched(*args: Any) -> list[Any]:
            reports = (_here if UNDER_TORCHRUN else _processes)(body, count, args)
            for rank, (printed, _) in enumerate(reports):
                for line in printed.splitlines():
                    print(f"rank {rank}: {line}")
            return [result for _, result in reports]

        launched.body = body  # type: ignore[attr-defined]  # what a new process looks for
        return launched

    return decorate


def _here(body: Callable[..., Any], count: int, args: tuple[Any, ...]) -> list[Any]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks < count:
        sys.exit(f"this page needs {count} ranks: torchrun --nproc-per-node {count} ...")
    store = dist.PrefixStore(f"call {next(_calls)}", _torchruns_store())
    if rank < count:  # the others look on
        with _joined(int(os.environ["LOCAL_RANK"]), rank, count, dist.PrefixStore("group", store)):
            store.set(f"rank {rank}", pickle.dumps(_listen(body, args)))
    return [pickle.loads(store.get(f"rank {rank}")) for rank in range(count)]


_calls = itertools.count()


@functools.cache
def _torchruns_store() -> dist.Store:
    store, *_ = next(iter(dist.rendezvous("env://")))
    return store


def _processes(body: Callable[..., Any], count: int, args: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy:UserWarning")
    with tempfile.TemporaryDirectory(prefix="minifsdp-") as folder:
        whole, pipes, processes = _sent(body), [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            about = whole, args, rank, count, folder
            processes.append(context.Process(target=_serve, args=(theirs, *about), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _collect(pipes, processes)
        finally:
            for process in processes:
                process.join(GRACE)
                process.kill()


def _sent(body: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """What a new process calls to have the function: it loads its page, from the page's file. In a
    notebook there is no such file, and the function itself is sent, as its cell has it now."""
    page = inspect.getsourcefile(body)
    if page and Path(page).is_file():
        return functools.partial(_found, page, body.__name__)
    import cloudpickle  # notebooks install it

    return functools.partial(pickle.loads, cloudpickle.dumps(body))


def _found(page: str, name: str) -> Callable[..., Any]:
    body: Callable[..., Any] = getattr(load(Path(page)), name).body
    return body


def _collect(pipes: list[Any], processes: list[Any]) -> list[Any]:
    reports: list[Any] = [None] * len(pipes)
    errors: dict[int, str] = {}
    silent = set(range(len(pipes)))
    while silent:
        ready = wait([pipes[rank] for rank in silent], GRACE if errors else TIMEOUT)
        if not ready:
            errors |= dict.fromkeys(silent, "no answer")
            break
        for rank in [rank for rank in silent if pipes[rank] in ready]:
            silent.remove(rank)
            try:
                reports[rank], error = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join(GRACE)
                error = f"it died (exit code {processes[rank].exitcode})"
            if error:  # the others may wait for it, and would for ever
                errors[rank] = error
    if errors:
        raise RuntimeError("\n".join(f"rank {rank}: {why}" for rank, why in errors.items()))
    return reports


def _serve(
    pipe: Connection,
    whole: Callable[[], Callable[..., Any]],
    args: tuple[Any, ...],
    rank: int,
    count: int,
    folder: str,
) -> None:
    """The life of a rank."""
    report, error = None, ""
    with _joined(rank, rank, count, dist.FileStore(f"{folder}/store", count)):
        try:
            report = _listen(whole(), args)
        except BaseException:
            error = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((report, error)))


@contextlib.contextmanager
def _joined(gpu: int, rank: int, count: int, store: dist.Store) -> Iterator[None]:
    """Be a rank, with a process group."""
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.device_count() >= count else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(gpu)
        torch.set_default_device(f"cuda:{gpu}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    yield
    with contextlib.suppress(RuntimeError):  # gloo may repeat an error that a page has seen
        dist.barrier()  # who leaves early hangs up on one that is still arriving
    dist.destroy_process_group()


def _listen(body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    out = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(out):
        result = body(*args)
    return out.getvalue(), result
