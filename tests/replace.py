"""Run tests with another file in the place of one of minifsdp's.

    MINIFSDP_REPLACE="core/limiter=my/limiter.py" pytest tests/test_limiter.py
    MINIFSDP_REPLACE="core/shard=a.py,core/prefetch=b.py" python -m tests.matrix transformer

Every `import minifsdp.core.limiter` of the process, and of the ranks that it starts, then gets what
`my/limiter.py` defines, and the rest from limiter.py. tests/second/ has such files, and
tests/test_replace.py runs them.
"""

import os
from pathlib import Path

from tutorials.exercises.catalog import PACKAGE
from tutorials.exercises.overlay import Layer, Overlay

VARIABLE = "MINIFSDP_REPLACE"


def replacements() -> dict[str, Path]:
    """The file of minifsdp, as in "comm/collectives" -> the file to take for it."""
    pairs = [pair.partition("=") for pair in os.environ.get(VARIABLE, "").split(",") if pair]
    for name, _, file in pairs:
        if not (PACKAGE / f"{name}.py").exists() or not Path(file).is_file():
            raise ValueError(
                f"{VARIABLE}: {name}={file} should be the name of a file of minifsdp without its "
                f"ending, such as core/limiter or comm/collectives, and a file to take instead."
            )
    return {name: Path(file).resolve() for name, _, file in pairs}


def install() -> None:
    """Have what is imported from now on replaced. Raises RuntimeError: some of it is there."""
    layers = {name: Layer(file) for name, file in replacements().items()}
    if layers:
        Overlay(layers).install()
