"""Run tests with another file in the place of one of minifsdp's.

    MINIFSDP_REPLACE="limiter=my/limiter.py" pytest tests/test_limiter.py
    MINIFSDP_REPLACE="shard=a.py,prefetch=b.py" python -m tests.matrix transformer

Every `import minifsdp.limiter` of the process, and of the ranks that it starts, then gets
`my/limiter.py`. That file has to have all names that the rest of minifsdp takes from limiter.py.
A file that replaces only some of them begins with

    the_rest(globals())

tests/second/ has such files, and tests/test_replace.py runs them.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

VARIABLE = "MINIFSDP_REPLACE"
PACKAGE = Path(__file__).parent.parent / "minifsdp"


def replacements() -> dict[str, Path]:
    """Name of a module of minifsdp -> the file to take for it."""
    pairs = [pair.partition("=") for pair in os.environ.get(VARIABLE, "").split(",") if pair]
    found = {}
    for name, _, file in pairs:
        path = Path(file).resolve()
        if not _original(name).exists() or not path.is_file():
            raise ValueError(
                f"{VARIABLE}: {name}={file} should be the name of a file of minifsdp without its "
                f"ending, such as limiter or comm/collectives, and a file to take instead of it."
            )
        found["minifsdp." + name.replace("/", ".")] = path
    return found


class Replacer(MetaPathFinder):
    """Finds the replacements before Python finds the originals."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = replacements().get(name)
        return None if file is None else spec_from_file_location(name, file)


def install() -> None:
    """Have what is imported from now on replaced. Raises RuntimeError: some of it is there."""
    found = replacements()
    if too_late := found.keys() & sys.modules.keys():
        raise RuntimeError(
            f"{', '.join(sorted(too_late))} had been imported before tests was, so {VARIABLE} "
            f"comes too late. Start Python in the folder that has minifsdp and tests in it."
        )
    if found:
        sys.meta_path.insert(0, Replacer())


def the_rest(namespace: dict[str, object]) -> None:
    """Define in a replacement what the original defines; what follows there takes its place."""
    path = _original(str(namespace["__name__"]).removeprefix("minifsdp.").replace(".", "/"))
    exec(compile(path.read_text(), path, "exec"), namespace)


def _original(name: str) -> Path:
    return PACKAGE / f"{name}.py"
