"""README.md and the pages it leads to (tutorials/reference/): what they show works, and what they
count is so."""

import ast
import re
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

import pytest
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.between_steps.explain import table
from tests.core.test_fully_sharded import code_lines
from tests.patience import run_command
from tests.ranks import device, on_ranks
from tests.torchrun import torchrun
from tutorials import front

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minifsdp"
FOLDERS = ("comm", "support", "chunks", "wrapping", "between_steps", "checks")
REFERENCE = ROOT / "tutorials" / "reference"
README = (ROOT / "README.md").read_text()
SIM_README = (PACKAGE / "sim" / "README.md").read_text()
ENGINE = (REFERENCE / "engine.md").read_text()


def test_the_readme_is_read_to_its_end():
    assert len(README.encode()) <= 10_240


def by_torchrun(script):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return run_command([*launch, "2", script])


@pytest.mark.parametrize(
    "page, longest, launched",
    [
        ("README.md", 16, by_torchrun),
        ("tutorials/reference/using.md", 23, lambda script: torchrun(script, 2)),
    ],
    ids=["README.md", "using.md"],
)
def test_an_example_runs(page, longest, launched, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert len(code.splitlines()) <= longest
    script = tmp_path / "example.py"
    script.write_text(code)
    result = launched(script)
    assert result.returncode == 0, result.stderr
    losses = dict(re.findall(r"rank (\d): loss (\d\.\d+)", result.stdout))
    assert losses.keys() == {"0", "1"} and losses["0"] != losses["1"]


@on_ranks(2)
def test_the_table_of_units_is_that_of_the_examples_model():
    layers = [nn.TransformerEncoderLayer(64, 4, 128) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1)).to(device())
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}))
    assert f"```\n{table(model)}\n```" in (REFERENCE / "using.md").read_text()


ROW = r"^\| \[`(.+?)`\]\((.+?)\)"


def test_the_map_is_complete_and_counts_right():
    """A row for each file of the core, for each concept beside it, and for each package."""
    lines = {}
    for page, place in ((README, "minifsdp/core"), (ENGINE, "../../minifsdp")):
        for name, link, count in re.findall(ROW + r" \| ([\d,]+) \|", page, re.M):
            assert link == f"{place}/{name}".rstrip("/")
            lines[name if page is ENGINE else f"core/{name}"] = number(count)
    core = {f"core/{path.name}": code_lines(path) for path in (PACKAGE / "core").glob("[!_]*.py")}
    expected = {
        **core,
        **{path.name: code_lines(path) for path in PACKAGE.glob("[!_]*.py")},
        **{
            f"{folder}/": sum(code_lines(path) for path in (PACKAGE / folder).glob("*.py"))
            for folder in FOLDERS
        },
    }
    assert lines == expected
    exports = code_lines(PACKAGE / "core" / "__init__.py")
    (of_core,) = re.findall(r"^\| the core \| ([\d,]+) \|", README, re.M)
    assert number(of_core) == sum(core.values()) + exports
    (total,) = re.findall(r"^\| all, with the core \| ([\d,]+) \|", ENGINE, re.M)
    assert number(total) == sum(lines.values()) + exports


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_concepts_come_before_those_that_need_them():
    links = [link for page in (README, ENGINE) for _, link in re.findall(ROW, page, re.M)]
    order = [re.sub(r".*minifsdp/|\.py$", "", link) for link in links if link.endswith(".py")]
    for place, name in enumerate(order):
        needed = {n for n in imports(PACKAGE / f"{name}.py") if n.replace(".", "/") in order}
        assert {n.replace(".", "/") for n in needed} <= set(order[:place]), name


def test_the_core_says_the_same_order():
    docstring = ast.get_docstring(ast.parse((PACKAGE / "core" / "__init__.py").read_text()))
    order = re.findall(r"\w+\.py", docstring.partition("In the order")[2].rpartition("What the")[0])
    assert order == re.findall(r"^\| \[`(\w+\.py)`\]", README, re.M)


def test_no_file_needs_one_that_needs_it():
    """In circles of imports there is no file to start reading with."""
    needed = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): imports(path)
        for path in PACKAGE.rglob("[!_]*.py")
    }
    read: set[str] = set()
    while len(read) < len(needed):
        readable = {name for name in needed.keys() - read if needed[name] & needed.keys() <= read}
        assert readable, f"in circles, or behind one: {sorted(needed.keys() - read)}"
        read |= readable


def test_what_serves_the_concepts_does_not_need_what_is_built_on_them():
    for folder in ("comm", "support"):
        for path in (PACKAGE / folder).glob("*.py"):
            for name in imports(path):
                assert name.split(".")[0] not in ("checks", "wrapping", "between_steps"), path


def test_the_docstring_of_a_package_names_its_files():
    packages = [folder.parent for folder in PACKAGE.glob("*/**/__init__.py")]
    packages.remove(PACKAGE / "sim")  # its README has them
    for folder in packages:
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        for path in folder.glob("[!_]*.py"):
            assert path.name in docstring, path


def test_the_simulators_readme_names_its_files_and_packages():
    named = re.findall(r"^\| \[`.*", Path(PACKAGE, "sim", "README.md").read_text(), re.M)
    for path in PACKAGE.glob("sim/*"):
        if path.suffix == ".py" and path.stem != "__init__":
            assert any(f"]({path.name})" in row for row in named), path
        if (path / "__init__.py").exists():
            assert any(f"]({path.name}/__init__.py)" in row for row in named), path


def imports(path: Path) -> set[str]:
    """Modules of minifsdp that a file imports, by their names below it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:  # in the core
            found.add(f"core.{node.module}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minifsdp."):
            below = node.module.removeprefix("minifsdp.")
            found |= {below} | {f"{below}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("minifsdp.") for alias in node.names}
    return found


def test_no_concept_file_is_too_long_to_read():
    for path in (ROOT / "minifsdp").rglob("*.py"):
        assert code_lines(path) <= 250, path.name


def test_on_pypi_no_link_is_relative():
    """pyproject.toml says how links are made absolute there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = README
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert text.count("](https://raw.githubusercontent.com/") == README.count("![") > 0
    assert not re.findall(r"\]\((?!https:)", text)


def test_each_page_of_the_reference_is_linked():
    for page in REFERENCE.glob("*.md"):
        assert f"](tutorials/reference/{page.name})" in README, page.name


def test_the_readmes_evidence_is_what_was_found():
    (row,) = re.findall(
        r"^\| held out \| all \|.*\| (\d+ of \d+) \| \d+ of \d+ \|$", SIM_README, re.M
    )
    within, of = row.split(" of ")
    assert f"of {of} published runs that it was not fitted to, {within} are predicted" in README
    speed = (REFERENCE / "speed.md").read_text()
    for ratio in re.findall(r"takes (0\.\d+) of FSDP1's time and (0\.\d+) of FSDP2's", README)[0]:
        assert re.search(rf"^\| (step to FSDP1's|rows to FSDP2) \| {ratio} \|", speed, re.M)
    assert re.findall(r"(\d,\d+) combinations", README)[0] in (REFERENCE / "testing.md").read_text()


@pytest.mark.slow
def test_the_first_screens_pictures_are_what_the_program_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(front, "FOLDER", tmp_path)
    front.main()
    for name in ("front_memory.svg", "front_step.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "tutorials" / name).read_text()
