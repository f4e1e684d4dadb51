"""Scripts under torchrun, without the seconds that torchrun and new Pythons take to import torch.

Ranks are forked from the server of ranks.py, which has imported it, and find each other as those of
torchrun do: through a store that the process that starts them keeps. tests/test_readme.py runs
torchrun itself.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.patience import Patience
from tests.ranks import fork_server


def torchrun(
    script: Path, ranks: int, *arguments: str, path: Path | None = None, seconds: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run a script on some ranks to its end; what they print comes in the order of the ranks.

    Args:
        path: where the script imports from, besides its own folder.
        seconds: of an idle machine, after which ranks that have not ended are killed.
    """
    context = fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="minifsdp-") as name:
        folder, processes = Path(name), []
        for rank in range(ranks):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": name,
                "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
            }  # fmt: skip
            if torch.cuda.device_count() < ranks:  # then NCCL could not be used, and gloo is
                environment["CUDA_VISIBLE_DEVICES"] = ""
            task = script, arguments, environment, path, folder
            processes.append(context.Process(target=_rank, args=task, daemon=True))
            processes[-1].start()
        patience = Patience(seconds)
        while (running := [p.sentinel for p in processes if p.is_alive()]) and patience.left:
            wait(running, patience.turn)
            patience.count()
        for process in processes:
            process.kill()
            process.join()
        said = [
            "".join((folder / f"{stream}{rank}").read_text() for rank in range(ranks))
            for stream in ("out", "err")
        ]
    code = next((process.exitcode for process in processes if process.exitcode), 0)
    return subprocess.CompletedProcess([script, *arguments], code, *said)


def _rank(
    script: Path,
    arguments: tuple[str, ...],
    environment: dict[str, Any],
    path: Path | None,
    folder: Path,
) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        file = folder / f"{name}{environment['RANK']}"
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent)] + [str(path)] * (path is not None)
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as any Python at its end; multiprocessing's processes do not
