"""redistribute.py: whatever pieces ranks have, each gets those that it wants."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import collectives, deadlock_watch
from minifsdp.comm.redistribute import redistribute
from tests.comm.test_deadlock_watch import alone_in_the_world
from tests.ranks import device, run

CHUNKS = [[range(0, 5)], [range(5, 10)], [range(10, 12)]]
ROWS = [[range(0, 4), range(8, 10)], [range(4, 8), range(10, 11)], [range(8, 8), range(11, 12)]]
EVERYWHERE = [[range(2, 9), range(0, 1)]] * 3


def check(have, want, dtype, native):
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = torch.arange(12, device=device()).to(dtype)
    own = [whole[piece.start : piece.stop].clone() for piece in have[rank]]
    with patch.object(collectives, "NATIVE", native):
        found = redistribute(own, have, want, group, "a test")
    for tensor, piece in zip(found, want[rank], strict=True):
        assert torch.equal(tensor, whole[piece.start : piece.stop]) and tensor.dtype is dtype


@pytest.mark.parametrize("native", [False, True], ids=["direct messages", "torch's own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
@pytest.mark.parametrize("have, want", [
    (CHUNKS, ROWS), (ROWS, CHUNKS), (CHUNKS, EVERYWHERE), (ROWS, EVERYWHERE), (ROWS, ROWS),
    (CHUNKS, CHUNKS),
])  # fmt: skip
def test_each_rank_gets_what_it_wants(have, want, dtype, native):
    run(check, 3, have, want, dtype, native)


def test_one_rank_by_itself_needs_no_group():
    whole = torch.arange(6.0)
    have, want = [[range(0, 6)]], [[range(4, 6), range(0, 3)]]
    found = redistribute([whole], have, want, None, "a test")
    assert [tensor.tolist() for tensor in found] == [[4, 5], [0, 1, 2]]
    found[0].zero_()
    assert whole[4] == 4  # a copy


def crossed():
    """One rank waits for the exchange, the other one in a gather."""
    group = dist.new_group()
    deadlock_watch.watch([group])
    with (
        patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2),
        pytest.raises(RuntimeError) as error,
    ):
        if dist.get_rank():
            collectives.all_gather(torch.empty(4), torch.ones(2), group, 5, "'a'")()
        else:
            have, want = [[range(0, 2)], [range(2, 4)]], [[range(2, 4)], [range(0, 2)]]
            redistribute([torch.ones(2)], have, want, group, "the exchange of a test")
    assert not deadlock_watch.waiting
    return str(error.value)


def test_ranks_that_wait_for_each_other_are_told_where():
    for text in alone_in_the_world(crossed, ranks=2):
        assert "have parted ways" in text and "the exchange of a test" in text
