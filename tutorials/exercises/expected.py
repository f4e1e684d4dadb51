"""What the reference gives in each check, kept from one grading to the next.

It is half of the work of grading, and it changes only with the reference and with the checks. So it
is kept in .expected/, under a name that depends on all of these. A student's program could write
there too. So where points count, which is with --results, nothing is kept and nothing is read.
"""

import hashlib
import io
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from minifsdp.sim.cli.terminal import progress
from tutorials import grow
from tutorials.exercises.catalog import HERE, PACKAGE, ROOT, Check
from tutorials.exercises.inside import Job
from tutorials.exercises.sandbox import Report, read_report, run_all

KEPT = ROOT / ".expected"


def expected_reports(
    checks: Iterable[Check], seed: int, patience: float, workers: int, keep: bool
) -> dict[Check, Report]:
    """The reports of the reference; the arguments are those of grade().

    No function of a student's may have run in this grading yet: it could have a part in them.
    """
    folder = KEPT / fingerprint(f"{seed} {_arithmetic()}")
    files = {
        check: folder / check.function.__module__ / check.function.__name__ for check in checks
    }
    reports = {check: _kept(check, path) for check, path in files.items()} if keep else {}
    missing = [check for check in files if check not in reports or None in reports[check].ranks]
    jobs = [Job(check, {}, None, seed) for check in missing]
    for done, (job, report) in enumerate(run_all(jobs, workers, patience), 1):
        kept = ", which is kept for the next time" if keep else ""
        progress(f"{done} of {len(missing)} checks of the reference{kept}")
        reports[job.check] = report
        if keep and not report.ended:
            with suppress(OSError):  # a disk that is full or may not be written to: only slower
                _keep(report, files[job.check])
    return reports


def _kept(check: Check, path: Path) -> Report:
    return Report([read_report(path / str(rank)) for rank in range(check.ranks)], "")


def _keep(report: Report, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for rank, seen in enumerate(report.ranks):
        content = io.BytesIO()
        torch.save([tuple(entry) for entry in seen or ()], content)
        partial = path / f"{rank}.{os.getpid()}"  # another grading may read here
        partial.write_bytes(content.getvalue())
        partial.rename(path / str(rank))


def fingerprint(also: str = "") -> str:
    """Of the programs that say what is right: the reference, and the checks with their helpers."""
    files = [*PACKAGE.rglob("*.py"), *HERE.rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    files += [Path(grow.__file__), grow.FIRST, *grow.DIFFS]
    digest = hashlib.sha256(also.encode())
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _arithmetic() -> str:
    """What the last bit of a sum depends on, besides the program."""
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {platform.node()}"
