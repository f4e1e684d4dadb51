"""One thread at a time runs a model.

The units of a root are gathered and freed in one order, for one forward or backward at a time. Two
threads in one model would free what the other one computes with. A program that has several
threads, such as a server, gives each a model and a process group of its own, or a lock.
"""

import threading

import torch

from minifsdp.hooks import Hooks
from minifsdp.layers import Layer
from minifsdp.unit import Unit


class OneThread(Layer):
    """Refuses a forward beside one, or beside a backward, that another thread runs."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._threads: dict[str, int] = {}  # the one that runs the outermost forward

    def enter(self, unit: Unit) -> None:
        """Raises RuntimeError: another thread runs the model."""
        if torch._C._current_graph_task_id() >= 0:
            return  # in a backward, which may run parts of a forward, perhaps in autograd's thread
        thread, hooks = threading.get_ident(), self._hooks
        beside = hooks.backward.running and not hooks.depth
        # In one operation, so that of two threads that come at the same time one is refused.
        if beside or self._threads.setdefault("forward", thread) != thread:
            raise RuntimeError(
                f"this model (root: {type(hooks.engine.root.module).__name__}) runs in another "
                f"thread at the same time. Its units are gathered and freed in one order, for one "
                f"forward or backward at a time. Let the threads take turns, with a "
                f"threading.Lock() around forward and backward, or give each thread a model and a "
                f"process group of its own."
            )

    def idle(self, graph: bool) -> None:
        """Another thread may have its turn."""
        self._threads.clear()
