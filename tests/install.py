"""What `make` puts into .venv: torch, and minifsdp with what its tests and lint need.

    .venv/bin/python tests/install.py

It says how much there is to download, shows how far pip is with torch, which is nearly all of it,
and says in one line what went wrong. Nothing but Python is needed to run it.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # nothing is installed yet

from minifsdp.sim.cli.terminal import begin, end_tidily  # noqa: E402

INSTALLED = ROOT / ".venv" / "installed"  # written by make, when this has come to its end
LOG = ROOT / ".venv" / "pip.log"
FOR_CPUS = "https://download.pytorch.org/whl/cpu"
NO_NETWORK = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ProxyError")
"""What pip says where it reaches nothing, between its retries."""


def pinned() -> str:
    """torch, as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def has_torch() -> bool:
    """Whether that version is there."""
    try:
        return f"torch=={version('torch').partition('+')[0]}" == pinned()
    except PackageNotFoundError:
        return False


def about_torch(system: str, environment: Mapping[str, str]) -> str:
    """Which build pip will take, and how large it is.

    Args:
        system: as of ``platform.system()``.
    """
    indices = f"{environment.get('PIP_INDEX_URL')} {environment.get('PIP_EXTRA_INDEX_URL')}"
    if FOR_CPUS in indices:
        return "torch for CPUs: about 200 MB to download, 1 GB on disk"
    if system == "Linux":
        return (
            "PyPI's torch, with CUDA: about 2.7 GB to download, 5.4 GB on disk.\n"
            f"(For CPUs 200 MB are enough: PIP_EXTRA_INDEX_URL={FOR_CPUS} make ...)"
        )
    return "torch: about 100 MB to download"


def install(*words: str) -> None:
    """Have pip install something. Raises SystemExit: it could not, in one line."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--retries", "2"]
    done = subprocess.run([*pip, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        LOG.write_text(done.stderr)
        sys.exit(f"{in_one_line(done.stderr)} (All that pip said is in {LOG.relative_to(ROOT)}.)")


def in_one_line(errors: str) -> str:
    """What pip's errors come to."""
    if any(word in errors for word in NO_NETWORK):
        return "pip cannot reach its package index: is there a network? Then say the same again."
    lines = [line for line in errors.splitlines() if line.startswith("ERROR: ")] or [errors]
    return "pip could not install it: " + lines[0].removeprefix("ERROR: ").strip().rstrip(".") + "."


def main() -> None:
    begin()
    end_tidily()
    if not has_torch():
        print(f"Into .venv goes {about_torch(platform.system(), os.environ)}", flush=True)
        install(pinned())
    print("Into .venv go minifsdp, NumPy, pytest, ruff and mypy: about 50 MB ...", flush=True)
    install("--quiet", "-c", "constraints.txt", "-e", ".[test,lint]")
    if not INSTALLED.exists():
        print("To use it without make, too:  source .venv/bin/activate  and then  minifsdp --help")


if __name__ == "__main__":
    main()
