"""autograd_hooks.py: each door opens at its moment, and what dies is known to be dead."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from minifsdp.core.autograd_hooks import (
    after_gradients_of,
    at_end_of_backward,
    before_gradient_of,
    when_complete,
)


class Loud(torch.autograd.Function):
    """The identity; says when its backward runs, or fails there."""

    @staticmethod
    def forward(ctx, x: Tensor, heard: list, word: str) -> Tensor:
        ctx.heard, ctx.word = heard, word
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.word == "boom":
            raise ValueError("boom")
        ctx.heard.append(ctx.word)
        return grad, None, None


def test_every_hook_is_called_at_its_moment():
    heard: list[str] = []
    leaf = torch.ones(2, requires_grad=True)
    inputs = Loud.apply(leaf, heard, "what is before the inputs")
    output = Loud.apply(inputs, heard, "the operations of a module")
    when_complete(leaf, lambda *_: heard.append(f"complete: {leaf.grad.tolist()}"))
    after_gradients_of([inputs], lambda _: heard.append("inputs have theirs"))
    before_gradient_of(output, lambda _: heard.append("before the output"), 0)

    def begin(grad: Tensor) -> None:
        at_end_of_backward(lambda: heard.append("the end"))

    loss = Loud.apply(output, heard, "the loss").sum()
    loss.register_hook(begin)
    loss.backward()
    assert heard == [
        "the loss",
        "before the output",
        "the operations of a module",
        "inputs have theirs",
        "what is before the inputs",
        "complete: [1.0, 1.0]",
        "the end",
    ]


def test_a_leaf_and_no_inputs_have_no_door():
    leaf, heard = torch.ones(2, requires_grad=True), []
    before_gradient_of(leaf, heard.append, 0)
    after_gradients_of([], heard.append)
    leaf.sum().backward()
    assert heard == []


def test_an_input_that_is_a_leaf_is_heard_and_not_kept():
    leaf, heard = torch.ones(2, requires_grad=True), []
    after_gradients_of([leaf], heard.append)
    (leaf * 2).sum().backward()
    torch.autograd.grad((leaf * 3).sum(), leaf)
    assert [grad.tolist() for grad in heard] == [[2, 2], [3, 3]]
    leaf = weakref.ref(leaf)
    gc.collect()
    assert leaf() is None


def test_of_several_inputs_of_which_one_is_a_leaf_nothing_is_heard():
    leaf, heard = torch.ones(2, requires_grad=True), []
    other = leaf * 2
    after_gradients_of([leaf, other], heard.append)
    torch.autograd.grad((leaf * other).sum(), leaf)
    assert heard == []
    leaf, other = weakref.ref(leaf), None
    gc.collect()
    assert leaf() is None


def test_of_several_inputs_without_a_leaf_the_last_gradient_is_heard():
    heard: list = []
    one, other = (torch.ones(2, requires_grad=True) * 2 for _ in range(2))
    one.register_hook(lambda _: heard.append("one has its"))
    other.register_hook(lambda _: heard.append("other has its"))
    after_gradients_of([one, other], lambda grads: heard.append(f"{len(grads)} have theirs"))
    (one + Loud.apply(other, heard, "on the way to other")).sum().backward()
    assert heard == ["on the way to other", "other has its", "one has its", "2 have theirs"]


class NoGradient(torch.autograd.Function):
    """The identity, of which nothing goes back."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None


def test_a_leaf_that_gets_no_gradient_is_complete_as_well():
    leaf, heard = torch.ones(2, requires_grad=True), []
    node = when_complete(leaf, lambda *_: heard.append(leaf.grad))
    NoGradient.apply(leaf).sum().backward()
    assert heard == [None]
    del node


def test_what_was_handed_on_is_not_heard_and_the_base_of_a_view_is():
    heard: list[str] = []
    older = torch.ones(2, requires_grad=True) * 2
    first = torch._C._autograd._get_sequence_nr()
    view = (older * 3).view(2, 1)
    before_gradient_of(older, lambda _: heard.append("older"), first)
    before_gradient_of(view, lambda _: heard.append("view"), first)
    view.mul_(2)  # its operation is another one now
    view.sum().backward()
    assert heard == ["view"]


def test_nor_is_the_base_of_a_view_that_was_handed_on():
    heard: list[str] = []
    older = Loud.apply(torch.ones(2, requires_grad=True), heard, "older")
    first = torch._C._autograd._get_sequence_nr()
    before_gradient_of(older.view(2, 1), lambda _: heard.append("never asked"), first)
    view = older.view(2, 1)
    before_gradient_of(view, lambda _: heard.append("view"), first)
    view.sum().backward()
    assert heard == ["view", "older"]


def test_an_output_that_is_an_input_again_is_heard_after_that_input():
    """A frozen module called twice: its second call ends before its first one's backward begins."""
    heard: list[str] = []
    first = torch.ones(2, requires_grad=True) * 2
    before_gradient_of(first, lambda _: heard.append("first call's output"), 0)
    second = first * 3
    after_gradients_of([first], lambda _: heard.append("second call's input"))
    second.sum().backward()
    assert heard == ["second call's input", "first call's output"]


def test_whether_a_backward_comes_to_a_leaf_can_be_asked_inside_of_it():
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    nodes = [when_complete(leaf, lambda *_: None) for leaf in (used, unused)]
    found = []
    both = used * 2 + unused
    output = used * 2
    asked = torch._C._will_engine_execute_node  # as checks/rank_agreement.py does
    output.register_hook(lambda _: found.extend(asked(node) for node in nodes))
    output.sum().backward()
    assert found == [True, False]
    del both


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_comes_to_its_end_or_dies_and_both_can_be_seen(fails):
    leaf, heard, queued = torch.ones(2, requires_grad=True), [], []
    output = Loud.apply(leaf, [], "boom" if fails else "")

    def end() -> None:
        heard.append("the end")
        assert queued[0]() is not None

    def begin(grad: Tensor) -> None:
        queued.append(at_end_of_backward(end))
        assert queued[0]() is not None and not heard

    output.register_hook(begin)
    if fails:
        with pytest.raises(ValueError, match="boom"):
            output.sum().backward()
    else:
        output.sum().backward()
    assert heard == ([] if fails else ["the end"])
    assert queued[0]() is None  # though `end` is still there


def test_a_hook_of_a_leaf_goes_with_its_node():
    class Held:
        def hear(self) -> None: ...

    held, leaf = Held(), torch.ones(2, requires_grad=True)
    node = when_complete(leaf, held.hear)
    alive = weakref.ref(held)
    del held
    assert alive() is not None
    del leaf, node
    gc.collect()
    assert alive() is None
