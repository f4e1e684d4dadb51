"""originals.py: nobody should hold what wrapping has replaced."""

import gc

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import device, on_ranks
from tests.small import step


@on_ranks(2)
def test_an_optimizer_built_before_is_refused_and_one_built_after_trains():
    model = nn.Sequential(nn.Linear(6, 6)).to(device())
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"Adam.* was built before wrapping. It holds 0.weight, 0.bias"
    ):
        FSDP(model)
    wrapped = FSDP(nn.Sequential(nn.Linear(6, 6)).to(device()))
    before = wrapped.engine.root.shard.detach().clone()
    optimizer = torch.optim.Adam(wrapped.parameters())
    step(wrapped)
    optimizer.step()
    assert not torch.equal(before, wrapped.engine.root.shard)


@on_ranks(2)
def test_somebody_else_who_holds_a_parameter_is_no_optimizer():
    model = nn.Linear(6, 6).to(device())
    held = list(model.parameters())
    FSDP(model)
    assert len(held) == 2


@on_ranks(1)
def test_an_optimizer_that_nobody_uses_any_more_is_none():
    model = nn.Linear(6, 6).to(device())
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=1)
    optimizer.itself = optimizer  # garbage, but not known to be until Python looks for it
    gc.disable()
    try:
        del optimizer
        FSDP(model)
    finally:
        gc.enable()
