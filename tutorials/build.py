"""Make the pages: run each tutorial, and put what it says beside what it prints.

    python tutorials/build.py              # all of them, or: make tutorials
    python tutorials/build.py 11_limiter   # this one

A tutorial is an ordinary program in percent format::

    # %% [markdown]
    # Text of the page. Code of the engine comes in by name, from where it is:
    # {{ minifsdp/limiter.py EventQueue.admit }}
    # {{ one_file 11_limiter }}       # which line of fsdp_in_one_file.py this page improves
    # %%
    def an_experiment() -> None:    # shown, with what it prints when main() calls it
        ...
    # %% [hidden]
    def main() -> None:             # not shown
        an_experiment()

A page cannot be stale: what it prints is what happens, and what it names has to be there.
"""

import ast
import contextlib
import functools
import importlib.util
import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as for a page that is run by itself: launch.py, draw.py
import one_file

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

MARKDOWN, HIDDEN = "[markdown]", "[hidden]"


def tutorials(names: list[str]) -> list[Path]:
    """Those of these names, or all."""
    found = sorted(HERE.glob("[0-9][0-9]_*.py"))
    known = {path.stem for path in found}
    if not known >= {*names}:
        sys.exit(f"no such tutorial: {', '.join({*names} - known)}")
    return [path for path in found if not names or path.stem in names]


def cells(source: str) -> Iterator[tuple[str, str]]:
    """The kind of each cell, "" for shown code, and what is in it."""
    for cell in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        kind, _, body = cell.partition("\n")
        yield kind.strip(), body.strip("\n")


def page(path: Path) -> str:
    """The text of a page. Runs the tutorial, which may write pictures beside itself."""
    source = path.read_text()
    printed = run(load(path))
    parts = [f"<!-- made by tutorials/build.py from {path.name} -->"]
    for kind, body in cells(source):
        if kind == MARKDOWN:
            parts.append(prose(body))
        elif kind != HIDDEN:
            parts.append(f"```python\n{body}\n```")
            for name in functions(body):
                if printed.get(name):
                    parts.append(f"```\n{narrow(printed[name].rstrip())}\n```")
    return "\n\n".join(parts + exercises(path.stem)) + "\n"


def exercises(stem: str) -> list[str]:
    """What the reader of a page can write now, if there is something."""
    every = tomllib.loads((HERE / "exercises" / "exercises.toml").read_text())["exercise"]
    here = [f"`{e['key']}` ({e['title']})" for e in every if e["page"] == stem]
    if not here:
        return []
    return [f"**[Now write it yourself](exercises/README.md)**: {', '.join(here)}."]


def prose(body: str) -> str:
    """Comments as text, with the engine's code where it is named."""
    text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
    lines = r"^\{\{ one_file (\S+) \}\}$"
    text = re.sub(lines, lambda m: one_file.insert(m[1]), text, flags=re.MULTILINE)
    return re.sub(r"^\{\{ (\S+) (\S+) \}\}$", lambda m: quote(m[1], m[2]), text, flags=re.MULTILINE)


def quote(file: str, name: str) -> str:
    """The source of a function, a class or a method, and where it is from.

    Raises:
        KeyError: the file has no such thing.
    """
    source = (HERE.parent / file).read_text()
    found: Any = ast.parse(source)
    for part in name.split("."):
        inside = {getattr(node, "name", None): node for node in found.body}
        if part not in inside:
            raise KeyError(f"{file} has no {name}")
        found = inside[part]
    lines = source.splitlines()[found.lineno - 1 : found.end_lineno]
    indent = len(lines[0]) - len(lines[0].lstrip())
    code = "\n".join(line[indent:] for line in lines)
    return f"```python\n{code}\n```\n<sub>`{name}` in [{file}](../{file})</sub>"


def narrow(text: str) -> str:
    """With long lines broken, so that nobody has to scroll."""
    return "\n".join(
        textwrap.fill(line, 112, subsequent_indent="    ") if len(line) > 112 else line
        for line in text.splitlines()
    )


def functions(code: str) -> list[str]:
    return [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType) -> dict[str, str]:
    """Call ``main()``. What each function printed that it called, by name."""
    printed: dict[str, str] = {}
    main = module.main

    def listening(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                result = function(*args, **kwargs)
            printed[name] = printed.get(name, "") + out.getvalue()
            return result

        return call

    for name, function in list(vars(module).items()):
        here = getattr(function, "__module__", None) == module.__name__
        if here and callable(function) and not isinstance(function, type) and function is not main:
            setattr(module, name, listening(name, function))
    main()
    return printed


if __name__ == "__main__":
    for tutorial in tutorials(sys.argv[1:]):
        print(tutorial.stem, flush=True)
        tutorial.with_suffix(".md").write_text(page(tutorial))
