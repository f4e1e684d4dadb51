"""Whether files can be written: asked before the work that they are of, and not after it."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENOUGH = 2**20
"""Bytes that have to be free for a file of ours, if nobody knows better."""


def check_files(paths: dict[str, str | None]) -> None:
    """That files can be written.

    Args:
        paths: by option; None: it was not given.

    Raises:
        ValueError: one cannot.
    """
    seen: dict[Path, str] = {}
    for option, path in (
        (option, Path(path)) for option, path in paths.items() if path is not None
    ):
        if problem := file_problem(path):
            raise ValueError(f"--{option}: cannot write {str(path)!r}: {problem}")
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(f"--{option} and --{other} name the same file, {str(path)!r}")


def file_problem(path: Path) -> str:
    """Why a file cannot be written; empty if it can. Leaves it as it is."""
    with _in_words() as problem:
        if path.is_dir():
            return "it is a directory"
        if not path.parent.is_dir():
            return f"there is no directory {str(path.parent)!r}"
        new = not path.exists()
        try:
            with path.open("ab") as file:  # the file system knows best
                file.raw.write(b"")  # /dev/full refuses nothing as well
                file.write(bytes(ENOUGH * new))
        finally:
            if new:
                path.unlink(missing_ok=True)
    return "".join(problem)


def folder_problem(folder: Path, nbytes: int = ENOUGH) -> str:
    """Why so many bytes cannot be written into a folder, which is made if it is not there; empty if
    they can."""
    with _in_words() as problem:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not there.is_dir():
            return "it is a file" if there == folder else f"{there} is a file"
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(ENOUGH))
            file.flush()
            free = shutil.disk_usage(there).free + ENOUGH
        if free < nbytes:
            needed, found = (math.ceil(value / 2**20) for value in (nbytes, free))
            return f"{needed:,} MiB are needed there, and about {found:,} are free"
    return "".join(problem)


@contextmanager
def _in_words() -> Iterator[list[str]]:
    """The first error in here, without its number."""
    problem: list[str] = []
    try:
        yield problem
    except OSError as error:
        words = error.strerror or str(error)
        problem.append(words[:1].lower() + words[1:])
    except ValueError as error:  # a name that no file can have
        problem.append(str(error))
