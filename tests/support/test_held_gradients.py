"""held_gradients.py: a gradient is not reduced as long as there is a reason to wait.
(Who has such reasons: test_no_sync.py, checks/test_rank_agreement.py.)"""

import pytest
import torch
import torch.distributed as dist

from minifsdp import MixedPrecision
from minifsdp.comm.pieces import Pieces
from minifsdp.core.unit_state import Purpose
from minifsdp.support.held_gradients import no_gradient
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks
from tests.small import gathered_gradients, reductions, stack

WAITS = "somebody else decides"


def gradient(unit, value):
    """The gradient of a unit on this rank: all of it has one value."""
    return torch.full_like(no_gradient(unit), float(value))


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_what_waits_is_held_and_summed_and_reduced_when_asked_for(rows):
    model = stack(use_orig_params=rows)
    engine, (unit, without, other) = model.engine, model.engine.units[1:4]
    engine.start(Purpose.TRAIN)
    unit.waits.add(WAITS)
    other.hold(WAITS)  # a reason to stay gathered, which is another matter
    with reductions() as started:
        engine.gradients.take(unit, gradient(unit, 1 + dist.get_rank()))
        part = gradient(unit, 10)
        engine.gradients.take(unit, Pieces([part[:5], part[5:]]))
        engine.gradients.take(other, gradient(other, 7))
        assert [reduction.unit for reduction in started] == [other]
        engine.gradients.reduce_held(unit)
        engine.gradients.reduce_held(without)
        assert [reduction.unit for reduction in started] == [other, unit, without]
    assert not engine.gradients.held and engine.stats.reductions == 3
    engine.gradients.finish()
    found = gathered_gradients(model)
    for of, value in ((unit, 11.5), (other, 7), (without, 0)):
        grads = [grad for name, grad in found.items() if name.startswith(f"{of.name}.")]
        assert grads and all((grad == value).all() for grad in grads), of.label


@on_ranks(2)
def test_a_backward_that_fails_drops_what_waits():
    model = stack()
    engine, unit = model.engine, model.engine.units[1]
    unit.waits.add(WAITS)
    engine.gradients.take(unit, gradient(unit, 1))
    engine.fail()
    assert not engine.gradients.held


@on_ranks(2)
def test_no_gradient_of_rows_is_marked():
    model = stack(use_orig_params=True)
    unit = model.engine.units[1]
    engine = model.engine
    engine.start(Purpose.TRAIN)
    zeros = no_gradient(unit)
    assert zeros.device == device() and not zeros.any() and unit.has_unused
    assert [*unit.layout.unused(zeros)] == [0, 1]


@pytest.mark.direct
def test_a_rank_without_a_gradient_sends_zeros_of_its_dtype():
    with lone_unit(ranks=3, precision=MixedPrecision(torch.bfloat16)) as lone:
        grad = no_gradient(lone.unit)
        assert grad.dtype is torch.bfloat16 and grad.tolist() == [0] * 12
        assert not grad.requires_grad
