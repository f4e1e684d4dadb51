"""tutorials/train_gpt.py: the demonstration, used as a user would."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import communicate, run_command
from tutorials import train_gpt

SCRIPT = Path(train_gpt.__file__)
TINY = ["--steps", "2", "--layers", "2", "--width", "32", "--device", "cpu"]


def demo(*arguments, **settings):
    return run_command([sys.executable, SCRIPT, *arguments], **settings)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [
    [],
    slow(["--strategy", "shard_grad_op", "--prefetch", "post", "--limit", "none"]),
    slow(["--strategy", "no_shard", "--prefetch", "none", "--limit", "1"]),
    slow(["--core"]),
    slow(["--program", "tutorials/fsdp_in_one_file.py"]),
])  # fmt: skip
def test_it_trains_compares_and_writes(arguments, tmp_path):
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 50)
    result = demo(*TINY, "--text", str(text), *arguments)
    assert result.returncode == 0, result.stderr
    equal = "shards      3 of 3" if "--core" in arguments else "parameters  29 of 29"
    for part in ("in 3 units over 2 ranks", "fsdp  step    2", " ddp  step    2", "tokens/s",
                 "held sharded", "losses      4 of 4 bit-equal   largest difference 0\n",
                 f"{equal} bit-equal   largest difference 0\n",
                 "Written by the sharded model"):  # fmt: skip
        assert part in result.stdout, result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("arguments, complaint", [
    (["--steps", "0"], "--steps 0: has to be at least 1"),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (["--strategy", "half"], "--strategy half: choose from full_shard, shard_grad_op, no_shard"),
    (["--prefetch", "soon"], "--prefetch soon: choose from pre, post, none"),
    (["--limit", "0"], "--limit 0: has to be true, a number from 1, or none"),
    (["--ranks", "0"], "--ranks 0: has to be at least 1"),
    (["--device", "tpu"], "--device tpu: choose from cpu, cuda"),
    (["--layers", "0"], "--layers 0: has to be at least 1"),
    (["--width", "100"], "--width 100: has to be a multiple of 32"),
    (["--program", "/nowhere"], "--program /nowhere: there is no such file"),
    (["--text", "/nowhere"], "--text /nowhere: No such file or directory"),
    (["--text", os.devnull], f"--text {os.devnull}: 0 bytes are too few"),
    (["--checkpoint", os.devnull], f"--checkpoint {os.devnull}: it is a file"),
    (["--checkpoint", "/proc/folder"], "--checkpoint /proc/folder: no such file or directory"),
    (["--checkpoint", "new", "--width", "3200000"], "--checkpoint new: "),
    (["--core", "--precision", "bf16"], "--core: the core has no --offload, --precision"),
    (["--colour", "red"], "unrecognized arguments: --colour red"),
])  # fmt: skip
def test_a_bad_value_is_refused_in_one_clear_line(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as end:
        train_gpt.parse(arguments)
    assert complaint in end.value.code and "\n" not in end.value.code
    assert capsys.readouterr() == ("", "")


def test_the_line_is_all_that_is_printed():
    result = demo("--steps", "0")
    assert result.returncode != 0 and result.stdout == ""
    assert "--steps 0: has to be at least 1" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in Linux's /proc")
def test_interrupting_it_ends_all_ranks(tmp_path):
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 50)
    process = subprocess.Popen(
        [sys.executable, "-u", SCRIPT, "--steps", "100000", *TINY[2:], "--text", str(text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for line in process.stdout:
            if "step   50" in line:
                break
        assert len(running(text)) == 3  # the launcher and two ranks
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does in a terminal
        _, errors = communicate(process, 60)
        assert errors.strip() == "stopped; all ranks have ended", errors
        assert process.returncode == 130
        assert not running(text)
    finally:
        for pid in running(text):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds ranks in Linux's /proc")
def test_torchrun_starts_it_again_and_it_goes_on_from_its_checkpoint(tmp_path):
    pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 50)
    torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", "2", "--max-restarts", "2"]  # fmt: skip
    arguments = ["--steps", "200", *TINY[2:], "--text", text]
    saves = ["--checkpoint", tmp_path / "checkpoints", "--every", "20"]
    process = subprocess.Popen(
        [*map(str, [*torchrun, SCRIPT, *arguments, *saves])],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said = ""
        for line in process.stdout:
            said += line
            if "step   50" in line:
                rank = next(pid for pid in running(text) if pid != process.pid)
                os.kill(rank, signal.SIGKILL)
                break
        said += communicate(process, 120)[0]
        assert process.returncode == 0 and said.count("goes on after step") == 1, said
        assert "losses      400 of 400 bit-equal" in said, said
    finally:
        for pid in running(text):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_other_ranks_go_on_from_a_checkpoint(tmp_path):
    pytest.importorskip("numpy", reason="torch.distributed.checkpoint of several ranks needs it")
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 50)
    settings = [*TINY, "--text", text, "--checkpoint", tmp_path / "checkpoints", "--every", "1"]
    assert "there is no checkpoint yet" in demo(*settings).stdout
    (tmp_path / "checkpoints" / "step-000002").rename(tmp_path / "gone")
    result = demo(*settings, "--ranks", "3")
    assert result.returncode == 0, result.stderr
    assert "goes on after step 1\n" in result.stdout
    assert "2 ranks have made these steps; from here on, other data" in result.stdout


def running(text):
    """Processes that have this text among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(text).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


WRONG = """
import sys
sys.path.insert(0, {root!r})
from minifsdp.core import reduce
reduce.ReduceScatter.launch = lambda self, unit, value: unit.comm.reduce_scatter(unit, value, 1.0)
import runpy
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_it_fails_if_a_bit_differs_and_says_from_which_step_on(tmp_path):
    """For Adam a gradient that is twice too large is the same but for rounding: nobody would see it
    in the loss as it is printed. Eight steps: on some CPUs the second loss has the same bits."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG.format(root=str(SCRIPT.parents[1]), script=str(SCRIPT)))
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run_command([sys.executable, *ranks, wrong, *TINY, "--steps", "8"])
    assert result.returncode != 0
    first = re.search(r"the first loss that differs is that of step (\d)\)", result.stdout)
    assert first and 2 <= int(first[1]) <= 8, result.stdout
