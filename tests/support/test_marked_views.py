"""marked_views.py: in rows, the gradient of a unit says which parameters this rank has not used.
(More: promises/test_unused.py.)"""

from types import SimpleNamespace

import pytest
import torch

from minifsdp.comm.pieces import whole
from minifsdp.rows import Rows
from minifsdp.support.marked_views import MarkedPieceViews, MarkedSplitViews
from minifsdp.support.unsharded_storage import UnshardedFlatParams

MAKERS = pytest.mark.parametrize("maker", [MarkedPieceViews, MarkedSplitViews])
SHAPES = [torch.Size([4, 2]), torch.Size([3]), torch.Size([0, 5])]


def in_rows(trained=(True, True, True), shapes=SHAPES):
    """A unit of a weight, a bias and an empty parameter, gathered by two ranks."""
    layout = Rows(shapes, trained, 2)
    params = [(torch.arange(shape.numel()) + 1.0).view(shape) for shape in shapes]
    flat = layout.flatten(params)
    unsharded = UnshardedFlatParams(lambda *_: None).add(flat, any(trained), False, layout)
    return SimpleNamespace(
        layout=layout, unsharded=unsharded, device=flat.device, has_unused=False, label="'a'"
    )


def unused(unit, grad):
    """The numbers of the parameters that are marked."""
    return unit.layout.unused(whole(grad))


@MAKERS
@pytest.mark.direct
class TestDirectly:
    def test_what_has_a_gradient_is_not_marked(self, maker):
        unit, views = in_rows(), maker()
        weight, bias, _ = views.make(unit)
        (weight.sum() + bias.sum()).backward()
        grad = views.take_gradient(unit)
        assert unused(unit, grad) == [] and not unit.has_unused
        assert whole(grad)[:8].tolist() == [1] * 8

    @pytest.mark.parametrize("used", [0, 1])
    def test_what_has_none_is(self, maker, used):
        unit, views = in_rows(), maker()
        views.make(unit)[used].sum().backward()
        grad = views.take_gradient(unit)
        assert unused(unit, grad) == [1 - used] and unit.has_unused
        assert whole(grad).sum() == SHAPES[used].numel(), "marks are zeros"
        assert not views.has_gradient(unit)

    @pytest.mark.parametrize("used", [0, 1])
    def test_padding_between_parameters_is_none_of_them(self, maker, used):
        unit, views = in_rows((True, True), [torch.Size([3, 3]), torch.Size([5])]), maker()
        views.make(unit)[used].sum().backward()
        assert unused(unit, views.take_gradient(unit)) == [1 - used]

    def test_what_one_of_two_calls_has_used_is_used(self, maker):
        unit, views = in_rows(), maker()
        first, second = views.make(unit), views.make(unit)
        (first[0].sum() + second[1].sum()).backward()
        assert unused(unit, views.take_gradient(unit)) == []

    def test_each_gradient_is_marked_anew(self, maker):
        unit, views = in_rows(), maker()
        for used in (0, 1):
            views.make(unit)[used].sum().backward()
            assert unused(unit, views.take_gradient(unit)) == [1 - used]

    def test_what_was_dropped_has_not_been_used(self, maker):
        unit, views = in_rows(), maker()
        views.make(unit)[0].sum().backward()
        views.drop_gradient(unit)
        assert not views.has_gradient(unit)
        views.make(unit)[1].sum().backward()
        assert unused(unit, views.take_gradient(unit)) == [0]

    def test_what_is_frozen_has_views_and_no_gradient_and_no_mark(self, maker):
        unit, views = in_rows([False, True, True]), maker()
        weight, bias, _ = views.make(unit)
        assert weight.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]] and not weight.requires_grad
        (weight.sum() * bias.sum()).backward()
        grad = views.take_gradient(unit)
        assert whole(grad)[:3].tolist() == [36] * 3 and unused(unit, grad) == []

    def test_a_unit_that_is_frozen_has_views(self, maker):
        unit = in_rows([False] * 3)
        assert maker().make(unit)[1].tolist() == [1, 2, 3]
