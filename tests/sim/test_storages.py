"""sim/storages.py: which memory a tensor is in, and for how long."""

import pytest
import torch

from minifsdp.sim import cluster
from minifsdp.sim.allocator import MiB

KINDS = pytest.mark.parametrize("kind", ["meta", "cpu"])


@KINDS
def test_memory_lives_as_long_as_the_last_tensor_that_shares_it(kind):
    with cluster(kind=kind) as gpu:
        x = torch.ones(4 * MiB)
        assert gpu.allocator.allocated.now == 16 * MiB
        view = x[1:]
        del x
        assert gpu.allocator.allocated.now == 16 * MiB
        del view
        assert gpu.allocator.allocated.now == 0


@KINDS
def test_what_autograd_saves_is_memory_until_the_backward(kind):
    with cluster(kind=kind) as gpu:
        x = torch.ones(4 * MiB, requires_grad=True)
        y = x.sin().sum()  # needs x; sin's result is needed by nobody
        before = gpu.allocator.allocated.now
        z = x.exp().sum()  # needs its own result
        assert gpu.allocator.allocated.now - before == 16 * MiB + 512
        z.backward()
        assert gpu.allocator.allocated.now - before == 16 * MiB + 512  # now it is the gradient
        del y, z
        assert gpu.allocator.allocated.now == 32 * MiB


@KINDS
def test_a_storage_that_is_shrunk_gives_its_memory_back(kind):
    with cluster(kind=kind) as gpu:
        x = torch.empty(4 * MiB)
        x.untyped_storage().resize_(0)
        assert gpu.allocator.allocated.now == 0
        x.untyped_storage().resize_(16 * MiB)
        assert gpu.allocator.allocated.now == 16 * MiB
        del x
        assert gpu.allocator.allocated.now == 0


@KINDS
def test_what_the_host_has_is_not_the_devices(kind):
    with cluster(kind=kind) as gpu:
        x = gpu.host_memory(torch.ones(4 * MiB))
        assert gpu.buffer(x).owner == "host" and gpu.allocator.allocated.now == 0
        gpu.record_stream(x, "compute")  # nothing to tell anybody
        del x
        assert gpu.allocator.allocated.now == 0


def test_another_stream_keeps_what_it_is_known_to_use():
    with cluster() as gpu:
        x = torch.ones(4 * MiB)
        gpu.clock.launch("reduce", 1.0)
        gpu.record_stream(x, "reduce")
        del x
        assert gpu.allocator.allocated.now == 0 and gpu.allocator.active.now == 16 * MiB


def test_where_there_is_no_room_what_is_left_of_it_may_still_be_cleaned_up():
    with cluster() as gpu:
        x = torch.empty(4 * MiB)
        gpu.allocator.capacity = 32 * MiB
        with pytest.raises(torch.OutOfMemoryError):
            x.untyped_storage().resize_(64 * MiB)
        gpu.record_stream(x, "compute")
        x.untyped_storage().resize_(0)
        assert gpu.allocator.allocated.now == 0
