"""storage.py: memory that comes and goes, under a tensor that stays."""

import torch

from minifsdp.core.storage import UnshardedFlatParam


def made(needs_unshard=True):
    memory = torch.arange(6.0)
    return UnshardedFlatParam(memory.data.requires_grad_(), memory.data, needs_unshard, None)


def test_views_have_values_while_there_is_memory():
    unsharded = made()
    view = unsharded.flat_param[2:4]
    unsharded.free()
    assert view.untyped_storage().size() == 0
    unsharded.allocate()
    assert unsharded.storage.size() == unsharded.nbytes == 24
    unsharded.data.copy_(torch.ones(6))
    assert view.tolist() == [1, 1]


def test_what_is_gathered_is_no_change_to_autograd():
    unsharded = made()
    squares = unsharded.flat_param.square().sum()  # has saved flat_param
    unsharded.free()
    unsharded.allocate()
    unsharded.data.copy_(torch.full((6,), 3.0))
    squares.backward()  # of what is there now
    assert unsharded.flat_param.grad.tolist() == [6.0] * 6


def test_nothing_is_copied():
    unsharded = made(needs_unshard=False)
    assert unsharded.flat_param.data_ptr() == unsharded.data.data_ptr()
    assert unsharded.dtype is torch.float32
