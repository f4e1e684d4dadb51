"""sim/memory/segments.py: segments that grow. Random operations are compared with another port in
test_allocator.py."""

import pytest

from minifsdp.sim.hardware.clock import Clock
from minifsdp.sim.memory.alloc_conf import MiB, parse
from minifsdp.sim.memory.allocator import Allocator
from minifsdp.sim.views.trace import memory_snapshot


def make(capacity=400 * MiB):
    return Allocator(Clock(), capacity, conf=parse("expandable_segments:True"))


@pytest.mark.parametrize(
    "sizes, reserved",
    [([0.1], 2), ([0.9, 0.9], 2), ([0.9, 0.9, 0.9], 4), ([3], 20), ([12, 12], 40), ([50], 60),
     ([3, 0.1], 22), ([19, 2], 40)],
)  # fmt: skip
def test_it_grows_by_pages_of_2_or_20_mib(sizes, reserved):
    memory = make()
    for size in sizes:
        memory.malloc(int(size * MiB), "compute")
    assert memory.reserved.now == reserved * MiB


def test_there_is_one_for_each_stream_and_pool():
    memory = make()
    blocks = {(stream, size): [memory.malloc(size, stream) for _ in range(3)]
              for stream in ("compute", "unshard") for size in (MiB, 30 * MiB)}  # fmt: skip
    assert len(memory.segments) == 4
    for (_, size), (first, second, third) in blocks.items():
        assert first.address + size == second.address == third.address - size


def test_what_is_free_at_the_end_is_the_beginning_of_what_is_larger():
    memory = make()
    memory.free(memory.malloc(30 * MiB, "compute"))
    block = memory.malloc(70 * MiB, "compute")
    assert memory.reserved.now == 80 * MiB and block.address in memory.segments


def test_holes_are_filled_again_from_the_lowest_on():
    memory = make()
    first, second, third, _ = (memory.malloc(100 * MiB, "compute") for _ in range(4))
    memory.free(first)
    memory.free(third)
    memory.malloc(60 * MiB, "unshard")  # unmaps both
    assert memory.reserved.now == 260 * MiB and memory.frees == 2
    assert memory.malloc(90 * MiB, "compute").address == first.address
    memory.free(second)
    assert memory.malloc(150 * MiB, "compute").address == first.address + 90 * MiB


def test_a_page_that_is_in_use_in_part_stays():
    memory = make()
    kept, freed = memory.malloc(30 * MiB, "compute"), memory.malloc(95 * MiB, "compute")
    last = memory.malloc(3 * MiB, "compute")  # from 125 to 128: in the page from 120 on
    memory.free(freed)
    memory.malloc(300 * MiB, "unshard")  # unmaps what is from 40 to 120
    assert memory.reserved.now == 360 * MiB and memory.frees == 1
    memory.free(kept)
    memory.free(last)
    memory.malloc(81 * MiB, "upload")  # 100 are needed; the first segment's two pages, and ...
    assert memory.reserved.now == 400 * MiB


def test_the_snapshot_has_what_is_mapped():
    memory = make()
    first, *_ = (memory.malloc(100 * MiB, "compute") for _ in range(4))
    memory.free(first)
    memory.malloc(30 * MiB, "unshard")
    snapshot = memory_snapshot(memory, {})
    sizes = sorted(segment["total_size"] // MiB for segment in snapshot["segments"])
    assert sizes == [40, 300] and all(s["is_expandable"] for s in snapshot["segments"])
    actions = {event["action"] for event in snapshot["device_traces"][0]}
    assert {"segment_map", "segment_unmap"} <= actions
