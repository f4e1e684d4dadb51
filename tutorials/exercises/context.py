"""CONTEXT.md of a student's folder: what a reference's functions call, a line each.

Of every exercise of track two the functions are looked through for names that minifsdp defines. A
method may be defined by several classes. Then the protocol's is meant, or the one of the same file.
"""

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch

from tutorials.exercises import source
from tutorials.exercises.catalog import PACKAGE, Exercise, exercises_alone

HEAD = """# What the functions here work with

For each exercise of track two: what of minifsdp a solution may call. The files are in minifsdp/;
their docstrings say more.
"""


class Definition(NamedTuple):
    """A function, a method or a class of minifsdp."""

    name: str  # qualified
    file: str
    of_protocol: bool
    line: str  # of CONTEXT.md


def context() -> str:
    """The whole file."""
    parts = [HEAD]
    for exercise in exercises_alone(2):
        parts.append(f"## {exercise.key}: {exercise.title}\n")
        lines = [found.line for found in used(exercise)] or ["Nothing but torch."]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def used(exercise: Exercise) -> list[Definition]:
    """What the exercise's functions call, in the order of their files."""
    own = f"{exercise.module}.py"
    tree = ast.parse(exercise.reference)
    found = {}
    for node in source.functions(exercise, source.definitions(tree)).values():
        for name, is_method in _names(node):
            if (meant := _meant(name, is_method, own)) and not _is_taken(meant, exercise, own):
                found[meant.name] = meant
    return sorted(found.values(), key=lambda one: (one.file != own, one.file, one.name))


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The names in a function that are not its own, and whether each is that of a method."""
    own = {inside.arg for inside in ast.walk(node) if isinstance(inside, ast.arg)}
    for inside in ast.walk(node):
        if isinstance(inside, ast.Name) and isinstance(inside.ctx, ast.Store):
            own.add(inside.id)
    # Nobody asks a method for an attribute, or goes over it: streams.unshard is a stream.
    things = {inside.value for inside in ast.walk(node) if isinstance(inside, ast.Attribute)}
    things |= {inside.iter for inside in ast.walk(node) if isinstance(inside, ast.For)}
    for inside in ast.walk(node):
        if isinstance(inside, ast.Attribute) and isinstance(inside.value, ast.Constant):
            continue  # ", ".join
        if isinstance(inside, ast.Attribute) and not hasattr(torch.Tensor, inside.attr):
            if inside not in things:
                yield inside.attr, True
        elif isinstance(inside, ast.Name) and inside.id not in own:
            yield inside.id, False


def _meant(name: str, is_method: bool, own: str) -> Definition | None:
    """What a name stands for; None if minifsdp does not define it, or it is not clear where."""
    there = [one for one in _definitions().get(name, []) if ("." in one.name) is is_method]
    if name.startswith("_") and not is_method:
        there = [one for one in there if one.file == own]  # a file's own functions
    for fitting in (
        [one for one in there if one.of_protocol],
        [one for one in there if one.file == own],
        [one for one in there if one.file.startswith("core/")],
        there,
    ):
        if len(fitting) == 1:
            return fitting[0]
    return None


def _is_taken(found: Definition, exercise: Exercise, own: str) -> bool:
    names = (*exercise.takes, *exercise.hides)
    return found.file == own and any(f"{found.name}.".startswith(f"{name}.") for name in names)


@cache
def _definitions() -> dict[str, list[Definition]]:
    found: dict[str, list[Definition]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        if file.startswith("sim/"):
            continue
        there = source.definitions(ast.parse(path.read_text()))
        for name, node in there.items():
            outer = there.get(name.rpartition(".")[0])
            bases = outer.bases if isinstance(outer, ast.ClassDef) else []
            is_protocol = any(ast.unparse(base) == "Protocol" for base in bases)
            said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            said = said.split(". ")[0].rstrip(".")  # its first sentence
            if not said or said.startswith("See :"):  # as of a method whose protocol says it
                continue
            is_value = isinstance(node, ast.ClassDef) or any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            arguments = "" if is_value else f"({_arguments(node)})"
            line = f"- `{name}{arguments}`, {file}: {said.replace('``', '`')}."
            last = name.rpartition(".")[2]
            found.setdefault(last, []).append(Definition(name, file, is_protocol, line))
    return found


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ", ".join(
        arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg != "self"
    )
