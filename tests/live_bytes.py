"""How much memory tensors take on one rank, now and after each call of a function."""

import gc
import time
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.pretended_gpu import location_of
from tests.ranks import device


def live_bytes() -> int:
    """Of all tensors on this rank, each piece of memory once."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    # A DTensor has no memory of its own: its local tensor has.
    tensors = [tensor for tensor in tensors if not issubclass(type(tensor), DTensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    # By the device of the storage: that of a FakeTensor, which torch.compile may have left here,
    # is on meta, whatever the tensor says.
    where = [location_of(storage) or storage.device.type for storage in storages]
    on_device = device().type
    real = [s for s, place in zip(storages, where, strict=True) if place.startswith(on_device)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in real}.values())


def settled_bytes() -> int:
    """The same, when nothing is let go any more: gloo's threads may hold what they have received
    last for a moment longer than anybody else."""
    levels = [-1]
    while levels[-5:] != 5 * levels[-1:]:
        time.sleep(0.01)
        levels.append(live_bytes())
    return levels[-1]


@contextmanager
def bytes_at(owner: object, function: str):
    """A list of how many bytes there were, above those at the start, after each call."""
    gc.collect()  # at the start only: what a cycle keeps after a call is to be counted
    found, start, called = [], settled_bytes(), getattr(owner, function)

    def counted(*args, **kwargs):
        result = called(*args, **kwargs)
        found.append(settled_bytes() - start)
        return result

    with patch.object(owner, function, counted):
        yield found
