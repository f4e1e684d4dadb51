"""Pages as notebooks, run cell by cell. Needs `make test-site`, or `pip install -e ".[site]"`."""

import ast
import os
import re
import shutil
from pathlib import Path

import pytest

WHY = "notebooks: `make test-site` installs what makes and runs them"
for needed in ("nbformat", "nbclient", "ipykernel", "cloudpickle"):
    pytest.importorskip(needed, reason=WHY)

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from tutorials import notebooks
from tutorials.address import NOTEBOOKS, REPOSITORY

ROOT = Path(__file__).parents[2]
OFTEN = ("00_ddp", "06_one_file", "29_steps")  # the others only in `make test-all`
TIMEOUT = 1800  # seconds for a cell, on a machine however busy


@pytest.fixture
def cloned(tmp_path):
    """A folder in which the repository is, as the first cell of a notebook clones it. What a page
    writes beside itself goes there."""
    clone = tmp_path / "minifsdp"
    shutil.copytree(ROOT / "tutorials", clone / "tutorials")
    shutil.copy(ROOT / "pyproject.toml", clone)
    (clone / "minifsdp").symlink_to(ROOT / "minifsdp")
    return tmp_path


def run(notebook, folder):
    """What its cells print."""
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=TIMEOUT, resources=where)
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS],
)
def test_a_notebook_prints_what_its_page_says(name, cloned):
    printed = run(notebooks.notebook(name), cloned)
    page = (ROOT / "tutorials" / f"{name}.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    says = [text for language, text in blocks if not language]
    assert says
    for text in says:  # on a page, long lines are broken
        assert "".join(text.split()) in "".join(printed.split())


def test_ranks_run_what_the_reader_has_changed(cloned):
    notebook = notebooks.notebook("00_ddp")
    helpers = next(i for i, cell in enumerate(notebook.cells) if "Helpers" in cell.source)
    changed = "@on_ranks(2)\ndef ours_and_torchs() -> None:\n    print(f'changed: {CHANGED}')"
    cells = [f"CHANGED = 7\n{changed}", "ours_and_torchs()", "CHANGED = 8", "ours_and_torchs()"]
    notebook.cells[helpers + 1 :] = map(new_code_cell, cells)
    said = [line for line in run(notebook, cloned).splitlines() if "changed" in line]
    assert said == [f"rank {rank}: changed: {value}" for value in (7, 8) for rank in (0, 1)]


def test_the_first_cell_has_the_repositorys_address():
    for name in NOTEBOOKS:
        first = next(cell for cell in notebooks.notebook(name).cells if cell.cell_type == "code")
        assert f"git clone --quiet --depth 1 {REPOSITORY} minifsdp\n" in first.source
        assert f'"{name}.py"' in first.source


def test_a_statement_of_main_stands_where_all_that_it_needs_is_defined():
    cells = [
        "import torch\n\ndef first():\n    return later()",
        "def second(): ...",
        "def later(): ...",
        "def main():\n    second()\n    found = first()\n    second()\n    print(found)",
    ]
    calls = notebooks.placed(cells)
    assert calls == {1: ["second()"], 2: ["found = first()", "second()", "print(found)"]}
    assert notebooks.without_main(cells[3]) == ""
    for name in NOTEBOOKS:
        source = (ROOT / "tutorials" / f"{name}.py").read_text()
        (main,) = [it for it in ast.parse(source).body if getattr(it, "name", "") == "main"]
        code = [cell.source for cell in notebooks.notebook(name).cells]
        for statement in main.body:
            assert any(ast.get_source_segment(source, statement) in cell for cell in code)
