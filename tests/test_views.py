"""views.py: views of the unsharded flat parameter, and one gradient of all of them."""

from contextlib import contextmanager

import pytest
import torch

from minifsdp.core.views import SplitViews, make_views
from tests.lone_unit import lone_unit


def made(lone):
    if not lone.memory:
        lone.fill()
    return SplitViews().make(lone.unit)


@pytest.mark.direct
class TestDirectly:
    def test_each_parameter_has_a_view_of_its_shape_in_the_same_memory(self):
        with lone_unit() as lone:
            weight, scale, bias = made(lone)
            assert weight.tolist() == [[1, 2, 3], [4, 5, 6]]
            assert scale.item() == 7 and scale.shape == torch.Size([])
            assert bias.tolist() == [8, 9, 10]
            lone.unit.unsharded.data.zero_()  # as another gather would write there
            assert weight.sum() == scale == bias.sum() == 0

    def test_the_gradients_arrive_in_one_tensor_with_zeros_where_there_is_none(self):
        with lone_unit(ranks=3) as lone:  # there are two elements of padding
            _, scale, bias = made(lone)
            (scale + bias.sum()).backward()
            assert SplitViews().has_gradient(lone.unit)
            grad = SplitViews().take_gradient(lone.unit)
            assert grad.tolist() == [0] * 6 + [1] + [1] * 3 + [0] * 2
            assert not SplitViews().has_gradient(lone.unit), "it is taken once"

    def test_a_module_that_runs_twice_has_the_sum(self):
        with lone_unit() as lone:
            first, second = made(lone), made(lone)
            (first[1] + 2 * second[1]).backward()
            assert SplitViews().take_gradient(lone.unit)[6] == 3

    def test_what_is_dropped_is_not_there_any_more(self):
        with lone_unit() as lone:
            made(lone)[1].backward()
            SplitViews().drop_gradient(lone.unit)
            assert not SplitViews().has_gradient(lone.unit)
            made(lone)[1].backward()
            assert SplitViews().take_gradient(lone.unit)[6] == 1, "the dropped one is no part of it"


@contextmanager
def inference_with_grad():
    with torch.inference_mode(), torch.enable_grad():  # of which only the first counts
        yield


@pytest.mark.direct
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, inference_with_grad])
def test_views_that_an_evaluation_makes_lead_gradients_on(mode):
    """A reentrant checkpoint may run again with them."""
    with lone_unit(ranks=1) as lone:
        with mode():
            make_views(lone.unit)
        assert all(view.grad_fn is not None for view in lone.unit.views)
