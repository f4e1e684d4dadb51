"""Whoever may change parameters waits until other ranks have read them; see transport.py."""

from minifsdp.comm.transport import wait_for_readers
from minifsdp.layers import Layer


class Readers(Layer):
    """Waits for them before control returns to the program, whose optimizer writes to shards."""

    def idle(self, graph: bool) -> None:
        """The program may change parameters now."""
        wait_for_readers()
