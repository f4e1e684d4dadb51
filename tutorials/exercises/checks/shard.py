"""Checks of shard.py: plain arithmetic, no ranks."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check

CASES = [(5, 4), (8, 4), (9, 8), (1, 3), (0, 2), (7, 1)]  # elements, ranks


def _sizes(what: str, want: Any, got: Any) -> str | None:
    if not isinstance(got, int):
        return None
    if "unpadded" not in what:
        if got < want:
            return "it is rounded down, so that the last elements find no place; round up"
        return "it is rounded up where nothing is left over"
    if got < 0:
        return "a rank past the end has no elements, and not less than none"
    if got > want:
        return "padding is counted; a rank at the end may have padding only"
    return None


@check("shard.1", because=_sizes)
def sizes_of_all_ranks() -> Iterator[Any]:
    from minifsdp.core.shard import padded_shard_numel, unpadded_shard_numel

    for numel, ranks in CASES:
        yield f"padded_shard_numel({numel}, {ranks})", padded_shard_numel(numel, ranks)
        for rank in range(ranks):
            what = f"unpadded_shard_numel({numel}, {rank}, {ranks})"
            yield what, unpadded_shard_numel(numel, rank, ranks)


def _shards(what: str, want: Any, got: Any) -> str | None:
    if what.startswith("memory"):
        return "it is a view of flat, so that all of flat stays in memory; make a new tensor"
    if what.startswith("bytes"):
        return "it is a part of a larger tensor, all of which stays in memory; make one of its own"
    if what.startswith("dtype"):
        return "take flat.new_zeros(), which has the dtype and the device of flat"
    if isinstance(got, dict) and got.get("raised") == "IndexError":
        return (
            "chunk() makes fewer pieces than there are ranks if there are few elements: a slice of "
            "padded_shard_numel() elements may be short, or empty"
        )
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return None
    if got.shape != want.shape:
        return "collectives need shards of equal size; the missing elements are padding"
    if (got[want != 0] == want[want != 0]).all():
        return "padding is zero: a norm of the parameters must not depend on it"
    return "each rank has the elements after those of the rank before"


@check("shard.2", because=_shards)
def shards_of_all_ranks() -> Iterator[Any]:
    from minifsdp.core.shard import shard

    for numel, ranks in CASES:
        flat = 1 + torch.rand(numel)
        for rank in range(ranks):
            yield f"shard of {numel} elements, rank {rank} of {ranks}", shard(flat, rank, ranks)
    flat = torch.rand(6)
    for rank in (0, 1):
        mine = shard(flat, rank, 2)
        shared = mine.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        yield f"memory of the shard of rank {rank} is that of flat", shared
        yield f"bytes that the shard of rank {rank} keeps", mine.untyped_storage().nbytes()
    yield (
        "memory of the only shard is that of flat",
        shard(flat, 0, 1).data_ptr() == flat.data_ptr(),
    )
    yield "dtype of the shard of a bfloat16 tensor", shard(flat.bfloat16(), 1, 4).dtype
