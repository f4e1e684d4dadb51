"""sim/__main__.py: the command line, as a user types it."""

import json
import re
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch
from torch import nn

from minifsdp.sim.__main__ import main
from minifsdp.sim.streams import VirtualStream
from minifsdp.sim.training.models import Job
from tests.sim.test_virtual_cluster import Block

ROOT = Path(__file__).parents[2]

SMALL = ["--model", "tests.sim.test_main:small", "--nodes", "2", "--batch", "64"]


def small() -> Job:
    return Job(
        lambda: nn.Sequential(*(Block() for _ in range(4))),
        (Block,),
        lambda model, batch, length: model(torch.zeros(batch, 1024)).sum(),
    )


def test_whoever_reads_may_leave():
    """As `head` does. That is no mistake of the user's, and needs no word."""
    words, pipe = [sys.executable, "-m", "minifsdp.sim", "cluster"], subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 141


def test_a_run_says_whether_it_fits_how_fast_it_is_and_what_binds(capsys):
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    for line in ("  compute ", "  unshard ", "fits  ", "step  ", "peak reserved  ", "binds  "):
        assert line in out
    assert "MFU  " in out and "  parameters  " in out and "dollars" not in out
    assert main([*SMALL, "--price", "2"]) == 0
    assert "dollars per billion tokens  " in capsys.readouterr().out


def test_the_timeline_is_as_wide_as_the_terminal_and_a_file_has_always_the_same(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    main(SMALL)
    assert {len(line) for line in capsys.readouterr().out.splitlines()[:3]} == {110}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    main(SMALL)
    assert {len(line) for line in capsys.readouterr().out.splitlines()[:3]} == {80}


def test_a_table_of_two_sweeps_fits_into_80_columns(capsys):
    main([*SMALL, "--sweep", "limit=none,1", "--sweep", "strategy=full_shard"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_figures_only(capsys):
    assert main([*SMALL, "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert figures["fits"] and figures["peak reserved"] >= figures["peak allocated"] > 0


@pytest.mark.parametrize(
    "sweep", ["limit=none,1,2", "strategy=full_shard,no_shard", "precision=fp32,bf16", "nodes=1,4",
              "backward=none,pre,post", "forward=pre,post", "offload=no,yes", "gpu=a100-80,h100"],
)  # fmt: skip
def test_a_sweep_is_a_row_for_each_value(sweep, capsys):
    assert main([*SMALL, "--sweep", sweep]) == 0
    name, values = sweep.split("=")
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == name
    assert [row.split()[0] for row in rows] == values.split(",")


def test_races_are_printed_if_asked_for(capsys, monkeypatch):
    assert main([*SMALL, "--races", "--sweep", "limit=none,1"]) == 0
    assert capsys.readouterr().out.endswith("limit none: no races\nlimit 1: no races\n")
    monkeypatch.setattr(VirtualStream, "record_stream", lambda self, tensor: None)
    assert main([*SMALL, "--races"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert "is given out again while" in last
    assert main([*SMALL, "--races", "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert last in figures["races"]


def test_files_are_written(tmp_path, capsys):
    files = {kind: str(tmp_path / kind) for kind in ("svg", "html", "trace", "snapshot")}
    main([*SMALL, *(word for kind, path in files.items() for word in (f"--{kind}", path))])
    capsys.readouterr()
    assert {path.name for path in tmp_path.iterdir()} == set(files)


def test_what_does_not_fit_is_said_in_torchs_words(capsys):
    assert main(["--model", "gpt-13b", "--gpus", "1", "--json"]) == 1
    (figures,) = json.loads(capsys.readouterr().out)
    assert not figures["fits"] and figures["why"].startswith("CUDA out of memory. Tried to alloc")


def test_several_sweeps_are_a_row_for_each_combination(capsys):
    sweeps = ["--sweep", "limit=none,1", "--sweep", "no-sync=no,yes", "--accumulate", "2"]
    assert main([*SMALL, *sweeps]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:2] == ["limit", "no-sync"]
    assert [tuple(row[:2]) for row in rows] == [
        ("none", "no"), ("none", "yes"), ("1", "no"), ("1", "yes"),
    ]  # fmt: skip
    assert main([*SMALL, *sweeps, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["limit"], run["no-sync"]) for run in found] == [tuple(row[:2]) for row in rows]
    assert [run["settings"]["no_sync"] for run in found] == ["no", "yes"] * 2
    assert {run["settings"]["accumulate"] for run in found} == {2}
    assert found[0]["bytes sent"] > found[1]["bytes sent"]  # with no_sync it reduces once


CONFIG = {"list.json": "[1]", "bad.json": "{"}

REFUSED = [
    # Options and arguments that there are not.
    ("--bacth 4", "--bacth is not known here; did you mean --batch?"),
    ("--batc 4", "--batc is not known here; did you mean --batch?"),
    ("--bacth=4", "--bacth is not known here; did you mean --batch?"),
    ("--flavour red", "--flavour is not known here; --help shows what is"),
    ("plna", "plna is not known here; did you mean plan?"),
    ("--limit 2 plan", "plan is not known here; it comes first"),
    ("--json yes", "yes is not known here; --help shows what is"),
    ("--batch", "--batch: expected one argument"),
    # Words.
    ("--gpu a1000", "--gpu: expected one of a100-40, a100-64, a100-80, "),
    ("--gpu A100", "got 'A100'; did you mean a100-40?"),
    ("--strategy fullshard", "got 'fullshard'; did you mean full_shard?"),
    ("--strategy best", "hybrid_shard, hybrid_shard_zero2, got 'best'"),
    ("--precision fp16", "--precision: expected one of fp32, tf32, bf16, bf16-fp32, got 'fp16'"),
    ("--optimizer adamw8bit", "did you mean adamw-8bit?"),
    ("--recompute yes", "--recompute: expected none, full, selective, or a share of the blocks"),
    ("--recompute 3/2", "a share of the blocks, as 1/2, got '3/2'"),
    ("--limit some", "--limit: expected true, a whole number of at least 1, or none, got 'some'"),
    ("--input 3xax4", "--input: expected one sample's shape, as 3x224x224 or 588, got '3xax4'"),
    # Numbers.
    ("--limit 0", "got '0'"),
    ("--limit -1", "got '-1'"),
    ("--nodes two", "--nodes: expected a whole number from 1 to 16,384, got 'two'"),
    ("--nodes 0", "got '0'"),
    ("--nodes -1", "got '-1'"),
    ("--nodes inf", "got 'inf'"),
    ("--nodes 1.5", "got '1.5'"),
    ("--nodes 1" + 5000 * "0", "--nodes: expected a whole number from 1 to 16,384, got '1000"),
    ("--nodes 16384 --gpus 9", "--nodes 16384 with --gpus 9 each are more than 131,072 GPUs"),
    ("--batch 9999999", "--batch: expected a whole number from 1 to 1,000,000"),
    ("--network 0", "--network: expected a number from 0.001 to 1,000,000, got '0'"),
    ("--network nan", "got 'nan'"),
    ("--network inf", "got 'inf'"),
    ("--network fast", "got 'fast'"),
    ("--launch -1", "--launch: expected a number from 0 to 1,000,000, got '-1'"),
    ("--products 2", "--products: expected a number from 0.001 to 1, got '2'"),
    (
        "--memory 100",
        "--memory 100: a100-40 has 39.39 GiB; take no more than that, or another --gpu",
    ),
    # Sweeps: each value of each is looked at before anything runs.
    ("--sweep limit", "--sweep is NAME=A,B,... with the name of a setting, not 'limit'"),
    ("--sweep limit=", "--sweep is NAME=A,B,... with the name of a setting, not 'limit='"),
    ("--sweep limt=1,2", "--sweep: there is no setting 'limt'; did you mean limit?"),
    ("--sweep flavour=red", "--sweep: there is no setting 'flavour'; --help shows what is"),
    ("--sweep svg=a,b", "--sweep: there is no setting 'svg'"),
    ("--sweep nodes=1,two", "--nodes: expected a whole number from 1 to 16,384, got 'two'"),
    ("--sweep limit=1,,2", "--limit: expected true, a whole number of at least 1, or none, got ''"),
    ("--sweep nodes=-1", "got '-1'"),
    ("--sweep limit=1 --sweep limit=2", "--sweep limit is there twice; write all values behind"),
    ("--sweep memory=50,60 --sweep gpu=a100-40", "--memory 50: a100-40 has 39.39 GiB"),
    ("--sweep model=gpt-125m,gpt-1.2b", "'gpt-1.2b' is not known; did you mean gpt-1.3b?"),
    ("--sweep model=gpt-125m,tests.sim.test_main:broken", "fails in broken(): KeyError: 'width' ("),
    # Engines.
    ("--engine fsdp3", "--engine: expected one of minifsdp, fsdp1, fsdp2, got 'fsdp3'"),
    (
        "--engine fsdp1 --limit 3",
        "--engine fsdp1 has no --limit 3; give true or none, or --engine",
    ),
    ("--engine fsdp2 --backward post", "--engine fsdp2 has no --backward post; give pre, or"),
    ("--sweep engine=fsdp2 --forward pre", "--engine fsdp2 has no --forward pre; give none"),
    # What is known elsewhere, and other sizes, groups and kernels than there can be.
    ("--tp 8", "--tp: tensor parallelism cuts each matrix product over several GPUs; that is not"),
    ("--precision fp8", "--precision: fp8 computes products of numbers of 8 bits"),
    ("--gpu h100-80", "got 'h100-80'; did you mean h100?"),
    ("--model vit-h --vocab 5", "--vocab: vit-h has no such size; it has --width, --layers, --he"),
    ("--model mine:own --vocab 5", "--vocab is a size of a preset; the model 'mine:own' has its"),
    ("--shard-group 4", "--shard-group 4 is for hybrid strategies; give --strategy hybrid_shard"),
    (
        "--strategy hybrid_shard --shard-group 3 --nodes 2",
        "--shard-group 3: 16 GPUs cannot be shared out among groups of 3; take a divisor of 16",
    ),
    ("--fused yes", "--fused yes is for the Llamas of --model; 'gpt-125m' has no norm"),
    # Files.
    ("--svg nowhere/step.svg", "--svg: cannot write 'nowhere/step.svg': there is no directory"),
    ("--trace {tmp}", "it is a directory"),
    ("--snapshot=", "--snapshot: cannot write '.': it is a directory"),
    ("--trace /dev/full", "--trace: cannot write '/dev/full': no space left on device"),
    ("--trace /proc/step", "--trace: cannot write '/proc/step': no such file or directory"),
    ("--svg {tmp}/a --trace {tmp}/a", "--trace and --svg name the same file"),
    ("--config {tmp}/a", "--config is for a model of transformers, as --model hf:"),
    ("--model hf:Llama", "an hf: model needs --config FILE, its configuration as JSON"),
    ("--model hf:Llama --config {tmp}/no", "/no': No such file or directory"),
    ("--model hf:Llama --config {tmp}/list.json", "/list.json' has a list, not an object {...}"),
    ("--model hf:Llama --config {tmp}/bad.json", "/bad.json' is no JSON: Expecting property"),
    # Models.
    ("--model gpt-8b", "--model: 'gpt-8b' is not known; did you mean gpt-7b?"),
    ("--model mine", "--model: 'mine' is not known; --help shows what is (One of your own is modu"),
    (
        "--model gpt-125m --input 4",
        "--input is for a model of your own (module:callable); gpt-125",
    ),
    ("--model tests.sim.test_main:small --input 4", "is a Job, whose loss makes its own input"),
    ("--model vit-h --loss chunked", "model 'vit-h' has its own loss: --loss whole"),
]


@pytest.mark.parametrize(
    "words, last",
    [
        (
            "--sweep memory=30,60",
            "60    not possible: --memory 60: a100-40 has 39.39 GiB; take no more",
        ),
        (
            "--sweep precision=bf16,fp32 --attention flash",
            "fp32    not possible: --attention: none",
        ),
        (
            "--sweep engine=fsdp1,fsdp2 --forward pre",
            "fsdp2    not possible: --engine fsdp2 has no",
        ),
    ],
)
def test_a_combination_that_cannot_be_is_left_out_with_a_word(words, last, capsys):
    run = ["--model", "gpt-125m", "--layers", "2", "--batch", "1", "--seq", "128", *words.split()]
    assert main(run) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert "ms" in first and " ".join(last.split()) in " ".join(second.split())
    assert main([*run, "--json"]) == 0
    there, not_there = json.loads(capsys.readouterr().out)
    assert there["fits"] and there["step"] and not not_there["fits"] and not_there["impossible"]


def broken() -> Job:
    raise KeyError("width")


def never(*args, **kwargs):
    raise AssertionError("it has run")


@pytest.mark.parametrize("words, message", REFUSED)
def test_what_makes_no_sense_gets_one_line_before_anything_runs(
    words, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("minifsdp.sim.cli.run._train", never)
    for name, text in CONFIG.items():
        (tmp_path / name).write_text(text)
    assert main(words.replace("{tmp}", str(tmp_path)).split()) == 2
    out, err = capsys.readouterr()
    assert not out and message in err
    assert err.startswith("minifsdp: ") and err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == set(CONFIG)  # nothing is left behind


def test_a_file_that_is_there_stays_as_it_is_until_there_is_another(tmp_path, capsys):
    file = tmp_path / "step.svg"
    file.write_text("before")
    assert main([*SMALL, "--svg", str(file), "--limit", "some"]) == 2
    assert main([*SMALL, "--svg", str(file), "--sweep", "limit"]) == 2
    assert file.read_text() == "before"
    assert main([*SMALL, "--svg", str(file)]) == 0
    assert file.read_text().startswith("<svg")


def test_what_cannot_be_written_in_the_end_is_said(tmp_path, capsys, monkeypatch):
    def full(gpu, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minifsdp.sim.device.VirtualGpu.trace", full)
    file = str(tmp_path / "trace")
    assert main([*SMALL, "--trace", file]) == 2
    assert capsys.readouterr().err == (
        f"minifsdp: --trace: cannot write {file!r}: No space left on device\n"
    )


@pytest.mark.parametrize("limit", ["none", "2"])
def test_the_readmes_pictures_are_what_it_prints(limit, capsys):
    readme = (ROOT / "minifsdp" / "sim" / "README.md").read_text()
    command = f"--model gpt-125m --batch 16 --seq 512 --limit {limit}"
    (shown,) = re.findall(rf"```\n\$ minifsdp sim {command}\n(.*?)\n```", readme, re.DOTALL)
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    for row, line in zip(shown.splitlines(), printed.splitlines(), strict=False):
        # Another version of torch may launch a few other kernels.
        assert SequenceMatcher(None, row, line).ratio() > 0.9
