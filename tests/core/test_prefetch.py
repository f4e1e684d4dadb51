"""prefetch.py: what users write, and orders of units. (When units are gathered: test_engine.py.)"""

import pytest

from minifsdp.core import ForwardPrefetch
from minifsdp.core.prefetch import Order, forward_prefetch_of

from .common import StubUnit

pytestmark = pytest.mark.direct
PRE, POST = ForwardPrefetch.FORWARD_PRE, ForwardPrefetch.FORWARD_POST


@pytest.mark.parametrize("host_runs_ahead", [True, False])
def test_what_users_write_means(host_runs_ahead):
    for given, meant in ((True, PRE), (False, None), (PRE, PRE), (POST, POST)):
        assert forward_prefetch_of(given, host_runs_ahead) is meant
    assert forward_prefetch_of(None, host_runs_ahead) is (None if host_runs_ahead else PRE)


def test_an_order_tells_what_came_next_in_the_last_pass():
    a, b, c = (StubUnit(label) for label in "abc")
    order = Order()
    order.start()
    assert [order.visit(unit) for unit in (a, b, a, c)] == [None] * 4, "there was no pass before"
    order.start()
    assert order.upcoming() is a
    assert [order.visit(unit) for unit in (a, b, a, c)] == [b, a, c, None]
    order.start()
    assert [order.visit(unit) for unit in (b, a, b)] == [a, c, a], "it looks again from the start"
    order.forget()
    order.start()
    assert [order.visit(unit) for unit in (a, b, a, c)] == [b, a, c, None], "what failed is no pass"
    order.start()
    assert order.visit(StubUnit("new")) is None
