"""flatten.py: many tensors <-> one 1-D tensor."""

import pytest
import torch

from minifsdp.core.flatten import check_flattenable, flatten, unflatten

pytestmark = pytest.mark.direct
SHAPES = [torch.Size(shape) for shape in ((2, 3), (), (0, 4), (5,), (1, 1, 2))]


def tensors():
    return [torch.randn(shape) for shape in SHAPES]


def test_unflatten_undoes_flatten_for_every_kind_of_shape():
    originals = tensors()
    views = unflatten(flatten(originals), SHAPES)
    assert len(views) == len(originals)
    for view, original in zip(views, originals, strict=True):
        assert view.shape == original.shape and torch.equal(view, original)


def test_flattening_keeps_the_order_and_copies():
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)
    flat = flatten([a, b])
    assert flat.tolist() == [1, 2, 3]
    a.zero_()
    assert flat.tolist() == [1, 2, 3]


def test_a_transposed_parameter_is_laid_out_by_its_indices():
    assert flatten([torch.tensor([[1, 2], [3, 4]]).t()]).tolist() == [1, 3, 2, 4]


def test_views_share_the_flat_tensors_memory():
    flat = torch.zeros(14)
    for view in unflatten(flat, SHAPES):
        view.add_(1)
    assert flat.sum() == sum(shape.numel() for shape in SHAPES)


def test_the_gradient_arrives_flat_in_order_and_with_zeros_for_the_padding():
    numel = sum(shape.numel() for shape in SHAPES)
    flat = torch.randn(numel + 3, requires_grad=True)
    weights = torch.arange(1.0, numel + 1)
    views = unflatten(flat, SHAPES)
    sum((v * w).sum() for v, w in zip(views, unflatten(weights, SHAPES), strict=True)).backward()
    assert torch.equal(flat.grad, torch.cat([weights, torch.zeros(3)]))


def test_a_parameter_that_was_not_used_gets_a_zero_gradient():
    flat = torch.randn(5, requires_grad=True)
    first, _ = unflatten(flat, [torch.Size([2]), torch.Size([3])])
    first.sum().backward()
    assert flat.grad.tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "odd, attribute, value",
    [
        (torch.zeros(2, dtype=torch.float64), "dtype", "torch.float64: b.odd"),
        (torch.zeros(2, device="meta"), "device", "meta: b.odd"),
        (torch.zeros(2, requires_grad=True), "requires_grad", "True: b.odd"),
    ],
)
def test_what_cannot_be_flattened_is_refused_with_every_name(odd, attribute, value):
    named = {"a.w": torch.zeros(2), "b.odd": odd, "c.w": torch.zeros(1)}
    with pytest.raises(ValueError, match=attribute) as error:
        check_flattenable(named)
    assert value in str(error.value) and "a.w, c.w" in str(error.value)


def test_another_order_of_memory_is_refused():
    named = {"a.w": torch.zeros(2, 3), "b.odd": torch.zeros(3, 2).t()}
    with pytest.raises(ValueError, match=r"'b\.odd' has shape \[2, 3\] and strides \[1, 2\]"):
        check_flattenable(named)


def test_what_can_be_flattened_passes():
    check_flattenable({})
    check_flattenable({"a": torch.zeros(4, 3, 1, 1).to(memory_format=torch.channels_last)})
    check_flattenable({"a": torch.zeros(2), "b": torch.zeros(())})
