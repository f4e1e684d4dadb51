"""tests/install.py: what `make` says while it installs."""

import sys
from types import SimpleNamespace

import pytest

from tests import install
from tests.patience import run_command

OFFLINE = """\
WARNING: Retrying (Retry(total=1, ...)) after broken by 'NewConnectionError(...)': /simple/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0
"""
TOO_NEW = "\n".join(OFFLINE.splitlines()[1:]).replace("none", "2.9.0")


def test_it_says_which_torch_comes_and_how_large_it_is():
    usual = install.about_torch("Linux", {})
    assert "2.7 GB to download, 5.4 GB on disk" in usual
    assert f"PIP_EXTRA_INDEX_URL={install.FOR_CPUS}" in usual
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        assert "200 MB to download" in install.about_torch("Linux", {name: install.FOR_CPUS})
    assert "GB" not in install.about_torch("Darwin", {})


def test_what_went_wrong_is_one_line():
    assert "is there a network?" in install.in_one_line(OFFLINE)
    assert install.in_one_line(TOO_NEW) == (
        "pip could not install it: Could not find a version that satisfies the requirement "
        "torch==2.13.0 (from versions: 2.9.0)."
    )
    for errors in (OFFLINE, TOO_NEW, "killed"):
        assert "\n" not in install.in_one_line(errors)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Calls of pip, which does nothing."""
    calls = []

    def run(words, **settings):
        calls.append(" ".join(words).partition(" install ")[2])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "begin", lambda: None)
    monkeypatch.setattr(install, "INSTALLED", tmp_path / "installed")
    return calls


def test_torch_comes_by_itself_so_that_its_progress_is_seen(pip, monkeypatch, capsys):
    monkeypatch.setattr(install, "has_torch", lambda: False)
    install.main()
    torch, rest = pip
    assert torch.endswith(install.pinned()) and "--quiet" not in torch
    assert "--quiet" in rest and "constraints.txt" in rest and ".[test,lint]" in rest
    assert "source .venv/bin/activate" in capsys.readouterr().out


def test_where_it_is_there_already_nothing_is_said_of_it(pip, monkeypatch, capsys):
    monkeypatch.setattr(install, "version", lambda name: install.pinned()[7:] + "+cpu")
    install.INSTALLED.touch()
    install.main()
    assert len(pip) == 1 and "GB" not in (out := capsys.readouterr().out) and "activate" not in out
    monkeypatch.setattr(install, "version", lambda name: "2.0.0")
    assert not install.has_torch()


def test_it_runs_where_nothing_is_installed_yet():
    """-S: without site-packages. Nothing is installed here either: pip is not called."""
    program = (
        "import runpy, subprocess, sys\n"
        "subprocess.run = lambda words, **how: print('pip', words[-1]) or done\n"
        "class done: returncode = 1; stderr = 'no'\n"
        "import pathlib; pathlib.Path.write_text = lambda *_: None\n"
        f"runpy.run_path({install.__file__!r}, run_name='__main__')"
    )
    done = run_command([sys.executable, "-S", "-E", "-c", program], cwd="/")
    assert "Into .venv goes" in done.stdout and "\npip torch==" in done.stdout, done.stderr
    assert done.stderr.startswith("pip could not install it: no.") and done.stderr.count("\n") == 1
