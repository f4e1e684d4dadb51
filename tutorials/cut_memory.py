"""What a rank has in memory while FSDP wraps a model, at the moments at which a unit is cut."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor

from minifsdp.core.shard import shard


@contextlib.contextmanager
def fullest() -> Iterator[dict[str, float]]:
    """The bytes of each kind at the worst of these moments, when the block is over."""
    gc.collect()
    before, shards, worst = _held(), [], {}

    def cut(flat: Tensor, *arguments: Any) -> Tensor:
        shards.append(shard(flat, *arguments))
        kept = sum(one.nbytes for one in shards)
        parts = {"shards": kept, "modules": _held() - before - kept - flat.nbytes}
        parts["flat tensor of a unit"] = flat.nbytes
        if sum(parts.values()) > sum(worst.values()):
            worst.update(parts)
        return shards[-1]

    with patch("minifsdp.core.shard.shard", cut):
        yield worst


def _held() -> int:
    """Bytes of all tensors of this process, each piece of memory counted once."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and not x.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
