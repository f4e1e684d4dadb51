"""sim/views/trace.py: files that other people's viewers read."""

import json
import pickle

import pytest
from torch.cuda import _memory_viz as viewer

from minifsdp.sim.tape import Mark, Op, Wait
from tests.sim.test_virtual_cluster import train


@pytest.fixture(scope="module")
def gpu():
    virtual, model = train(batch=4096, blocks=4, record=True)
    yield virtual
    del model  # alive till now, and its memory with it


def test_the_trace_has_every_operation_on_its_streams_thread(gpu, tmp_path):
    gpu.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(threads.values())[:4] == ["host", "compute", "unshard", "reduce"]
    ops = [entry for entry in gpu.tape if isinstance(entry, Op)]
    shown = [e for e in events if e["ph"] == "X" and not e["name"].startswith("waits")]
    assert len(shown) == len(ops)
    for event, op in zip(shown, ops, strict=True):
        assert (event["name"], threads[event["tid"]]) == (op.name, op.stream)
        assert event["ts"] == pytest.approx(op.start * 1e6)
        assert event["dur"] == pytest.approx((op.end - op.start) * 1e6)


def test_an_arrow_goes_from_each_event_to_who_waits_for_it(gpu, tmp_path):
    gpu.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    starts, ends = ([e for e in events if e["ph"] == kind] for kind in "sf")
    waits = [e for e in gpu.tape if isinstance(e, Wait) and e.mark is not None]
    assert len(starts) == len(ends) == len(waits) > 0
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"] and start["ts"] <= end["ts"]
        assert isinstance(gpu.tape[start["id"]], Mark)
    assert any(e["ph"] == "C" and e["args"]["reserved"] > 0 for e in events)


def test_torchs_viewer_reads_the_snapshot(gpu, tmp_path):
    gpu.snapshot(tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    total = sum(segment["total_size"] for segment in snapshot["segments"])
    assert total == gpu.allocator.reserved.now
    summary = viewer.segsum(snapshot)
    assert f"total_reserved: {total / 2**20:.1f}MiB" in summary
    assert f"total_allocated: {gpu.allocator.allocated.now / 2**20:.1f}MiB" in summary
    assert "alloc" in viewer.trace(snapshot)
    allocations = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert all("train" in [frame["name"] for frame in e["frames"]] for e in allocations)
    assert "<html" in viewer.trace_plot(snapshot).lower()
    assert "<html" in viewer.segment_plot(snapshot).lower()


def test_the_snapshot_adds_up(gpu, tmp_path):
    gpu.snapshot(tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    level = 0
    for event in snapshot["device_traces"][0]:
        level += {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event["size"]
    assert level == gpu.allocator.allocated.now > 0
