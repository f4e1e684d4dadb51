"""What is looked for once, before the first step of a model.

Some mistakes can be seen only when all wrapping is over, and cannot come up later: members.py
refuses changes of a wrapped model at once.
"""

from minifsdp.checks.held_values import check_held
from minifsdp.checks.members import check_lists, check_tree
from minifsdp.checks.on_meta import check_on_meta
from minifsdp.engine import Engine
from minifsdp.layers import Layer
from minifsdp.support.shard_changes import check_on_host
from minifsdp.unit import Unit
from minifsdp.unit_state import Purpose


class FirstStep(Layer):
    """Checks a model at each start, till its first forward is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._over = engine, False

    def start(self, purpose: Purpose) -> None:
        """Raises RuntimeError or ValueError: see the checks."""
        if self._over:
            return
        root, units = self._engine.root.module, self._engine.units
        check_tree(root)
        check_lists(units)
        for unit in units:
            if unit.offload_from is not None:
                check_on_host(unit)
        check_on_meta(root)
        check_held(root)

    def end_of_forward(self, unit: Unit) -> None:
        """The first forward is over."""
        self._over = True
