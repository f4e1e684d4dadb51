"""__main__.py: the command `minifsdp`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minifsdp
from minifsdp.__main__ import IN_A_CLONE, PACKAGED
from tests.patience import run_command

ROOT = Path(__file__).parent.parent
MODEL = """
import torch
class Block(torch.nn.Linear):
    pass
def make():
    return torch.nn.Sequential(Block(64, 64), Block(64, 64))
"""


def command(*words, cwd=None, package=ROOT, name="minifsdp", **environment):
    """As the script that pip installs: it has its own name, and its folder comes first in the path
    and not the current one."""
    script = f"import sys; sys.path[0] = '/nowhere'; sys.argv[0] = '/nowhere/{name}'; " \
             "from minifsdp.__main__ import main; sys.exit(main())"  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(package), **environment}
    environment.pop("MINIFSDP_TYPED", None)
    return run_command([sys.executable, "-c", script, *words], cwd=cwd, env=environment)


def test_help_has_a_line_for_each_command_and_torch_is_not_needed():
    for words in (["--help"], []):
        done = command(*words)
        assert done.returncode == (0 if words else 2) and done.stderr == ""
        assert done.stdout.startswith("usage: minifsdp ")
        for name in (*PACKAGED, *IN_A_CLONE):
            assert sum(line.startswith(f"  {name} ") for line in done.stdout.splitlines()) == 1
        assert max(map(len, done.stdout.splitlines())) <= 80
    program = "import sys, minifsdp.__main__; print('torch' in sys.modules)"
    assert run_command([sys.executable, "-c", program]).stdout == "False\n"
    program = (
        "import sys, minifsdp; print('argparse' in sys.modules, 'minifsdp.sim' in sys.modules)"
    )
    assert run_command([sys.executable, "-c", program]).stdout == "False False\n"


def test_the_version():
    assert command("--version").stdout == f"minifsdp {minifsdp.__version__}\n"


def test_what_was_meant_is_said():
    done = command("grad")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "minifsdp: there is no command 'grad'; did you mean grade?\n"
    assert command("train").stderr == "minifsdp: there is no command 'train'; --help lists them\n"
    assert command("sim", "--bach", "4").stderr.startswith(
        "minifsdp: --bach is not known here; did"
    )


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*PACKAGED, *IN_A_CLONE])
def test_usage_is_what_the_user_has_typed(name):
    assert command(name, "--help").stdout.startswith(f"usage: minifsdp {name} [-h]")


@pytest.mark.slow
def test_usage_is_what_the_user_has_typed_also_to_python():
    def usage(*words, **environment):
        done = run_command([sys.executable, *words, "--help"], env={**os.environ, **environment})
        return done.stdout.partition(" [")[0]

    assert usage("-m", "minifsdp", "plan") == "usage: python -m minifsdp plan"
    assert usage("-m", "minifsdp", "hint") == "usage: python -m minifsdp hint"
    assert usage("-m", "minifsdp.sim") == "usage: python -m minifsdp.sim"
    assert usage("-m", "minifsdp.sim", "plan") == "usage: python -m minifsdp.sim plan"
    assert usage("tutorials/train_gpt.py").endswith("train_gpt.py")
    hint = "-m", "tutorials.exercises.hint"  # which needs no torch
    assert usage(*hint, MINIFSDP_TYPED="make hint") == "usage: make hint"


def test_a_model_of_ones_own_is_found_in_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    run = ["--model", "mine:make", "--input", "64", "--steps", "1", "--json"]
    done = command("sim", *run, cwd=tmp_path)
    assert done.returncode == 0 and '"fits": true' in done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package alone, as a wheel has it."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "minifsdp", folder / "minifsdp", ignore=ignored)
    return folder


@pytest.mark.parametrize("name", IN_A_CLONE)
def test_where_there_is_no_clone_one_line_says_how_to_get_it(name, installed, tmp_path):
    done = command(name, cwd=tmp_path, package=installed)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name} needs a clone" in done.stderr and "git clone https://" in done.stderr
    assert done.stderr.count("\n") == 1


def test_in_a_clone_everything_is_the_clones(installed):
    with (installed / "minifsdp" / "sim" / "cli" / "terminal.py").open("a") as file:
        file.write("\nprint('installed')\n")
    done = command("hint", "limiter.1", cwd=ROOT, package=installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "installed\nlimiter.1, "
    )  # by the front door, and not by the hint


def test_a_current_folder_with_tests_of_its_own_is_not_in_the_way(tmp_path):
    for name in ("tests", "tutorials"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong one')")
    done = command("hint", "limiter.1", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("limiter.1, "), done.stderr


def test_it_is_installed_under_that_name(tmp_path):
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nminifsdp = "minifsdp.__main__:main"\n' in text
    done = subprocess.run([sys.executable, "-m", "minifsdp", "--version"], capture_output=True)
    assert done.stdout.decode() == f"minifsdp {minifsdp.__version__}\n"
