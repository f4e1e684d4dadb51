"""shard.py, by way of torch.nn.functional.pad and torch.chunk."""

import math

from torch import Tensor
from torch.nn.functional import pad


def chunk_numel(numel: int, world_size: int) -> int:
    return math.ceil(numel / world_size)


def real_numel(numel: int, rank: int, world_size: int) -> int:
    chunk = chunk_numel(numel, world_size)
    return len(range(numel)[rank * chunk : (rank + 1) * chunk])


def shard(flat: Tensor, rank: int, world_size: int) -> Tensor:
    if not flat.numel():
        return flat.clone()
    padding = -flat.numel() % world_size
    return pad(flat.detach(), (0, padding)).chunk(world_size)[rank].clone()
