"""sim/__main__.py: the command line, as a user types it."""

import json
import re
from difflib import SequenceMatcher
from pathlib import Path

import pytest
import torch
from torch import nn

from minifsdp.sim.__main__ import main
from minifsdp.sim.models import Job
from minifsdp.sim.streams import VirtualStream
from tests.sim.test_cluster import Block

SMALL = ["--model", "tests.sim.test_main:small", "--nodes", "2", "--batch", "64"]


def small() -> Job:
    return Job(
        lambda: nn.Sequential(*(Block() for _ in range(4))),
        (Block,),
        lambda model, batch, length: model(torch.zeros(batch, 1024)).sum(),
    )


def test_a_run_says_whether_it_fits_how_fast_it_is_and_what_binds(capsys):
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    for line in ("  compute ", "  unshard ", "fits  ", "step  ", "peak reserved  ", "binds  "):
        assert line in out
    assert "MFU  " in out and "  parameters  " in out and "dollars" not in out
    assert main([*SMALL, "--price", "2"]) == 0
    assert "dollars per billion tokens  " in capsys.readouterr().out


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "gpt-8b"], "model 'gpt-8b' is not known"),
        (["--gpu", "a1000"], "gpu='a1000' is not known"),
        (["--limit", "some"], "--limit is a whole number or none, not 'some'"),
        (["--limit", "-1"], "limit_all_gathers=-1"),
        (["--nodes", "0"], "--nodes is at least 1, not 0"),
        (["--nodes", "two"], "argument --nodes: invalid int value: 'two'"),
        (["--network", "0"], "--network is more than 0 Gbit/s, not 0"),
        (["--sweep", "nodes=1,two"], "argument --nodes: invalid int value: 'two'"),
        (["--sweep", "limit"], "--sweep is NAME=A,B,... with the name of an option, not 'limit'"),
        (["--sweep", "colour=red,blue"], "--sweep is NAME=A,B,..."),
    ],
)
def test_what_makes_no_sense_gets_one_line(arguments, message, capsys):
    assert main([*SMALL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


@pytest.mark.parametrize("limit", ["none", "2"])
def test_the_readmes_pictures_are_what_it_prints(limit, capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command = f"--model gpt-125m --batch 16 --seq 512 --limit {limit}"
    (shown,) = re.findall(
        rf"```\n\$ python -m minifsdp.sim {command}\n(.*?)\n```", readme, re.DOTALL
    )
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    for row, line in zip(shown.splitlines(), printed.splitlines(), strict=False):
        # Another version of torch may launch a few other kernels.
        assert SequenceMatcher(None, row, line).ratio() > 0.9
