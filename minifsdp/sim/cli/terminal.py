"""What all programs here have in common with who sits at the terminal: Ctrl-C, progress, colours.

The tools in tests/ and the course in tutorials/ use it as well. No torch in here: it is imported
before torch is, since that takes seconds, in which somebody may press Ctrl-C already.
"""

import atexit
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128, and the number of the signal."""
AGAIN = 0.3
"""Seconds after which a Ctrl-C that has had no effect is raised again."""
EVERY = 10.0
"""Seconds from one line of progress to the next, where they go to a file."""
COLOURS = {"red": 31, "green": 32, "yellow": 33, "grey": 90}

Progress = Callable[[str], None]


def begin(program: bool = True) -> None:
    """Called before torch is imported: nobody is warned that NumPy is missing, which nothing here
    needs, neither here nor in processes that are started from here. And Ctrl-C is one line.

    Args:
        program: whether it is one of ours that runs; pytest has its own way with Ctrl-C.
    """
    message = "Failed to initialize NumPy"
    warnings.filterwarnings("ignore", message)
    os.environ.setdefault("PYTHONWARNINGS", f"ignore:{message}:UserWarning")
    if not program:
        return
    sys.excepthook, sys.unraisablehook = _uncaught, _unraisable
    signal.signal(signal.SIGINT, _end_at_once)
    if "RANK" in os.environ:  # of torchrun's, which says it for all of its ranks
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(INTERRUPTED))


def typed() -> str | None:
    """What the user has typed to get here, for a parser's ``prog``; None: the program's own name.
    ``minifsdp`` and the Makefile say it, which start programs under another name."""
    return os.environ.get("MINIFSDP_TYPED")


# ---------------------------------------------------------------------------------------- Ctrl-C


def _interrupt(*_: object) -> None:
    """As Python does: raise KeyboardInterrupt. But some code takes it for an error of its own, and
    goes on. So look again until the program has ended."""
    signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    if error is None:  # else it is on its way, and something is being ended or cleaned up
        raise KeyboardInterrupt


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    say_stopped()
    if multiprocessing := sys.modules.get("multiprocessing"):
        for child in multiprocessing.active_children():  # at its exit Python waits for them
            child.kill()
    raise SystemExit(INTERRUPTED)  # Python takes it from here as from anywhere else


def say_stopped(words: str = "stopped") -> None:
    """The one line, after which nothing comes."""
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = lambda _: None  # of a pool, whose processes are gone
    progress("")
    print(words, file=sys.stderr, flush=True)


def _unraisable(what: "UnraisableHookArgs") -> None:
    """Of an exception in a finalizer, which goes nowhere. Ctrl-C will be raised again."""
    if not issubclass(what.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(what)


def end_tidily() -> None:
    """From now on Ctrl-C is an exception, in one of our programs that leaves processes or files
    behind if it just ends. Until then it just ends: in an import and in the virtual GPU, whose work
    is done in callbacks from torch's C++, an exception is lost, or aborts Python."""
    if sys.excepthook is _uncaught:
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, _interrupt)


def _end_at_once(*_: object) -> None:
    say_stopped()
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def reader_has_left() -> int:
    """For a BrokenPipeError: whoever reads what is printed has left, as ``| head`` does. That needs
    no word. Returns the exit status, as shells have it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
    return 141


@contextmanager
def out_of_reach() -> Iterator[None]:
    """Processes that are started in here get no Ctrl-C, which a terminal sends to all of them. They
    would each print a traceback; and who has started them ends them. (multiprocessing's tracker
    has to run already, where it is needed: who starts it gets Ctrl-C again.)"""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ------------------------------------------------------------------------------------- what is seen


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks at it, on something that can do more than print."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns(otherwise: int) -> int:
    """Of the terminal that is printed to; of a file ``otherwise``, whoever's window is how wide."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else otherwise


def progress(what: str) -> None:
    """What is being done, on stderr: over the last such line in a terminal, and nothing wipes it.
    Where it goes to a file there is a line of its own now and then, for as long as nothing is wiped
    with an empty one."""
    global _told
    now = time.monotonic()
    if is_terminal(sys.stderr):
        line = f"{what} ..."[: shutil.get_terminal_size().columns - 1] if what else ""
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
    elif not what:
        _told = None
    elif _told is None:
        _told = now
    elif now > _told + EVERY:
        _told = now
        print(what, file=sys.stderr, flush=True)


_told: float | None = None
"""When the last line went to a file, or could have gone."""


def painted(text: str, colour: str) -> str:
    """In one of COLOURS, where that can be seen and is wanted (no-color.org)."""
    if not text or not is_terminal(sys.stdout) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"
