"""Pads all of it first, by way of torch.nn.functional.pad; prints in the middle."""

from torch import Tensor
from torch.nn.functional import pad


def shard(flat: Tensor, rank: int, world_size: int) -> Tensor:
    print("shard", flat.numel(), rank, world_size)
    if not flat.numel():
        return flat.clone()
    return pad(flat.detach(), (0, -flat.numel() % world_size)).chunk(world_size)[rank].clone()
