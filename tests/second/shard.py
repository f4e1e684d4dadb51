"""shard.py, by way of torch.nn.functional.pad and torch.chunk."""

import math

from torch import Tensor
from torch.nn.functional import pad


def padded_shard_numel(numel: int, world_size: int) -> int:
    return math.ceil(numel / world_size)


def unpadded_shard_numel(numel: int, rank: int, world_size: int) -> int:
    padded = padded_shard_numel(numel, world_size)
    return len(range(numel)[rank * padded : (rank + 1) * padded])


def shard(flat: Tensor, rank: int, world_size: int) -> Tensor:
    if not flat.numel():
        return flat.clone()
    padding = -flat.numel() % world_size
    return pad(flat.detach(), (0, padding)).chunk(world_size)[rank].clone()
