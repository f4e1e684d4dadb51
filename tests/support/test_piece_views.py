"""piece_views.py: gradients are kept as autograd computes them, one for each parameter."""

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.pieces import whole
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks


def lone_views(lone):
    if not lone.unit.unsharded.storage.size():
        lone.fill()
    return lone.unit.view_maker.make(lone.unit)


def taken(lone):
    return lone.unit.view_maker.take_gradient(lone.unit)


@pytest.mark.direct
class TestDirectly:
    def test_a_gradient_is_where_autograd_has_left_it(self):
        with lone_unit() as lone:
            weight, _, _ = lone_views(lone)
            grad = torch.randn(2, 3)
            weight.backward(grad)
            pieces = taken(lone).pieces
            assert pieces[0].data_ptr() == grad.data_ptr()
            assert [piece.tolist() for piece in pieces[1:]] == [[0], [0, 0, 0], []]
            assert lone.unit.unsharded.flat_param.grad is None
            assert not lone.unit.view_maker.has_gradient(lone.unit), "it is taken once"

    def test_a_view_that_is_not_contiguous_sends_its_elements_in_order(self):
        with lone_unit() as lone:
            weight, _, _ = lone_views(lone)
            grad = torch.arange(6.0).view(3, 2)
            weight.t().backward(grad)
            assert taken(lone).pieces[0].tolist() == [0, 2, 4, 1, 3, 5]

    def test_a_module_that_runs_twice_has_the_sum_and_what_autograd_holds_is_not_changed(self):
        with lone_unit() as lone:
            first, second = lone_views(lone), lone_views(lone)
            held = torch.ones(3)
            second[2].backward(held)  # this very tensor arrives first
            (first[2] * 2).backward(held)
            second[1].backward()
            pieces = taken(lone).pieces
            assert [p.tolist() for p in pieces] == [[0] * 6, [1], [3, 3, 3], []]
            assert held.tolist() == [1, 1, 1]

    def test_the_hook_is_called_when_all_uses_are_done(self):
        with lone_unit() as lone:
            told = []
            lone.unit.on_gradient = lambda: told.append(whole(taken(lone)).sum())
            first, second = lone_views(lone), lone_views(lone)
            (first[1] + 2 * second[1]).backward()
            assert told == [3.0]

    def test_views_are_of_the_memory_and_a_change_is_refused(self):
        with lone_unit() as lone:
            views = lone_views(lone)
            assert all(view._base is lone.unit.unsharded.flat_param for view in views)
            with pytest.raises(RuntimeError, match="modified inplace"):
                views[0].mul_(2)


@on_ranks(2)
def test_frozen_parameters_of_a_unit_in_rows_have_no_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(device())
    model[0].weight.requires_grad_(False)
    model = FSDP(model, use_orig_params=True)
    unit = model.engine.root
    seen = []
    model[1].register_forward_pre_hook(
        lambda *_: seen.append([view.requires_grad for view in unit.views])
    )
    model(torch.randn(5, 3, device=device())).sum().backward()
    assert seen == [[False, True, True, True]]
    grads = [param.grad is not None for param in model.parameters()]
    assert grads == [False, True, True, True]
