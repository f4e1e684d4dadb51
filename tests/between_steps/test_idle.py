"""idle.py: what a program finds when control has returned to it."""

from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps import idle
from minifsdp.support.param_access import Placeholder
from tests.ranks import on_ranks
from tests.small import batch, stack, step


def found(model):
    """What a module of a unit has in the place of a parameter, and what parameters() lists."""
    layer = model.module[1].module[0]
    return type(layer.weight), [type(param) for param in layer.parameters()]


@on_ranks(2)
def test_between_steps_modules_in_rows_have_their_dtensors():
    model = stack(use_orig_params=True)
    assert found(model) == (DTensor, [DTensor] * 2)
    loss = model(batch()).pow(2).sum()
    assert found(model)[0] is Placeholder  # a checkpoint may ask for it in the backward
    loss.backward()
    assert found(model) == (DTensor, [DTensor] * 2)


@on_ranks(2)
def test_an_evaluation_does_not_show_what_a_backward_may_need():
    model = stack(use_orig_params=True)
    loss = model(batch()).pow(2).sum()
    with torch.no_grad():
        model(batch())
    assert found(model)[0] is Placeholder
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(batch(5))
    assert found(model)[0] is Placeholder
    loss.backward()
    assert found(model)[0] is DTensor


@on_ranks(2)
def test_a_look_without_gradients_leaves_them_as_they_were():
    model = stack(use_orig_params=True)
    with torch.no_grad():
        model.state_dict()
        with FSDP.summon_full_params(model, recurse=False):
            assert found(model)[0] is DTensor
    assert found(model) == (DTensor, [DTensor] * 2)


@on_ranks(2)
def test_a_backward_that_was_broken_shows_them_at_once():
    model = stack(use_orig_params=True)
    handle = model.module[2].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    handle.remove()
    assert found(model)[0] is DTensor
    step(model)


@on_ranks(2)
def test_readers_are_waited_for_whenever_control_returns():
    """After a forward, a backward and an exception the program may change parameters."""
    model, waits = stack(), []
    with patch.object(idle, "wait_for_readers", lambda: waits.append("wait")):
        loss = model(batch()).pow(2).sum()
        waits.append("forward")
        loss.backward()
        waits.append("backward")
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(batch(5))
    assert waits == ["wait", "forward", "wait", "backward", "wait"]
