"""collectives.py: what ranks say to each other."""

import gc
import os
import subprocess
import sys
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import collectives, same_machine
from minifsdp.comm.consensus import gather_objects
from minifsdp.comm.message_tags import Kind
from minifsdp.core.collectives import torch_all_gather, torch_reduce_scatter
from tests.bench.meters import bytes_sent
from tests.comm import one_unit
from tests.ranks import device, on_ranks, run

WORLDS = (1, 2, 3, 4)


def mine(numel, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    return torch.randn(numel, generator=generator).to(device(), dtype)


def world():
    return dist.group.WORLD


def check_all_gather(numel):
    chunk = mine(numel)
    full = torch.full((numel * dist.get_world_size(),), float("nan"), device=device())
    one_unit.all_gather(full, chunk, world(), tag=7)()
    expected = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
    dist.all_gather(expected, chunk)
    assert torch.equal(full, torch.cat(expected))
    assert torch.equal(chunk, mine(numel))


def check_reduce_scatter(numel, scale):
    """Against torch's own, bit for bit: gloo adds in ring order, and so must we."""
    flat = mine(numel * dist.get_world_size())
    expected = torch.empty(numel, device=device())
    torch_reduce_scatter(expected, flat * scale)
    total, finish = one_unit.reduce_scatter(flat, world(), scale, tag=7)
    finish()
    assert torch.equal(total, expected)
    assert total.untyped_storage().size() == 4 * numel  # not a view that keeps `flat` alive


def all_reduce(flat, group, scale):
    for finish in one_unit.all_reduce(flat, group, scale):
        finish()


def check_all_reduce(numel):
    """The halves need not be equally long. Two addends have one sum, in whatever order."""
    flat = mine(numel)
    expected = flat / dist.get_world_size()
    dist.all_reduce(expected)
    all_reduce(flat, world(), 1 / dist.get_world_size())
    torch.testing.assert_close(flat, expected)
    assert dist.get_world_size() > 2 or torch.equal(flat, expected)
    assert len({tuple(said) for said in gather_objects(flat.tolist(), world())}) == 1


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("numel", [1, 6, 1000])
def test_all_gather_is_torchs(world_size, numel):
    run(check_all_gather, world_size, numel)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("numel", [2, 6, 1000])
def test_reduce_scatter_is_torchs_bit_for_bit(world_size, numel):
    run(check_reduce_scatter, world_size, numel, 1.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reduce_scatter_scales_before_it_adds(world_size):
    run(check_reduce_scatter, world_size, 6, 1 / world_size)


def check_rounding(dtype, scale):
    """Numbers of all sizes: small ones in fp16 lose bits when they are scaled."""
    count = 1000 * dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = 10.0 ** -torch.randint(0, 9, (count,), generator=generator)
    flat = (torch.randn(count, generator=generator) * sizes).to(device(), dtype)
    expected = torch.empty(1000, dtype=dtype, device=device())
    torch_reduce_scatter(expected, flat * scale)
    total, finish = one_unit.reduce_scatter(flat, world(), scale, tag=7)
    finish()
    assert torch.equal(total, expected)


@pytest.mark.parametrize("world_size, scale", [(2, 1 / 2), (3, 1 / 3), (2, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_is_scaled_is_rounded_before_it_is_added(dtype, world_size, scale):
    run(check_rounding, world_size, dtype, scale)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("numel", [1, 2, 7, 1000])
def test_all_reduce_is_torchs(world_size, numel):
    run(check_all_reduce, world_size, numel)


@on_ranks(2)
def test_all_reductions_of_different_units_are_not_taken_for_each_other():
    """Each waits for its own, though the first ones started are not of the same unit."""
    if device().type == "cuda" or collectives.NATIVE:
        pytest.skip("torch's own have no tags: there the order has to be the same, and is")
    order = (1, 2) if dist.get_rank() == 0 else (2, 1)
    flats = {tag: torch.full((6,), float(tag)) for tag in order}
    parts = {tag: one_unit.all_reduce(flats[tag], world(), 1.0, tag) for tag in order}
    for _ in range(2):
        for finish in [next(parts[tag]) for tag in order]:
            finish()
    assert (flats[1] == 2).all() and (flats[2] == 4).all()


def check_broadcast():
    group, rank = world(), dist.get_rank()
    seen = []
    for tensor in (
        torch.full((2, 3), float(rank)),
        torch.full((2, 3), float(rank)).t(),  # sent as it is read, not as it lies in memory
        torch.full((4, 4), float(rank))[::2, 1:3],
        torch.tensor(rank),
        torch.tensor([rank % 2 == 0]),
        torch.empty(0, 3),
    ):
        tensor = tensor.to(device())
        if rank == 0 and tensor.ndim == 2:
            tensor.copy_(torch.arange(float(tensor.numel())).view(tensor.shape))
        collectives.broadcast(tensor, group)
        seen.append(tensor.tolist())
    assert seen == [
        [[0, 1, 2], [3, 4, 5]],
        [[0, 1], [2, 3], [4, 5]],
        [[0, 1], [2, 3]],
        0,
        [True],
        [],
    ]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_broadcast_gives_everybody_what_the_first_rank_has(world_size):
    run(check_broadcast, world_size)


@on_ranks(4)
def test_the_first_rank_is_that_of_the_group():
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    row = rows[dist.get_rank() // 2]
    tensor = torch.tensor([dist.get_rank()], device=device())
    collectives.broadcast(tensor, row)
    assert int(tensor) == dist.get_rank() // 2 * 2
    number = torch.tensor(float(dist.get_rank()), device=device())
    collectives.add_up(number, row)
    assert number == 2 * tensor + 1


def check_broadcast_in_rows():
    """By another layout on each rank."""
    tensor = torch.zeros(2, 3, device=device())
    if dist.get_rank():
        tensor = torch.zeros(3, 2, device=device()).t()
    else:
        tensor.copy_(torch.arange(6.0).view(2, 3))
    collectives.broadcast(tensor, world())
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_may_lay_out_a_tensor_differently(world_size):
    run(check_broadcast_in_rows, world_size)


def check_add_up():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    number = torch.tensor(2.0**rank, device=device())
    collectives.add_up(number, world())
    assert number == 2**ranks - 1
    number = torch.tensor(float(-(rank**2)), device=device())
    collectives.add_up(number, world(), largest=True)
    assert number == 0


@pytest.mark.parametrize("world_size", WORLDS)
def test_numbers_are_added_up_and_the_largest_is_found(world_size):
    run(check_add_up, world_size)


@on_ranks(2)
def test_a_mean_in_half_precision_does_not_overflow_on_the_way():
    flat = torch.full((4,), 60000.0, dtype=torch.float16, device=device())
    total, finish = one_unit.reduce_scatter(flat, world(), 0.5, tag=7)
    finish()
    assert (total == 60000).all()


@on_ranks(2)
def test_nor_does_that_of_an_all_reduce():
    flat = torch.full((4,), 60000.0, dtype=torch.float16, device=device())
    all_reduce(flat, world(), 0.5)
    assert (flat == 60000).all()


@on_ranks(4)
def test_only_ranks_of_the_group_take_part():
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mates = torch.tensor([0.0, 1.0], device=device()) + dist.get_rank() // 2 * 2
    row, mine = rows[dist.get_rank() // 2], mates[dist.get_rank() % 2]
    full = torch.empty(2, device=device())
    one_unit.all_gather(full, mine.view(1), row, tag=7)()
    assert torch.equal(full, mates)
    total, finish = one_unit.reduce_scatter(mine.repeat(2), row, 0.5, tag=7)
    finish()
    assert total == mates.mean()
    flat = mine.repeat(3)
    all_reduce(flat, row, 0.5)
    assert (flat == mates.mean()).all()


@on_ranks(3)
def test_conversations_with_different_tags_may_be_started_in_any_order():
    if device().type == "cuda" or collectives.NATIVE:
        pytest.skip("torch's own have no tags: there the order has to be the same, and is")
    chunks, fulls = {tag: mine(4, tag) for tag in (1, 2)}, {}
    finishes = []
    for tag in (1, 2) if dist.get_rank() == 0 else (2, 1):
        fulls[tag] = torch.empty(12)
        finishes.append(one_unit.all_gather(fulls[tag], chunks[tag], world(), tag))
    for finish in finishes:
        finish()
    for tag in (1, 2):
        expected = [torch.empty(4) for _ in range(3)]
        dist.all_gather(expected, chunks[tag])
        assert torch.equal(fulls[tag], torch.cat(expected))


def sent_by(action):
    dist.barrier()
    before = bytes_sent()
    action()
    dist.barrier()
    return bytes_sent() - before


def measure(native, numel=1 << 18):
    """Bytes sent for one all-gather and one reduce-scatter, in sizes of the full tensor."""
    full, chunk = torch.zeros(numel), torch.zeros(numel // dist.get_world_size())
    with patch.object(collectives, "NATIVE", native), patch.object(same_machine, "neighbors", {}):
        gather = sent_by(one_unit.all_gather(full, chunk, world(), 7))
        scatter = sent_by(lambda: one_unit.reduce_scatter(full, world(), 1.0, 7)[1]())
    return gather / full.nbytes, scatter / full.nbytes


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="bytes sent are read from Linux's /proc"
)
def test_a_reduce_scatter_sends_half_of_what_gloos_does():
    for gather, scatter in run(measure, 2, native=False):
        assert gather < 0.55 and scatter < 0.55  # (W - 1) / W of the full tensor
    for _, scatter in run(measure, 2, native=True):
        assert scatter > 0.95


@pytest.mark.parametrize("native", [False, True], ids=["direct", "native"])
@on_ranks(2)
def test_what_is_gathered_for_no_unit_goes_by_the_device_too(native):
    full = torch.empty(6, device=device())
    with (
        patch.object(collectives, "NATIVE", native),
        patch.object(collectives, "torch_all_gather", wraps=torch_all_gather) as torchs,
    ):
        collectives.gather(full, mine(3), world(), 7, "some numbers", Kind.OTHER)
    assert torchs.called == (native or device().type == "cuda")
    expected = [torch.empty(3, device=device()) for _ in range(2)]
    dist.all_gather(expected, mine(3))
    assert torch.equal(full, torch.cat(expected)), "it has been waited for"


@on_ranks(2)
def test_native_collectives_give_the_same():
    with patch.object(collectives, "NATIVE", True):
        check_all_gather(6)
        check_reduce_scatter(6, 0.5)
        check_all_reduce(7)


@on_ranks(2)
@patch.object(same_machine, "neighbors", {})
def test_a_gather_that_nobody_waits_for_does_not_break_the_connection():
    """As when an exception ends the forward of each rank, at different times, and the model goes:
    the message of the later rank then arrives for a receive that gloo has forgotten."""
    if dist.get_rank():
        time.sleep(0.5)
    full = torch.empty(2000, device=device())
    one_unit.all_gather(full, mine(1000), world(), tag=7)
    del full
    gc.collect()
    time.sleep(1.0)
    for _ in range(3):
        collectives.add_up(torch.ones(1, device=device()), world())
        check_all_gather(1000)


@on_ranks(2)
def test_starting_a_gather_does_not_wait_for_the_others():
    """Rank 1 joins only after rank 0, its gather still open, has computed and said so."""
    store = dist.distributed_c10d._get_default_store()
    key = "rank 0 has computed"
    store.delete_key(key)
    dist.barrier()
    chunk, full = mine(100), torch.empty(200, device=device())
    if dist.get_rank() == 0:
        finish = one_unit.all_gather(full, chunk, world(), tag=7)
        torch.ones(50, 50) @ torch.ones(50, 50)
        store.set(key, "yes")
    else:
        store.wait([key], timedelta(minutes=2))
        finish = one_unit.all_gather(full, chunk, world(), tag=7)
    finish()


def test_an_unknown_choice_of_collectives_is_refused():
    result = subprocess.run(
        [sys.executable, "-c", "from minifsdp import fully_shard"],
        env={**os.environ, "MINIFSDP_COLLECTIVES": "nativ"},
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "MINIFSDP_COLLECTIVES is 'gloo', 'native' or unset, not 'nativ'" in result.stderr


@pytest.mark.parametrize("directly", [True, False])
@on_ranks(2)
def test_what_is_no_parameter_comes_into_its_blocks_and_directly_without_a_second_tensor(directly):
    if device().type == "cuda":
        pytest.skip("both ways, on a CPU")
    full, mine = torch.empty(12), torch.arange(6.0) + 10 * dist.get_rank()
    with (
        patch.object(collectives, "direct", lambda device: directly),
        patch.object(collectives, "copy_apart", wraps=collectives.copy_apart) as copied,
    ):
        collectives.gather(full, mine, world(), 7, "", Kind.GRADIENT, blocks=[2, 4])
    assert full.tolist() == [0, 1, 10, 11, 2, 3, 4, 5, 12, 13, 14, 15]
    assert copied.called != directly
