"""broken_backward.py: an exception that ends a backward is noticed at once, and an end is none."""

from unittest.mock import patch

import pytest

from minifsdp.core.layers import Layer
from tests.ranks import on_ranks
from tests.small import batch, stack, step
from tests.test_hooks import Boom, every_strategy, fragile


class Heard(Layer):
    def __init__(self):
        self.words = []

    def broken(self):
        self.words.append("broken")

    def complete(self, reductions):
        self.words.append("complete")


@on_ranks(2)
def test_layers_hear_of_an_exception_before_the_program_goes_on():
    model, heard = stack(), Heard()
    engine = model.engine
    engine.use([*engine.moments.layers, heard])
    step(model)
    assert heard.words == ["complete"]
    handle = model.module[2].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch()).sum().backward()
    handle.remove()
    assert heard.words == ["complete", "broken"]
    step(model)
    assert heard.words == ["complete", "broken", "complete"]


@every_strategy
@on_ranks(2)
def test_parameters_lists_no_views_after_it(strategy):
    model, _ = fragile(strategy)
    listed = [*model.parameters()]
    loss = model(batch()).pow(2).sum()
    with patch.object(Boom, "armed", True), pytest.raises(ValueError, match="boom in backward"):
        loss.backward()
    assert list(map(id, model.parameters())) == list(map(id, listed))
    assert not any(unit.shows_views for unit in model.engine.units)


@on_ranks(2)
def test_an_end_that_fails_is_a_broken_backward():
    """Not autograd, but what comes after its last operation."""
    model, heard = stack(), Heard()
    engine = model.engine
    engine.use([*engine.moments.layers, heard])
    with (
        patch.object(engine.gradients, "finish", lambda: 1 / 0),
        pytest.raises(ZeroDivisionError),
    ):
        model(batch()).sum().backward()
    assert heard.words == ["broken"]
    step(model)
    assert heard.words == ["broken", "complete"]
