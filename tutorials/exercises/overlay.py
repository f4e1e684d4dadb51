"""The student's functions, laid over the reference.

One exercise is graded with the student's version of its functions, and the reference's of all
others. So exercises can be done in any order, and a mistake in one never hides another.

For a file of the student's, two files are executed in one namespace: first the reference, then the
student's. After that, the definitions that are not asked for are the reference's again. All of them
have the namespace as their globals, so that each calls what is there now. Error messages and
tracebacks name the student's own file and line.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tutorials.exercises.catalog import PACKAGE, Exercise, exercises_alone


class Layer(NamedTuple):
    """A file to lay over one of minifsdp's.

    Attributes:
        not_taken: definitions that stay those of the reference, although the file has them.
    """

    file: Path
    not_taken: tuple[str, ...] = ()


class Overlay(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of minifsdp that have layers.

    Args:
        layers: by the module's path below minifsdp/, without its ending.
    """

    def __init__(self, layers: dict[str, Layer]) -> None:
        self.layers = {
            "minifsdp." + name.replace("/", "."): layer for name, layer in layers.items()
        }

    def install(self) -> None:
        """What is imported from now on has the layers."""
        too_late = sorted(self.layers.keys() & sys.modules.keys())
        if too_late:
            raise RuntimeError(f"{', '.join(too_late)} has been imported already")
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.layers:
            return None
        return importlib.util.spec_from_file_location(name, self.layers[name].file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        layer = self.layers[module.__name__]
        namespace = module.__dict__
        reference = PACKAGE / (module.__name__.removeprefix("minifsdp.").replace(".", "/") + ".py")
        _execute(reference, namespace)
        originals = {name: _get(namespace, name) for name in layer.not_taken}
        _execute(layer.file, namespace)
        for name, original in originals.items():
            _set(namespace, name, original)


def layers_for(exercises: Sequence[Exercise], folder: Path) -> dict[str, Layer]:
    """What to take from a student's folder: the functions of some exercises, and of no others."""
    layers = {}
    for file, module in {(exercise.file, exercise.module) for exercise in exercises}:
        there = {name for e in exercises_alone() if e.module == module for name in e.takes}
        taken = {name for e in exercises if e.module == module for name in e.takes}
        layers[module] = Layer(folder / file, tuple(there - taken))
    return layers


def _execute(path: Path, namespace: dict[str, Any]) -> None:
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), namespace)


def _get(namespace: dict[str, Any], name: str) -> Any:
    owner, _, member = name.rpartition(".")
    return namespace[owner].__dict__[member] if owner else namespace[member]


def _set(namespace: dict[str, Any], name: str, value: Any) -> None:
    owner, _, member = name.rpartition(".")
    if not owner:
        namespace[member] = value
    elif isinstance(namespace.get(owner), type):
        setattr(namespace[owner], member, value)
