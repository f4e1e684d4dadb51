"""sim/memory/snapshots.py: what was in memory at the peak, from a file."""

import os
import pickle

import pytest
import torch

from minifsdp.sim import cluster
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.memory.snapshots import GATHERED, NOT_RECORDED, WRAPPING, Peak, peak, read
from minifsdp.sim.views.trace import memory_snapshot
from tests.sim.cli.test_run import SMALL, options

MiB = 2**20


def frames(*lines):
    return [{"filename": file, "name": name, "line": 1} for file, name in lines]


def event(action, address, size, *lines):
    return {"action": action, "addr": address, "size": size, "frames": frames(*lines)}


def segment(address, *blocks, device=0):
    made = [
        {"size": size, "requested_size": size, "state": state, "frames": frames(*lines)}
        for size, state, *lines in blocks
    ]
    total = sum(block["size"] for block in made)
    return {"device": device, "address": address, "total_size": total, "blocks": made}


FORWARD, STEP = ("/home/me/model.py", "forward"), ("/site-packages/torch/optim/adam.py", "step")


def test_the_past_is_played_back_to_the_moment_with_most_memory():
    """A was there before the recording and is freed; B and C come, B goes, D stays."""
    snapshot = {
        "segments": [segment(0, (MiB, "inactive"), (2 * MiB, "active_allocated", FORWARD))],
        "device_traces": [
            [
                event("segment_alloc", 9 * MiB, 8 * MiB),
                event("alloc", 9 * MiB, 5 * MiB, STEP),
                event("free_requested", 50 * MiB, 4 * MiB),  # A
                event("free_completed", 50 * MiB, 4 * MiB),
                event("alloc", MiB, 2 * MiB, FORWARD),
                event("free_requested", 9 * MiB, 5 * MiB),
                event("segment_free", 9 * MiB, 8 * MiB),
            ]
        ],
    }
    # A and the optimizer's; 3 MiB are reserved in the end, and the segment was there then.
    asked = {NOT_RECORDED: 4 * MiB, "optimizer": 5 * MiB}
    assert peak(snapshot) == Peak(11 * MiB, 9 * MiB, asked)


def test_without_a_history_it_is_the_end():
    blocks = (MiB, "active_allocated"), (MiB, "active_pending_free"), (2 * MiB, "inactive")
    snapshot = {"segments": [segment(0, *blocks)], "device_traces": []}
    for block in snapshot["segments"][0]["blocks"]:
        del block["frames"]
    assert peak(snapshot) == Peak(4 * MiB, MiB, {NOT_RECORDED: MiB})


def test_it_is_of_the_device_that_is_used_most():
    segments = [segment(0, (MiB, "active_allocated", STEP)),
                segment(MiB, (2 * MiB, "active_allocated", FORWARD), device=1)]  # fmt: skip
    found = peak({"segments": segments, "device_traces": [[], []]})
    assert found == Peak(2 * MiB, 2 * MiB, {"forward": 2 * MiB})


def test_sizes_are_those_of_the_allocator():
    snapshot = {
        "segments": [segment(0, (MiB, "inactive"))],
        "device_traces": [[event("alloc", 0, 100, STEP), event("free_requested", 0, 100)]],
    }
    assert peak(snapshot).allocated == 512


@pytest.mark.parametrize(
    "lines, what",
    [
        ([FORWARD], "forward"),
        ([STEP, FORWARD], "optimizer"),
        ([("/x/minifsdp/core/storage.py", "allocate"), FORWARD], GATHERED),
        ([("C:\\x\\minifsdp\\core\\unshard.py", "launch"), FORWARD], GATHERED),
        ([("/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather")],
         GATHERED),
        ([("/x/minifsdp/core/reduce.py", "launch"), ("/torch/_tensor.py", "backward")],
         "reductions"),
        ([("/torch/_tensor.py", "backward"), ("/home/me/train.py", "main")], "backward"),
        ([("??", "torch::autograd::Engine::evaluate_function(...)")], "backward"),
        ([], "backward"),  # autograd's thread on a GPU has no lines of Python
        ([("/home/me/model.py", "__init__")], "parameters, by the model"),
        ([("/x/minifsdp/core/shard.py", "shard"), ("/home/me/m.py", "__init__")], WRAPPING),
        ([("/home/me/train.py", "main")], "other lines"),
    ],
)  # fmt: skip
def test_who_asked_is_told_by_the_innermost_line_that_tells(lines, what):
    found = peak({"segments": [segment(0, (MiB, "active_allocated", *lines))], "device_traces": []})
    assert found.asked == {what: MiB}


@pytest.mark.parametrize("more", ["", "--alloc expandable_segments:True", "--recompute full"])
def test_the_virtual_gpus_own_is_read_as_it_is(more, tmp_path):
    words = f"{SMALL} --batch 4096 {more} --snapshot there"
    gpu = simulate(options(words))
    gpu.snapshot(tmp_path / "file")
    found = peak(read(tmp_path / "file"))
    assert found.allocated == gpu.allocator.allocated.peak == sum(found.asked.values())
    assert found.allocated < found.reserved <= gpu.allocator.reserved.peak
    figures = gpu.report()["peak allocated is"]
    assert found.asked["gathered parameters"] == figures["gathered parameters"]
    assert found.asked["optimizer"] == figures["optimizer"]
    assert found.asked["parameters, by wrapping"] == figures["parameters"]


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("made by a pickle",)


SMALLEST = {"segments": [], "device_traces": []}
NONE = {
    "empty": b"",
    "text": b"no pickle at all",
    "cut": pickle.dumps([SMALLEST] * 3)[:-5],
    "a list": pickle.dumps([1]),
    "a number": pickle.dumps(3.0),
    "another dict": pickle.dumps({"segments": 3}),
    "bad segments": pickle.dumps({"segments": [{"device": 0}], "device_traces": []}),
    "bad events": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}),
    "sizes in words": pickle.dumps(
        {"segments": [], "device_traces": [[{"action": "alloc", "size": "big", "addr": 0}]]}
    ),
    "a class": pickle.dumps({**SMALLEST, "segments": [torch.Size([1])]}),
    "code": pickle.dumps({**SMALLEST, "more": Harmful()}),
}


@pytest.mark.parametrize("name", NONE)
def test_a_file_that_is_none_is_refused_and_nothing_in_it_is_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(NONE[name])
    with pytest.raises(ValueError, match="--against: 'file' is no snapshot") as error:
        read("file")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"--against: cannot read .*: No such file"):
        read(tmp_path / "file")


def test_a_virtual_gpu_without_history_has_its_end():
    with cluster() as gpu:
        x = torch.ones(1024, 1024)
        gpu.record_memory_history()
        y = torch.ones(1024, 1024)
        found = peak(memory_snapshot(gpu.allocator, gpu.storages.frames or {}))
    assert found.allocated == x.nbytes + y.nbytes
