"""Hooks in a running backward, at the moments that FSDP needs.

``loss.backward()`` is one call, and FSDP has to act in the middle of it. Autograd walks a graph of
*nodes*, one for each operation, from the loss back to the parameters. It offers hooks on the way::

    loss <- ... <- output <- [the operations of a module] <- inputs <- ... <- leaf
                   |                                         |                |
                   before_gradient_of                        after_gradients_of   when_complete
    and when the last node has run: at_end_of_backward

All hooks of the core are registered in this file.
"""

from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook


def before_gradient_of(output: Tensor, hook: Callable[[object], None], first: int) -> None:
    """Call ``hook`` when a gradient has reached ``output``, before the operation that computed
    ``output`` runs its backward. A leaf was computed by no operation, so it gets no hook.

    Args:
        first: the sequence number of the first operation that counts. An older one was not computed
            by this module (a skip connection): its gradient is complete only long after those of
            the module's own operations.
    """
    # A hook on the node, not on the tensor. Where a module gets its own output as an input again,
    # the tensor has a hook of `after_gradients_of` too. That one ends the later call, so it has to
    # run first, and tensor hooks run before the node's.
    for tensor in (output, output._base):
        # The base as well: an in-place operation on a view gives the view another node, and the
        # base keeps the one from before.
        node = None if tensor is None else tensor.grad_fn
        if node is not None and node._sequence_nr() >= first:
            node.register_prehook(hook)


def after_gradients_of(inputs: Sequence[Tensor], hook: Callable[[object], None]) -> None:
    """Call ``hook`` when a backward has computed the gradients of ``inputs``, all of which require
    one; those that it does not come to do not count. Does nothing if there are several and one is a
    leaf: torch's way to count them keeps a leaf and its hook for ever, and raises an error in
    ``autograd.grad()`` for the leaf."""
    alone = len(inputs) == 1  # then there is nothing to count
    if alone or not any(tensor.is_leaf for tensor in inputs):
        register_multi_grad_hook(inputs, hook, mode="any" if alone else "all")


def when_complete(leaf: Tensor, hook: Callable[..., None]) -> Node:
    """Call ``hook(leaf)`` each time a backward has gone through every use of ``leaf``.

    Returns:
        The node at the end of these ways. Whoever wants the calls has to keep it.
    """
    # Not a hook on the node: while one runs, autograd refers to the gradient, which could not be
    # freed. If no gradient has come, this one is called all the same.
    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return get_gradient_edge(leaf).node


def at_end_of_backward(callback: Callable[[], None]) -> "ref[object]":
    """Call ``callback`` after the last operation of the backward that is running. If an exception
    ends that backward, the call never comes.

    Returns:
        A weak reference to what autograd keeps until the backward is over, in one way or the other.
    """
    queued = partial(callback)  # a new object, so that autograd's reference is the only one
    Variable._execution_engine.queue_callback(queued)
    return ref(queued)
