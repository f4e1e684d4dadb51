"""Doors into autograd: how to act in the middle of a backward that somebody else runs.

``loss.backward()`` is one call, and what FSDP has to do in it has to be done inside. Autograd walks
a graph of *nodes*, one for each operation, from the loss to the parameters; and it has doors::

    loss <- ... <- output <- [the operations of a module] <- inputs <- ... <- leaf
                   |                                         |                |
                   before_gradient_of                        after_gradients_of   when_complete
    and, when there is nothing left to walk: at_end_of_backward

All that knows how autograd works inside is in this file, two names that are not public included.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook


def before_gradient_of(output: Tensor, hook: Callable[[object], None], first: int) -> None:
    """Call ``hook`` when a gradient has reached ``output``, before it goes on from there. A leaf
    has nowhere to go on to, and no hook.

    Args:
        first: number of the first operation that counts. What is older was handed on, as in a skip
            connection: its gradient comes long after that of what was computed here.
    """
    # Not the tensor's own hook. Where the output is an input of the same module once more, it has
    # one of `after_gradients_of`, which ends the later call; that has to come first, and does.
    if output.grad_fn is not None and output.grad_fn._sequence_nr() >= first:
        output.grad_fn.register_prehook(hook)
    # Who changes a view in place gives it another operation, and keeps that of its base.
    base = output._base
    if base is not None and base.grad_fn is not None and base.grad_fn._sequence_nr() >= first:
        base.grad_fn.register_prehook(hook)


def after_gradients_of(inputs: Sequence[Tensor], hook: Callable[[object], None]) -> None:
    """Call ``hook`` when all of ``inputs`` that will get a gradient have theirs."""
    register_multi_grad_hook(inputs, hook)


def when_complete(leaf: Tensor, hook: Callable[[], None]) -> Node:
    """Call ``hook`` each time that the gradient of ``leaf`` is complete, and in its ``grad``.

    Returns:
        The node that adds it up, for :func:`will_reach`.
    """
    register = leaf.register_post_accumulate_grad_hook
    register(lambda _: hook())  # type: ignore[no-untyped-call]
    return get_gradient_edge(leaf).node


def at_end_of_backward(
    callback: Callable[[], None], if_it_dies: Callable[[], None]
) -> Callable[[], bool]:
    """Call ``callback`` after the last operation of the backward that is under way, or
    ``if_it_dies`` when an exception has ended it.

    Returns:
        Whether this is still to come. Not so if an exception has ended the backward: autograd then
        drops what it was to call, and so the reference to it here is dead.
    """

    ended = False

    def call() -> None:
        nonlocal ended
        ended = True
        callback()

    Variable._execution_engine.queue_callback(call)
    held = weakref.ref(call, lambda _: None if ended else if_it_dies())
    return lambda: held() is not None


def will_reach(node: Node) -> bool:
    """Whether the backward that is under way comes to ``node``."""
    # torch's own multi-grad hooks ask the engine the same question.
    return torch._C._will_engine_execute_node(node)
