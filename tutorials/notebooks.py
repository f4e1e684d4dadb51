"""Some pages as notebooks: python tutorials/notebooks.py OUT, or: make notebooks

A page runs all of its experiments at its end, in ``main()``. A notebook runs each of them where it
is shown: a statement of ``main()`` stands below the cell that defines the last name it needs.
"""

import ast
import posixpath
import re
import sys
from collections import defaultdict
from pathlib import Path
from textwrap import dedent

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as for a page: launch.py, draw.py
import build
from address import NOTEBOOKS, REPOSITORY, SITE

BEGIN = """\
This is [a page of minifsdp]({site}tutorials/{stem}.html) as a notebook. It needs no GPU. The first
cell installs minifsdp from [its repository]({repository}), and fetches the functions that pages
share. A function that runs on several ranks is sent to processes of their own, as its cell has
defined it: change it, run its cell again, and then the cell that calls it."""

SET_UP = """\
# @title Set up
import os, sys
if not os.path.exists("launch.py"):
    if not os.path.isdir("minifsdp"):
        !git clone --quiet --depth 1 {repository} minifsdp
        %pip install --quiet ./minifsdp cloudpickle
    os.chdir("minifsdp/tutorials")
    sys.path.insert(0, os.getcwd())
__file__ = os.path.abspath("{stem}.py")  # beside it the page writes its pictures"""

PROGRAM = """\
**The program itself.** Change it, run this cell, and then an experiment below: ranks are new
processes, which read the file again."""

FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}}  # in Colab, and in Jupyter


def notebook(stem: str) -> nbformat.NotebookNode:
    """The notebook of a page."""
    about = {"stem": stem, "site": SITE, "repository": REPOSITORY}
    cells = [
        new_markdown_cell(BEGIN.format(**about)),
        new_code_cell(SET_UP.format(**about), metadata=FOLDED),
    ]
    parts = [*build.cells((HERE / f"{stem}.py").read_text())]
    code = ["" if kind == build.MARKDOWN else inside for kind, inside in parts]
    calls = placed(code)
    for number, (kind, inside) in enumerate(parts):
        if kind == build.MARKDOWN:
            cells.append(new_markdown_cell(with_addresses(build.prose(inside))))
        elif shown := without_main(inside):
            folded = kind == build.HIDDEN or "answers" in build.functions(inside)
            title = "# @title Helpers\n" if kind == build.HIDDEN else "# @title Answers\n"
            cells.append(
                new_code_cell(title + shown, metadata=FOLDED) if folded else new_code_cell(shown)
            )
        if calls[number]:
            cells.append(new_code_cell("\n".join(calls[number]) + ";"))  # without its result
    if stem == "06_one_file":
        program = "%%writefile fsdp_in_one_file.py\n" + (HERE / "fsdp_in_one_file.py").read_text()
        cells[3:3] = [new_markdown_cell(PROGRAM), new_code_cell(program)]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def placed(cells: list[str]) -> dict[int, list[str]]:
    """The statements of ``main()``, by the number of the cell below which they stand."""
    cell_of: dict[str, int] = {}
    needs: dict[str, set[str]] = defaultdict(set)  # a name: those in the code that defines it
    for number, cell in enumerate(cells):
        for node in ast.parse(cell).body:
            for name in _defined(node):
                cell_of[name] = number
                needs[name] |= _names(node)
    found, place, source = defaultdict(list), 0, cells[cell_of["main"]]
    (main,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "main"]
    for statement in main.body:
        known, new = set(), _names(statement)
        while new:
            known |= new
            new = {name for known_one in new for name in needs[known_one]} - known
        place = max(place, *(cell_of.get(name, 0) for name in known))
        found[place].append(dedent(ast.get_source_segment(source, statement, padded=True)))
    return found


def _names(node: ast.AST) -> set[str]:
    return {it.id for it in ast.walk(node) if isinstance(it, ast.Name)}


def _defined(node: ast.stmt) -> set[str]:
    """What a statement of a cell defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    imported = {it for it in ast.walk(node) if isinstance(it, ast.alias)}
    return {it.asname or it.name.split(".")[0] for it in imported} | _names(node)


def without_main(cell: str) -> str:
    lines = cell.splitlines()
    for node in reversed(ast.parse(cell).body):
        if getattr(node, "name", "") == "main" or isinstance(node, ast.If):
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip()


def with_addresses(text: str) -> str:
    """With links to the site: what a page links to is not beside a notebook."""

    def there(link: re.Match[str]) -> str:
        path, _, place = link[1].partition("#")
        path = posixpath.normpath(f"tutorials/{path}")
        if path.endswith(".md"):
            path = re.sub(r"README$", "index", path.removesuffix(".md"))
        path += "" if path.endswith((".svg", ".html")) else ".html"
        return f"]({SITE}{path}{place and '#' + place})"

    return re.sub(r"\]\((?!\w+:|#)(\S+?)\)", there, text)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for stem in NOTEBOOKS:
        nbformat.write(notebook(stem), out / f"{stem}.ipynb")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
