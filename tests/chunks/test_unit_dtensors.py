"""unit_dtensors.py: from a chunk to rows and back, of any shapes and numbers of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.chunks.unit_dtensors import (
    chunk_to_dtensors,
    divide_alike,
    dtensors_to_chunk,
)
from tests.ranks import device, run

SHAPES = {
    "matrices": [(6, 4), (4,), (2, 6)],
    "rows that nothing divides": [(5, 3), (5,), (7, 2, 2)],
    "fewer rows than ranks": [(1, 8), (2,), (1,)],
    "without a dimension": [(), (3, 2), ()],
    "only that": [()],
    "empty": [(0, 3), (4,)],
}


class Parameters(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        params = (nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
        self.params = nn.ParameterList(params)

    def forward(self):
        return sum(param.sum() for param in self.params)


def there_and_back(shapes, strategy, dtype):
    plain = Parameters(shapes).to(device())
    unit = FSDP(Parameters(shapes).to(device()), sharding_strategy=strategy)._unit
    chunk = unit.sharded_flat_param.detach().to(dtype)
    divided = chunk_to_dtensors(unit, chunk)
    for tensor, param in zip(divided, plain.params, strict=True):
        assert tensor.shape == param.shape and tensor.dtype is dtype
        assert torch.equal(tensor.full_tensor(), param.detach().to(dtype))
        # The parts of the ranks are as torch makes them, and hold no more memory than they need.
        local = tensor.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * local.itemsize
        if param.dim() and strategy is not ShardingStrategy.NO_SHARD:
            chunks = param.detach().chunk(dist.get_world_size()) if len(param) else ()
            rank = dist.get_rank()
            assert len(local) == (len(chunks[rank]) if rank < len(chunks) else 0)
    back = dtensors_to_chunk(unit, divided)
    assert back.dtype is dtype and torch.equal(back, chunk)
    for tensor, param in zip(divided, plain.params, strict=True):
        assert divide_alike(tensor, tensor) is tensor
        everywhere = tensor.redistribute(placements=[Replicate()])
        for other in (param.to(dtype), everywhere):
            again = divide_alike(other, tensor)
            assert again.placements == tensor.placements
            assert torch.equal(again.to_local(), tensor.to_local())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shapes", SHAPES)
def test_there_and_back(shapes, ranks, dtype):
    run(there_and_back, ranks, SHAPES[shapes], ShardingStrategy.FULL_SHARD, dtype)


@pytest.mark.parametrize("shapes", SHAPES)
def test_where_every_rank_has_all(shapes):
    run(there_and_back, 2, SHAPES[shapes], ShardingStrategy.NO_SHARD, torch.float32)
