"""Errors of a model that is run: one line, with the place in its author's own code."""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import minifsdp
from minifsdp.sim.cli.values import ImpossibleError

MINIFSDP = os.path.dirname(minifsdp.__file__)
LIBRARIES = (
    MINIFSDP,
    os.path.dirname(torch.__file__),
    sysconfig.get_path("stdlib"),
    "<frozen",
)


@contextmanager
def blaming(model: str, doing: str) -> Iterator[None]:
    """What is raised inside comes from a model.

    Args:
        model: as the user has called it.
        doing: what was asked of it: "its forward".

    Raises:
        ValueError: it has failed: how, and in which line.
        ImpossibleError: it asks for attention that no kernel that may be used can do.
        torch.OutOfMemoryError: it does not fit, which is no mistake.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard may end the program
        if "attention kernels" in str(error):  # of hardware/attention.py
            raise ImpossibleError(f"--attention: {error}; here by --attention auto") from error
        what = f"model {model!r} fails in {doing}"
        if isinstance(error, (NotImplementedError, RuntimeError)) and "meta" in str(error):
            what = f"model {model!r} cannot run on tensors without values"
        raise ValueError(f"{what}: {said(error)}") from error


def said(error: Exception | SystemExit) -> str:
    """An error in one line: its type, the first line of its message, where it comes from."""
    first = (str(error).strip() or "(no message)").splitlines()[0]
    return f"{type(error).__name__}: {first} ({place(error)})"


def place(error: Exception | SystemExit) -> str:
    """``file:line``: the innermost that is not in torch, minifsdp or Python itself; if all are,
    the innermost of minifsdp."""
    if isinstance(error, SyntaxError) and error.filename:  # that line has not been run
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    ours = [frame for frame in frames if frame.filename.startswith(MINIFSDP)]
    innermost = (own or ours or frames)[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or "site-packages" in file
