"""replace.py: the suite runs with another implementation of a concept, and notices a wrong one."""

import os
import sys

import pytest

from tests.matrix import CELLS, check_all
from tests.mutants import its_tests
from tests.patience import run_command
from tests.ranks import run
from tests.replace import VARIABLE, install, replacements
from tutorials.exercises.catalog import ROOT

SECOND = ("shard", "reshard", "limiter", "prefetch")
SOME_CELLS = [cell for cell in CELLS if cell.model == "mlp_nested" and cell.world_size == 2][::7]


def pytest_with(replaced: str, *arguments: str):
    environment = {**os.environ, VARIABLE: replaced, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return run_command(command, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_second_implementations_of_four_concepts_pass():
    """The tests of each concept, and below some cells of the matrix: all four replaced at once."""
    files = ",".join(f"core/{name}=tests/second/{name}.py" for name in SECOND)
    tests = [test for name in SECOND for test in its_tests(f"core/{name}")]
    result = pytest_with(
        files, *tests, f"{__file__}::test_some_cells_of_the_matrix_with_the_files_that_there_are"
    )
    assert result.returncode == 0, result.stdout
    for name in SECOND:
        assert f"core/{name} was {ROOT}/tests/second/{name}.py" in result.stdout


@pytest.mark.slow
def test_some_cells_of_the_matrix_with_the_files_that_there_are():
    run(check_all, 2, SOME_CELLS)
    run(check_replaced, 2, replacements())


def check_replaced(expected):
    """On a rank: the replacements have reached it."""
    assert replacements() == expected
    for name, file in expected.items():
        assert sys.modules["minifsdp." + name.replace("/", ".")].__file__ == str(file)


def test_a_wrong_implementation_fails_the_direct_tests_of_its_own_concept(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def shard(flat, rank, world_size):\n    raise NotImplementedError\n")
    result = pytest_with(f"core/shard={wrong}", "-m", "direct", "tests/core/test_shard.py")
    assert result.returncode == 1, result.stdout
    assert "FAILED tests/core/test_shard.py" in result.stdout
    assert "NotImplementedError" in result.stdout


def test_what_is_no_file_is_refused(monkeypatch, tmp_path):
    for wrong in ("limiter=nowhere.py", f"no_such_file={__file__}", "limiter"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=VARIABLE):
            replacements()


def test_what_comes_too_late_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, f"core/limiter={__file__}")
    with pytest.raises(RuntimeError, match=r"minifsdp.core.limiter has been imported already"):
        install()
