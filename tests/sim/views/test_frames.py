"""sim/views/frames.py: the lines of Python that ask for memory."""

import pickle
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from minifsdp.sim import cluster
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.training.llama import Llama
from minifsdp.sim.views.frames import frames
from tests.sim.cli.test_run import SMALL, options


def here() -> list[dict]:
    return frames()


def test_the_innermost_line_comes_first():
    first, second, *_ = here()
    assert (first["name"], second["name"]) == ("here", "test_the_innermost_line_comes_first")
    assert first["filename"] == second["filename"] == __file__
    lines = Path(__file__).read_text().splitlines()
    assert lines[second["line"] - 1].strip() == "first, second, *_ = here()"


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> list[dict]:
        with ExitStack() as stack:
            found: list[dict] = []
            stack.callback(lambda: found.extend(frames()))
        return found


def test_torchs_and_pythons_own_are_left_out():
    names = [frame["name"] for frame in Asks()(torch.ones(1))]
    this = "test_torchs_and_pythons_own_are_left_out"
    assert names[:3] == ["<lambda>", "forward", this]  # no __exit__, no _call_impl


def test_a_snapshot_names_the_models_lines_the_loops_and_the_engines(tmp_path):
    gpu = simulate(options(f"{SMALL} --snapshot there"))
    gpu.snapshot(tmp_path / "snapshot")
    snapshot = pickle.loads((tmp_path / "snapshot").read_bytes())
    stacks = [
        [(Path(frame["filename"]).name, frame["name"]) for frame in event["frames"]]
        for event in snapshot["device_traces"][0]
        if event["action"] == "alloc"
    ]
    assert all(stack[0][0] == "" and len(stack) > 1 for stack in stacks)  # what, and who
    who: dict[str, set[str]] = {}
    for (_, what), *others in stacks:
        who.setdefault(what, set()).update(file for file, _ in others)
    assert "test_main.py" in who["zeros"]  # the job's loss
    assert {"storage.py", "unshard.py", "run.py"} <= who["all-gather '3'"]
    assert not {"device.py", "storages.py", "module.py"} & set().union(*who.values())
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            assert bool(block["frames"]) == (block["state"] != "inactive")


def test_layers_of_every_family_of_models_are_shown(tmp_path):
    with cluster() as gpu:
        gpu.record_memory_history()
        model = Llama(16, layers=1, heads=2, keys=1, hidden=24, vocabulary=11)
        model(torch.zeros(1, 4, dtype=torch.long))
        gpu.snapshot(tmp_path / "snapshot")
    (trace,) = pickle.loads((tmp_path / "snapshot").read_bytes())["device_traces"]
    files = {Path(frame["filename"]).name for event in trace for frame in event["frames"]}
    assert {"llama.py", "models.py"} <= files


def test_nobody_looks_unless_asked(tmp_path):
    with cluster() as gpu:
        torch.ones(4)
        assert gpu.storages.frames is None
        gpu.record_memory_history()
        x = torch.ones(4)
        assert len(gpu.storages.frames) == 1
    gpu.snapshot(tmp_path / "snapshot")
    before, after = (
        event["frames"]
        for event in pickle.loads((tmp_path / "snapshot").read_bytes())["device_traces"][0]
        if event["action"] == "alloc"
    )
    assert len(before) == 1 and after[1]["name"] == "test_nobody_looks_unless_asked"
    del x
