"""The student's functions, laid over the reference.

One exercise is graded with the student's version of its functions, and the reference's of all
others. So exercises can be done in any order, and a mistake in one never hides another.

For a file of the student's, two files are executed in one namespace: first the reference, then the
student's. After that, the definitions that are not asked for are the reference's again. All of them
have the namespace as their globals, so that each calls what is there now. Error messages and
tracebacks name the student's own file and line.

The program of track one is the module ``fsdp``. Its first functions are laid over the first of the
reference's programs. Later there is nothing below it: all of it is the student's.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tutorials import grow
from tutorials.exercises.catalog import PACKAGE, PROGRAM, Exercise, exercises_alone


class Layer(NamedTuple):
    """A file to lay over one of minifsdp's, or over a program of the reference's.

    Attributes:
        not_taken: definitions that stay those of the reference, although the file has them.
        program: of PROGRAM, what is below it; empty: nothing.
    """

    file: Path
    not_taken: tuple[str, ...] = ()
    program: str = ""


class Overlay(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules of minifsdp that have layers, and PROGRAM.

    Args:
        layers: by the module's path below minifsdp/, without its ending; or PROGRAM.
    """

    def __init__(self, layers: dict[str, Layer]) -> None:
        self.layers = {_name(module): layer for module, layer in layers.items()}

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
        if module.__name__ != PROGRAM:
            path = module.__name__.removeprefix("minifsdp.").replace(".", "/")
            reference = PACKAGE / f"{path}.py"
            _execute(reference.read_bytes(), reference, namespace)
        elif layer.program:
            _execute(grow.text(layer.program), f"steps/{layer.program}.py", namespace)
        originals = {name: _get(namespace, name) for name in layer.not_taken}
        _execute(layer.file.read_bytes(), layer.file, namespace)
        for name, original in originals.items():
            _set(namespace, name, original)


def layers_for(exercises: Sequence[Exercise], folder: Path) -> dict[str, Layer]:
    """What to take from a student's folder: the functions of some exercises, and of no others. Of
    an exercise that takes a whole program: that."""
    layers = {}
    for exercise in exercises:
        module, file = exercise.module, folder / exercise.file
        if exercise.takes_all:
            layers[module] = Layer(file)
            continue
        there = {name for e in exercises_alone() if e.module == module for name in e.takes}
        taken = {name for e in exercises if e.module == module for name in e.takes}
        layers[module] = Layer(file, tuple(there - taken), exercise.program)
    return layers


def _name(module: str) -> str:
    return PROGRAM if module == PROGRAM else "minifsdp." + module.replace("/", ".")


def _execute(text: str | bytes, path: str | Path, namespace: dict[str, Any]) -> None:
    exec(compile(text, path, "exec", dont_inherit=True), namespace)


def _get(namespace: dict[str, Any], name: str) -> Any:
    owner, _, member = name.rpartition(".")
    return namespace[owner].__dict__[member] if owner else namespace[member]


def _set(namespace: dict[str, Any], name: str, value: Any) -> None:
    owner, _, member = name.rpartition(".")
    if not owner:
        namespace[member] = value
    elif isinstance(namespace.get(owner), type):
        setattr(namespace[owner], member, value)
