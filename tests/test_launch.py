"""tutorials/launch.py: ranks for pages, started by it or by torchrun."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.patience import run_command
from tests.torchrun import torchrun
from tutorials import build

PAGE = """\
import os
import signal
import sys

import torch.distributed as dist
from launch import on_ranks


@on_ranks(2)
def talk(word):
    print(word, "from", dist.get_rank())
    print("second line")
    return dist.get_world_size(), dist.get_rank()


@on_ranks(2)
def fail():
    if dist.get_rank() == 1:
        raise KeyError("boom")
    dist.barrier()  # for ever, without the other


@on_ranks(2)
def leave():
    if dist.get_rank() == 1:
        sys.exit(3)


@on_ranks(2)
def die():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def main():
    print(talk("hello"))
    print(talk("again"))


if __name__ == "__main__":
    main()
"""
SAID = """\
rank 0: hello from 0
rank 0: second line
rank 1: hello from 1
rank 1: second line
[(2, 0), (2, 1)]
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page_with_ranks.py"
    path.write_text(textwrap.dedent(PAGE))
    return path


def run(*command) -> subprocess.CompletedProcess:
    beside = {**os.environ, "PYTHONPATH": str(build.HERE)}
    return run_command([sys.executable, *command], env=beside)


@pytest.mark.slow
def test_what_ranks_say_comes_in_their_order_and_so_do_their_results(page):
    result = run(page)
    assert result.stdout == SAID + SAID.replace("hello", "again"), result.stderr


def test_under_torchrun_too_and_those_that_are_too_many_look_on(page):
    result = torchrun(page, 3, path=build.HERE)
    assert result.returncode == 0, result.stderr
    assert result.stdout == SAID + SAID.replace("hello", "again")
    result = torchrun(page, 1, path=build.HERE)
    assert result.returncode and "this page needs 2 ranks" in result.stderr


def test_it_works_where_the_builder_has_loaded_the_page(page, capsys):
    build.load(page).main()
    assert capsys.readouterr().out.startswith(SAID)


IMPORTS = """\
import sys

from launch import on_ranks


@on_ranks(1)
def late():
    before = {*sys.modules}
    from minifsdp import FullyShardedDataParallel
    return {*sys.modules} - before


if __name__ == "__main__":
    print(*late()[0])
"""


@pytest.mark.slow
def test_ranks_need_not_import_torch_and_minifsdp_each(tmp_path):
    """It takes each of them longer than all that most pages do."""
    (tmp_path / "imports.py").write_text(IMPORTS)
    late = run(tmp_path / "imports.py").stdout.split()
    assert "minifsdp.between_steps.explain" in late  # few come late, such as this one
    assert len(late) < 20 and not [name for name in late if name.startswith("torch.")]


def test_a_rank_that_fails_is_told_and_the_others_are_not_waited_for(page):
    module = build.load(page)
    with pytest.raises(RuntimeError) as failed:
        module.fail()
    assert "rank 1: Traceback" in str(failed.value) and "boom" in str(failed.value)
    with pytest.raises(RuntimeError, match="rank 1:"):
        module.leave()
    with pytest.raises(RuntimeError, match=r"rank 1: it died \(exit code -11\)"):
        module.die()
