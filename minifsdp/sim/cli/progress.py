"""What is being done, while it is."""

import sys
from collections.abc import Callable

Progress = Callable[[str], None]


def progress(what: str) -> None:
    """Over the last such line, if somebody is looking; nothing wipes it."""
    if sys.stderr.isatty():
        print(f"\r{what}{' ...' * bool(what)}\x1b[K", end="", file=sys.stderr, flush=True)
