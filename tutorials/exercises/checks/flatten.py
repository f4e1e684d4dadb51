"""Checks of flatten.py."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check

SHAPES = [(2, 3), (), (4,), (0, 5), (1, 2, 2)]


def _order(what: str, want: Any, got: Any) -> str | None:
    if "transposed" in what and isinstance(got, torch.Tensor) and got.shape == want.shape:
        return "the elements come in the order of memory, and should come in row-major order"
    both = isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    if both and want.dtype == got.dtype and sorted(want.tolist()) == sorted(got.tolist()):
        return "all elements are there, and should come in row-major order"
    if "afterwards" in what:
        return "they are only read: whoever calls this may still use them"
    if what == "needs a gradient":
        return "the flat tensor is new, and no part of the graph of its parts: detach them"
    if what == "shares memory with its only part":
        return "it is a view, so that freeing the original would free nothing"
    return None


@check("flatten.1", because=_order)
def elements_in_row_major_order() -> Iterator[Any]:
    from minifsdp.core.flatten import flatten

    parts = [torch.rand(shape) for shape in SHAPES]
    yield f"flatten of {SHAPES}", flatten(parts)
    yield "the tensors themselves, afterwards", parts
    yield "flatten of one transposed [3, 2]", flatten([torch.rand(2, 3).t()])
    yield "flatten of bfloat16", flatten([torch.rand(3).bfloat16(), torch.rand(1, 2).bfloat16()])
    one = torch.rand(4)
    yield "shares memory with its only part", flatten([one]).data_ptr() == one.data_ptr()
    trained = torch.rand(2, 2, requires_grad=True)
    yield "needs a gradient", flatten([trained, trained]).requires_grad


def _shared(what: str, want: Any, got: Any) -> str | None:
    if "after flat was filled" in what:
        return "the pieces are copies, and should be views of the memory of flat"
    if "autograd" in what:
        return (
            "all views come from one split, whose last piece is the padding (see the docstring): "
            "the engine takes their gradients where autograd would join them"
        )
    if "gradient" in what:
        return "autograd has to see the views as operations on flat, so do not detach"
    if "padding" in what or isinstance(got, dict):
        return "the shapes come first, and the padding is the rest"
    return None


@check("flatten.2", because=_shared)
def views_share_memory_and_gradient() -> Iterator[Any]:
    from minifsdp.core.flatten import unflatten

    shapes = [torch.Size(shape) for shape in SHAPES]
    numel = sum(shape.numel() for shape in shapes)
    flat = torch.rand(numel)
    yield f"views of {SHAPES}", unflatten(flat, shapes)
    padded = torch.rand(numel + 3, requires_grad=True)
    views = unflatten(padded, shapes)
    yield "views, with 3 elements of padding", views
    sum((view * view).sum() for view in views).backward()
    yield "the gradient of flat, with 3 elements of padding", padded.grad
    memory = torch.rand(numel)
    views = unflatten(memory, shapes)
    memory.fill_(7)
    yield "views after flat was filled with 7", views
    views = unflatten(padded, shapes)
    made_by: set[Any] = {view.grad_fn.next_functions[0][0] for view in views}
    yield "operations of autograd that the views come from", len(made_by)
    joined: list[int] = []
    made_by.pop().register_prehook(lambda grads: joined.append(len(grads)))
    torch.autograd.grad(sum(view.sum() for view in views), padded)
    yield "gradients that autograd joins there, with that of the padding", joined
    yield (
        "views of bfloat16",
        unflatten(torch.rand(6).bfloat16(), [torch.Size((2, 2)), torch.Size(())]),
    )
