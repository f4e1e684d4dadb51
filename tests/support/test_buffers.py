"""buffers.py: what a module keeps that is not a parameter."""

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision
from minifsdp.support.buffers import Buffers
from tests.ranks import device, on_ranks

CPU, META = torch.device("cpu"), torch.device("meta")
BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64, torch.bool)


class Tables(nn.Module):
    """One buffer of each dtype; and the shared one is in two modules."""

    def __init__(self):
        super().__init__()
        for dtype in DTYPES:
            self.register_buffer(str(dtype)[6:], torch.ones(3, dtype=dtype))
        self.register_buffer("nothing", None)
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.float32)

    def dtypes(self) -> list[torch.dtype]:
        return [buffer.dtype for buffer in self._buffers.values() if buffer is not None]


def both(dtype=BF16) -> tuple[Tables, Buffers]:
    tables = Tables()
    return tables, Buffers([tables, tables.inner], dtype)


def test_floating_point_buffers_are_cast_and_others_left_alone():
    tables, buffers = both()
    count = tables.int64
    buffers.place(CPU, full_precision=False)
    assert tables.dtypes() == [BF16, BF16, BF16, *DTYPES[3:]]
    assert tables.int64 is count and tables.nothing is None


def test_full_precision_is_the_dtype_that_each_had_at_wrapping():
    tables, buffers = both()
    for full_precision in (True, False, True):
        buffers.place(CPU, full_precision)
        low = [BF16] * 3
        assert tables.dtypes() == [*(DTYPES[:3] if full_precision else low), *DTYPES[3:]]


def test_without_a_dtype_buffers_are_moved_only():
    tables, buffers = both(None)
    tables.float64 = tables.float64.float()  # as the user likes it
    before = dict(tables.named_buffers())
    buffers.place(CPU, full_precision=False)
    assert all(tables.get_buffer(name) is buffer for name, buffer in before.items())
    buffers.place(META, full_precision=False)
    assert all(buffer.is_meta for buffer in tables.buffers())
    assert tables.float64.dtype == torch.float32


def test_what_two_modules_share_they_share_afterwards():
    tables, buffers = both()
    buffers.place(META, full_precision=False)
    assert tables.inner.shared is tables.float32 and tables.float32.dtype == BF16


def test_a_buffer_that_was_replaced_is_followed():
    tables, buffers = both()
    tables.float32, tables.float64 = torch.full((5,), 2.0), None
    buffers.place(CPU, full_precision=False)
    assert tables.float32.dtype == BF16 and tables.float32.tolist() == [2] * 5
    assert tables.float64 is None
    del tables.float16
    buffers.place(CPU, full_precision=False)


def test_what_a_graph_has_saved_is_not_changed():
    tables, buffers = both()
    x = torch.ones(3, requires_grad=True)
    y = (x * tables.float32).sum()
    buffers.place(CPU, full_precision=False)
    y.backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_what_was_made_in_an_inference_may_be_trained_with():
    tables, buffers = both()
    with torch.inference_mode():
        buffers.place(CPU, full_precision=False)
    x = torch.ones(3, dtype=BF16, requires_grad=True)
    (x * tables.float32).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, dtype=BF16))


class Counting(nn.Module):
    """Uses its buffers, and keeps count in one of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.tensor(255))
        self.seen = []

    def forward(self, x):
        self.count += 1
        self.seen.append(self.scale.dtype)
        return self.linear(x) * self.scale.to(x.dtype)


@on_ranks(2)
def test_each_unit_has_its_own_buffers_in_its_own_dtype_when_it_runs():
    low = MixedPrecision(buffer_dtype=BF16, full_precision_in_eval=True)
    inner, outer = Counting().to(device()), Counting().to(device())
    model = FSDP(nn.Sequential(outer, FSDP(inner, mixed_precision=low)))
    x = torch.ones(1, 2, device=device())
    for training in (True, True, False, True):
        model.train(training)(x)
    assert outer.seen == [torch.float32] * 4
    assert inner.seen == [BF16, BF16, torch.float32, BF16]
    assert inner.count == outer.count == 259 and inner.count.dtype == torch.int64
    assert inner.scale.device == model._unit.device


@pytest.mark.gpus(1)
@on_ranks(1)
def test_buffers_are_moved_with_their_parameters():
    inner = Counting()
    model = FSDP(inner).to(device())
    inner.scale, inner.count = inner.scale.cpu(), inner.count.cpu()
    model(torch.ones(1, 2, device=device()))
    assert inner.scale.device == inner.count.device == model._unit.device
    assert model._unit.device.type == "cuda"


@pytest.mark.parametrize("evaluate", [False, True])
@on_ranks(2)
def test_what_was_not_computed_with_in_low_precision_is_not_rounded(evaluate):
    module = nn.Linear(4, 4).to(device())
    module.register_buffer("third", torch.full((3,), 1 / 3, device=device()))  # not so in bfloat16
    precision = MixedPrecision(buffer_dtype=BF16, full_precision_in_eval=True)
    model = FSDP(module, mixed_precision=precision).eval()
    exact = model.state_dict()["third"].clone()
    if evaluate:
        model(torch.randn(2, 4, device=device()))
    assert torch.equal(model.state_dict()["third"], exact)
    assert torch.equal(exact, torch.full_like(exact, 1 / 3))
    model.train()(torch.randn(2, 4, device=device()))
    assert module.third.dtype is BF16
