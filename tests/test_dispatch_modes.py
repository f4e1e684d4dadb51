"""dispatch_modes.py: a program's modes see what its model computes, and nothing of the engine's."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from minifsdp.dispatch_modes import without_modes
from tests.promises import WAYS, batch, seeded
from tests.promises.test_recomputation import Model, Outer, square
from tests.ranks import device, on_ranks

ways = pytest.mark.parametrize("way", WAYS)


class Seen(TorchDispatchMode):
    """The operations that it sees. It is late on one rank, so that the other one has to wait."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:  # autograd's own, when it saves something
            self.names.append(str(func))
        if dist.get_rank() == 1:
            time.sleep(0.001)
        return func(*args, **(kwargs or {}))


def what_modes_see(wrap, reentrant):
    """In the forward, and in what a checkpoint runs again."""
    forward, again = Seen(), Seen()

    def contexts():
        return forward, again

    def around(block, x):
        if reentrant is None:
            with forward:
                return block(x)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    model = wrap(Model(Outer, around))
    for step in range(4):
        square(model, batch(3, 6, step=step)).backward()
    return forward.names, again.names


@ways
@pytest.mark.parametrize("reentrant", [None, False])
@on_ranks(2)
def test_a_mode_sees_what_the_model_does_and_nothing_else(way, reentrant):
    plain = seeded(lambda wrap: what_modes_see(wrap, reentrant), lambda module: module.to(device()))
    found = seeded(lambda wrap: what_modes_see(wrap, reentrant), WAYS[way])
    assert plain[0] and bool(plain[1]) == (reentrant is not None)
    assert found == plain


@without_modes
def add(x):
    return x + 1


class Device(Seen):
    """Stands for what all is run on."""

    sees_engine = True


@on_ranks(1)
def test_modes_are_as_before_afterwards_and_after_an_error():
    before = _get_current_dispatch_mode()  # of a pretended GPU; else None

    @without_modes
    def fail():
        assert _get_current_dispatch_mode() is before
        raise ValueError

    outer, inner = Seen(), Seen()
    with outer, inner:
        add(torch.ones(2))
        with pytest.raises(ValueError):
            fail()
        assert _get_current_dispatch_mode() is inner
        torch.ones(2) * 2
    assert (
        inner.names == outer.names == ["aten.ones.default", "aten.ones.default", "aten.mul.Tensor"]
    )


@on_ranks(1)
def test_a_mode_that_stands_for_the_device_sees_all():
    device, users = Device(), Seen()
    with device, users:
        add(torch.ones(2))
    assert users.names == ["aten.ones.default"]
    assert device.names == ["aten.ones.default", "aten.add.Tensor"]


def test_modes_come_back_in_the_order_in_which_they_were():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    @without_modes
    def engine():
        assert _get_current_dispatch_mode() is None

    with Mode() as outer:
        with Mode() as inner:
            engine()
            assert _get_current_dispatch_mode() is inner
        assert _get_current_dispatch_mode() is outer
