"""engine.py: what the units of one root share, and the verbs with it."""

from dataclasses import replace

import pytest
import torch

from minifsdp import ShardingStrategy
from minifsdp.core.streams import CpuEvent, CpuStream, Streams
from minifsdp.core.unit_state import FORWARD, Purpose, TrainingState
from minifsdp.core.views import SplitViews
from tests.ranks import device, on_ranks
from tests.small import (
    batch,
    stack,
    step,
    storage,
)


@on_ranks(1)
def test_gathers_wait_for_what_the_optimizer_writes():
    model, log = stack(), []

    class Noted(CpuStream):
        def record_event(self):
            log.append("mark")
            return CpuEvent()

        def wait_event(self, event):
            log.append("wait")

        def submit(self, launch, label=""):
            log.append("gather")
            return super().submit(launch, label)

    if device().type == "cuda":
        pytest.skip("of the order of calls; the streams are placeholders")
    stream = Noted()
    streams = replace(Streams.on(device()), compute=stream, unshard=stream)
    model.engine.streams = model.engine.parameters.streams = streams
    model.engine.start(Purpose.TRAIN)
    model.engine.parameters.unshard(model.engine.units[1], FORWARD)
    assert log.index("mark") < log.index("wait") < log.index("gather")


@pytest.mark.parametrize(
    "strategy, gathers", [("FULL_SHARD", 9), ("SHARD_GRAD_OP", 5), ("NO_SHARD", 0)]
)
@on_ranks(2)
def test_collectives_of_a_step_are_as_many_as_the_strategy_says(strategy, gathers):
    """n units and the root: 2n + 1 gathers and n + 1 reductions under FULL_SHARD."""
    model = stack(4, sharding_strategy=ShardingStrategy[strategy])
    step(model)
    assert model.engine.stats.all_gathers == gathers
    assert model.engine.stats.reductions == 5


def interrupt(*_):
    raise InterruptedError


@on_ranks(2)
def test_after_a_backward_that_failed_units_are_idle_and_an_evaluation_keeps_none():
    model = stack()
    handle = model.module[2].register_full_backward_hook(interrupt)
    with pytest.raises(InterruptedError):
        step(model)
    handle.remove()
    unit = model.engine.units[1]
    unit.view_maker = SplitViews()
    flat_param = unit.unsharded.flat_param
    flat_param.grad = torch.ones_like(flat_param)  # a part, as a reentrant checkpoint leaves it
    with torch.no_grad():
        model.eval()(batch())
    assert all(unit.state.training is TrainingState.IDLE for unit in model.engine.units)
    assert not any(map(storage, model.engine.units))
    assert not unit.view_maker.has_gradient(unit)
