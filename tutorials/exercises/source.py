"""What can be said of a student's file without running it, and how the file is made.

A definition is named as Python does it: ``flatten``, ``EventQueue``, ``Prefetcher.pre_forward``.
"""

import ast
import re
import textwrap
from pathlib import Path

from tutorials.exercises.catalog import Exercise

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Complaint(Exception):  # noqa: N818  # nothing has gone wrong here
    """What is wrong with a file, in one line that names file and line."""


def definitions(tree: ast.Module) -> dict[str, Definition]:
    """The functions, classes and methods of a file by their qualified names."""
    found: dict[str, Definition] = {}
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            found[node.name] = node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, _DEFINITIONS):
                    found[f"{node.name}.{inner.name}"] = inner
    return found


def read(path: Path) -> ast.Module:
    """The syntax tree of a file.

    Raises:
        Complaint: the file is missing, or is not Python.
    """
    try:
        return ast.parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise Complaint(
            f"{path.name} is not in {path.parent}; make student OUT=... makes a folder with all"
        ) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise Complaint(f"{path.name}:{line}: {getattr(error, 'msg', error)}") from None
    except OSError as error:
        raise Complaint(f"{path.name} cannot be read: {error.strerror}") from None


def functions(exercise: Exercise, found: dict[str, Definition]) -> dict[str, Definition]:
    """The functions that an exercise is about: those it takes, and the methods of classes."""
    return {
        name: node
        for name, node in found.items()
        for taken in exercise.takes
        if name == taken or name.startswith(taken + ".")
        if not isinstance(node, ast.ClassDef)
    }


def is_done(exercise: Exercise, path: Path) -> bool:
    """Whether the student has written it: no function of it still says that it is to be written.

    Raises:
        Complaint: a function is missing, or has other arguments than it should have.
    """
    given = definitions(read(path))
    wanted = functions(exercise, definitions(ast.parse(exercise.reference)))
    for name, node in wanted.items():
        public = not node.name.startswith("_") or node.name == "__init__" or name in exercise.takes
        if name not in given and public and not _optional(node):
            raise Complaint(
                f"{path.name}: there is no {name}; {exercise.key} is to be written there"
            )
        if name in given and public:
            _compare_arguments(name, node, given[name], path)
    return not any(_says_todo(node) for node in functions(exercise, given).values())


def lacks(exercise: Exercise, path: Path) -> list[str]:
    """What a program of the student's has not yet that an exercise is about: functions that still
    say that they are to be written, and names that it does not use.

    Raises:
        Complaint: the file is missing, or is not Python.
    """
    tree = read(path)
    unwritten = [
        name
        for name, node in definitions(tree).items()
        if not isinstance(node, ast.ClassDef) and _says_todo(node)
    ]
    used = {
        name
        for node in ast.walk(tree)
        for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "arg", ""))
    }
    return unwritten + [name for name in exercise.needs if name not in used]


def _optional(node: Definition) -> bool:
    return node.name == "__init__" and not _arguments(node)[1:]  # one without arguments


def _compare_arguments(name: str, wanted: Definition, given: Definition, path: Path) -> None:
    expected, found = _arguments(wanted), _arguments(given)
    if expected != found:
        raise Complaint(
            f"{path.name}:{given.lineno}: {name}({', '.join(found)}) should have the arguments "
            f"({', '.join(expected)})"
        )


def _arguments(node: Definition) -> list[str]:
    """Names of the arguments, with a mark for each that has a default."""
    if isinstance(node, ast.ClassDef):
        return ["a class"]
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    names = [arg.arg + "=..." * (i >= first_default) for i, arg in enumerate(positional)]
    names += ["*" + args.vararg.arg] if args.vararg else ["*"] * bool(args.kwonlyargs)
    names += [
        arg.arg + "=..." * (default is not None)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return names + (["**" + args.kwarg.arg] if args.kwarg else [])


def _says_todo(node: Definition) -> bool:
    """Whether the first thing that a function does is to say that it is not written."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    first = body[0] if body else None
    return isinstance(first, ast.Raise) and "NotImplementedError" in ast.unparse(first)


def without_solutions(exercises: list[Exercise]) -> str:
    """The text of a reference file with the bodies of its exercises taken out. Docstrings,
    signatures, comments outside of them, and everything else stay."""
    lines = exercises[0].reference.splitlines()
    found = definitions(ast.parse(exercises[0].reference))
    hidden = {name for exercise in exercises for name in exercise.hides}
    edits = [(*_range(found[name]), list[str]()) for name in hidden]  # from, to, instead
    written = set()
    for exercise in exercises:
        for name, node in functions(exercise, found).items():
            if name in written:
                continue
            written.add(name)
            private = node.name.startswith("_") and node.name != "__init__"
            if private and name not in exercise.takes:
                edits.append((*_range(node), []))
                continue
            has_docstring = ast.get_docstring(node) is not None
            first = node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1
            indent = " " * (node.col_offset + 4)
            says = f"You need: {exercise.calls[name]}" if name in exercise.calls else ""
            folded = textwrap.wrap(says, 98 - len(indent))
            todo = f'{indent}raise NotImplementedError("{exercise.todo}")'
            instead = [*(f"{indent}# {line}" for line in folded), todo]
            edits.append((first or 0, node.end_lineno or 0, instead))
    for start, end, instead in sorted(edits, reverse=True):
        lines[start:end] = instead
    text = "\n".join(lines).rstrip() + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)  # where something was taken out


def _range(node: Definition) -> tuple[int, int]:
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    return start, node.end_lineno or start
