"""layers.py: which methods of which layers are called at a moment, and in which order."""

from contextlib import contextmanager

import pytest

from minifsdp.core.layers import Call, Layer, Moments

pytestmark = pytest.mark.direct


class Noted(Layer):
    """Notes what it is called for."""

    def __init__(self, log):
        self.log = log

    def after_forward(self, call, output):
        self.log.append(type(self).__name__)
        return [*output, type(self).__name__]

    @contextmanager
    def around_forward(self, call):
        self.log.append(f"enter {type(self).__name__}")
        yield
        self.log.append(f"leave {type(self).__name__}")


class First(Noted):
    def before_forward(self, call):
        self.log.append("before")


class Second(Noted):
    def idle(self, graph):
        self.log.append(graph)


class Silent(Layer):
    """Overrides nothing."""


def test_a_moment_has_the_methods_that_layers_override_and_no_others():
    moments = Moments([First([]), Silent(), Second([])])
    assert [type(method.__self__) for method in moments.before_forward] == [First]
    assert [type(method.__self__) for method in moments.idle] == [Second]
    called = {name for name, methods in vars(moments).items() if methods} - {"layers"}
    assert called == {"before_forward", "after_forward", "around_forward", "idle"}


def test_without_layers_there_is_nothing_to_call():
    assert not any(vars(Moments()).values()) and repr(Moments()) == ""


def test_layers_are_called_in_their_order_and_after_a_forward_in_the_reverse():
    log, output = [], []
    moments = Moments([First(log), Second(log)])
    for method in moments.after_forward:
        output = method(None, output)
    assert log == output == ["Second", "First"]


@pytest.mark.parametrize("kinds", [(First,), (First, Second)])
def test_a_forward_runs_in_the_contexts_of_all_layers(kinds):
    log = []
    moments = Moments([kind(log) for kind in kinds])
    names = [kind.__name__ for kind in kinds]

    def run(x, more=0):
        log.append("run")
        return x + more

    assert moments.run(None, run, (1,), {"more": 2}) == 3
    expected = [f"enter {name}" for name in names]
    assert log == [*expected, "run", *(f"leave {name}" for name in reversed(names))]


def test_the_table_says_who_is_called_when():
    lines = repr(Moments([First([]), Second([])])).splitlines()
    assert [line.split() for line in lines] == [
        ["before_forward", "First"],
        ["around_forward", "First,", "Second"],
        ["after_forward", "Second,", "First"],
        ["idle", "Second"],
    ]


def test_every_moment_of_a_layer_is_bound():
    """Else a layer that overrides it would never be called, and nobody would know."""
    moments = {name for name, value in vars(Layer).items() if callable(value)}
    assert moments == {*vars(Moments())} - {"layers"}


def test_each_call_has_notes_of_its_own():
    class Unit:
        unsharded = object()

    one, two = (Call(Unit, None, in_order=True, outermost=False) for _ in range(2))
    one.notes["version"] = 1
    assert not two.notes and one.unsharded is Unit.unsharded and one.first <= two.first
