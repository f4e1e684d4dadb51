"""versions.py: which Pythons and torches `make versions` tests, and what it says of the others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import versions

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.direct


def test_each_python_and_each_torch_is_in_a_pair_and_the_newest_are_together():
    chosen = versions.pairs(versions.PYTHONS, versions.TORCHES)
    assert {python for python, _ in chosen} == {*versions.PYTHONS}
    assert {torch for _, torch in chosen} == {*versions.TORCHES}
    assert chosen[0] == (versions.PYTHONS[-1], versions.TORCHES[-1]) and len(chosen) == 5
    assert versions.pairs(["3.10"], ["2.11", "2.12"]) == [("3.10", "2.12"), ("3.10", "2.11")]
    assert versions.pairs([], ["2.11"]) == []


def test_the_range_is_the_one_that_users_are_told():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r":: Python :: (3\.\d+)", project) == versions.PYTHONS
    assert f'requires-python = ">={versions.PYTHONS[0]}"' in project
    assert f'"torch>={versions.TORCHES[0]}"]  # tested up to {versions.TORCHES[-1]}' in project
    span = (
        f"Python {versions.PYTHONS[0]} to {versions.PYTHONS[-1]} and torch {versions.TORCHES[0]} to"
    )
    assert f"{span} {versions.TORCHES[-1]}" in " ".join((ROOT / "README.md").read_text().split())


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Put a Python of this version on PATH, which may not run, or be of another version."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(versions, "FOLDER", tmp_path / "repository" / ".versions")
    (tmp_path / "repository").mkdir()

    def add(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return add


def test_only_interpreters_that_run_are_at_hand(on_path, tmp_path):
    on_path("python3.12", "echo 3.12")
    on_path("python3.13", "echo pyenv: python3.13: command not found >&2; exit 127")
    on_path("python3.14", "echo 3.11")
    assert versions.interpreter("3.12") == str(tmp_path / "python3.12")
    assert not any(map(versions.interpreter, ["3.10", "3.13", "3.14"]))


PYTHON = """
case "$*" in
  *venv*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python";;
  *torch==2.12*) echo "ERROR: No matching distribution found for torch==2.12.*" >&2; exit 1;;
  *pip*) ;;
  "-c "*) echo {version};;
  *pytest*broken*) echo "1 failed, 2 passed in 3s"; exit 1;;
  *pytest*empty*) echo "no tests ran in 0s"; exit 5;;
  *pytest*) echo "3 passed in 3s";;
esac
"""


def test_the_table_says_of_each_pair_what_came_of_it(on_path, capsys):
    for tool in ("mkdir", "cp"):
        on_path(tool, f'PATH=/usr/bin:/bin exec {tool} "$@"')
    on_path("python3.12", PYTHON.format(version="3.12"))
    on_path("python3.13", PYTHON.format(version="3.13"))
    assert versions.main([]) == 0
    table = capsys.readouterr().out.split("tests\n")[1].splitlines()
    assert [line.split(maxsplit=2) for line in table] == [
        ["3.13", "2.14", "3 passed in 3s"],
        ["3.12", "2.13", "3 passed in 3s"],
        ["3.13", "2.12", "not run: ERROR: No matching distribution found for torch==2.12.*"],
        ["3.13", "2.11", "3 passed in 3s"],
        *([python, "-", f"not run: no python{python} on PATH that runs"]
          for python in ("3.10", "3.11", "3.14")),
    ]  # fmt: skip
    assert (versions.FOLDER / "python3.13_torch2.14.log").read_text() == "3 passed in 3s\n"
    assert versions.main(["--python", "3.13", "--torch", "2.14", "broken"]) == 1
    assert "FAILED, 1 failed, 2 passed in 3s; see " in capsys.readouterr().out
    for nothing in (["--torch", "2.12"], ["--python", "3.10"], ["empty"]):
        assert versions.main(nothing) == 1, nothing
    assert versions.main(["--all"]) == 0
    assert len(capsys.readouterr().out.split("tests\n")[-1].splitlines()) == 20


def test_it_needs_no_torch():
    """It runs on the Python that `make` finds, before anything is installed."""
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); import versions"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print('torch' in sys.modules)"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "False\n", done.stderr
