"""reduce.py and gradients.py: stages in their order, and one gradient on its way at a time. (With
ranks: test_parity.py.)"""

from types import SimpleNamespace

import torch

from minifsdp.core.gradients import Gradients
from minifsdp.core.reduce import Reduction
from minifsdp.core.streams import Streams


class Noted:
    """A stage that adds one, and logs when it starts and when it is waited for."""

    def __init__(self, log, name, travels=True, on_host=False):
        self.log, self.name, self.travels, self.on_host = log, name, travels, on_host
        self.stream = "reduce"

    def launch(self, unit, value):
        self.log.append(f"{unit.label} {self.name}")
        return value + 1, lambda: self.log.append(f"{unit.label} {self.name} is over")


def unit_of(label, stages, numel=2):
    shard = torch.nn.Parameter(torch.zeros(numel))
    return SimpleNamespace(label=label, stages=stages, sharded_flat_param=shard)


def test_what_does_not_travel_is_one_piece_with_the_stage_after_it():
    log, streams = [], Streams.on(torch.device("cpu"))
    cast, send, copy = Noted(log, "cast", travels=False), Noted(log, "send"), Noted(log, "copy")
    reduction = Reduction(unit_of("a", [cast, send, copy]), torch.zeros(3), streams)
    reduction.start()
    assert log == ["a cast", "a send"], "the backward goes on while it is sent"
    assert [sent.tolist() for sent in reduction.sent] == [[0] * 3, [1] * 3], "they are being read"
    assert not reduction.advance(), "no stage is left"
    assert log == ["a cast", "a send", "a send is over", "a copy"]
    assert reduction.sent is None, "what was sent may be freed"
    reduction.wait_for_result()
    assert log[-1] == "a copy is over" and reduction.value.tolist() == [3] * 3


def test_one_gradient_at_a_time_is_on_its_way():
    log, streams = [], Streams.on(torch.device("cpu"))
    gradients = Gradients(streams)
    units = [unit_of(label, [Noted(log, "send"), Noted(log, "copy")]) for label in "ab"]
    for unit in units:
        gradients.take(unit, torch.zeros(3))
    assert log == ["a send", "a send is over", "a copy", "b send"]
    assert all(unit.sharded_flat_param.grad is None for unit in units), "all or none"
    reductions = gradients.finish()
    assert [reduction.unit for reduction in reductions] == units
    assert log[4:] == ["b send is over", "b copy", "a copy is over", "b copy is over"]
    assert [unit.sharded_flat_param.grad.tolist() for unit in units] == [[2, 2]] * 2
    gradients.take(units[0], torch.zeros(3))
    gradients.finish()
    assert units[0].sharded_flat_param.grad.tolist() == [4, 4], "they add up"


def test_what_a_failed_backward_has_sent_is_waited_for_and_dropped():
    log, streams = [], Streams.on(torch.device("cpu"))
    gradients, unit = Gradients(streams), unit_of("a", [Noted(log, "send")])
    gradients.take(unit, torch.zeros(3))
    gradients.drop()
    assert log == ["a send", "a send is over"], "its memory must not be given away before"
    assert gradients.finish() == [] and unit.sharded_flat_param.grad is None
