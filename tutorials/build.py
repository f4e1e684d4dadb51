"""Make the pages: run each tutorial, and put what it says beside what it prints.

    python tutorials/build.py              # all of them and problems.md, or: make tutorials
    python tutorials/build.py 11_limiter   # this one
    python tutorials/build.py --frames     # only what stands around each page; runs nothing

A tutorial is an ordinary program in percent format::

    # %% [markdown]
    # Text of the page. Code of the engine comes in by name, from where it is:
    # {{ minifsdp/core/limiter.py EventQueue.admit }}
    # {{ one_file 11_limiter }}       # which line of fsdp_in_one_file.py this page improves
    # {{ steps }}                     # a table of the steps of the program that grows
    #
    # <details><summary>Answers</summary>
    #
    # Text that is there when the reader has opened it.
    # </details>
    # %%
    def an_experiment() -> None:    # shown, with what it prints when main() calls it
        ...
    # %% [hidden]
    def main() -> None:             # not shown
        an_experiment()

quotes.py gets the code that is named, frame.py what stands around the page: the way to the others,
minutes, exercises. A shown cell with a function ``answers`` is folded, as answers in the text are.
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
import grow
import one_file
from frame import body, framed, tutorials, with_minutes
from quotes import quoted

MARKDOWN, HIDDEN = "[markdown]", "[hidden]"
ANSWERS = "<details><summary>Answers</summary>"  # to be opened, after having predicted


def cells(source: str) -> Iterator[tuple[str, str]]:
    """The kind of each cell, "" for shown code, and what is in it."""
    for cell in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        kind, _, body = cell.partition("\n")
        yield kind.strip(), body.strip("\n")


def page(path: Path) -> str:
    """The text of a page. Runs the tutorial, which may write pictures beside itself."""
    source = path.read_text()
    printed = run(load(path))
    parts = []
    for kind, inside in cells(source):
        if kind == MARKDOWN:
            parts.append(prose(inside))
        elif kind != HIDDEN:
            shown = [f"```python\n{inside}\n```"]
            for name in functions(inside):
                if printed.get(name):
                    shown.append(f"```\n{narrow(printed[name].rstrip())}\n```")
            folded = "answers" in functions(inside)
            parts += [ANSWERS, *shown, "</details>"] if folded else shown
    return framed(path, "\n\n".join(parts))


def prose(body: str) -> str:
    """Comments as text, with the engine's code where it is named."""
    text = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
    lines = r"^\{\{ one_file (\S+) \}\}$"
    text = re.sub(lines, lambda m: one_file.insert(m[1]), text, flags=re.MULTILINE)
    return quoted(text.replace("{{ steps }}", grow.table()))


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


def main(words: list[str]) -> None:
    only_frames = words[:1] == ["--frames"]
    for tutorial in tutorials(words[only_frames:]):
        print(tutorial.stem, flush=True)
        whole = framed(tutorial, body(tutorial)) if only_frames else page(tutorial)
        tutorial.with_suffix(".md").write_text(whole)
    if not words:
        import problems  # which takes torch and the virtual GPU

        problems.main()
    path = HERE / "README.md"
    path.write_text(with_minutes(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
