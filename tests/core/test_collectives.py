"""collectives.py: torch's own collectives, on a CPU by threads, on other devices on the stream."""

from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from minifsdp.core import collectives
from minifsdp.core.collectives import TorchCollectives

from .common import on_ranks

SOMEBODY = SimpleNamespace(size=lambda: 2)


@on_ranks(2)
def test_a_rank_gets_all_shards_and_its_shard_of_the_sum():
    import torch.distributed as dist

    rank, group, comm = dist.get_rank(), dist.group.WORLD, TorchCollectives()
    unit = SimpleNamespace(shard_group=group)
    full = torch.empty(4)
    comm.all_gather(unit, full, torch.tensor([rank, rank + 10.0]), group)()
    assert full.tolist() == [0, 10, 1, 11]
    total, finish = comm.reduce_scatter(unit, torch.tensor([2.0, 4.0, 6.0, 8.0]) + rank, 0.5)
    finish()
    assert total.tolist() == ([2.5, 4.5] if rank == 0 else [6.5, 8.5])
    flat = torch.tensor([2.0, 4.0]) + rank
    comm.all_reduce(unit, flat, 0.5, group)()
    assert flat.tolist() == [2.5, 4.5]


@pytest.mark.direct
@pytest.mark.parametrize("device", ["cpu", "meta"])  # the second stands for a GPU
def test_a_gpus_collective_is_on_the_stream_that_it_is_called_on(device):
    """With ``async_op`` it would be on a stream of NCCL's, without the priority of ours."""
    on_cpu = device == "cpu"
    waited = Mock()
    called = Mock(return_value=SimpleNamespace(wait=waited) if on_cpu else None)
    unit, flat = SimpleNamespace(shard_group=SOMEBODY), torch.ones(4, device=device)
    with (
        patch.object(collectives, "torch_all_gather", called),
        patch.object(collectives, "torch_reduce_scatter", called),
        patch("torch.distributed.all_reduce", called),
    ):
        TorchCollectives().all_gather(unit, flat, flat[:2], SOMEBODY)()
        TorchCollectives().reduce_scatter(unit, flat, 0.5)[1]()
        TorchCollectives().all_reduce(unit, flat, 0.5, SOMEBODY)()
    assert [call.kwargs["async_op"] for call in called.call_args_list] == [on_cpu] * 3
    assert waited.call_count == 3 * on_cpu
