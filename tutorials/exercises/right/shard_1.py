"""With math.ceil and slices of a range, instead of arithmetic."""

import math


def padded_shard_numel(numel: int, world_size: int) -> int:
    return math.ceil(numel / world_size)


def unpadded_shard_numel(numel: int, rank: int, world_size: int) -> int:
    size = padded_shard_numel(numel, world_size)
    return len(range(numel)[rank * size : (rank + 1) * size])
