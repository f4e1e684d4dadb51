"""Checks that run at each start until the first forward is over, and then no more.

Some mistakes can be seen only when all wrapping is over, and cannot come up later: members.py
refuses changes of a wrapped model at once. One of them is found here: parameters and buffers that
have no memory yet. ``fully_shard`` leaves on the meta device what is there, as torch's does. So a
rank never uses more memory than its part of the model takes, and the program sets the values::

    with torch.device("meta"):
        model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)                         # DTensors on meta
    model.to_empty(device="cuda")              # memory for this rank's rows
    model.init_weights()                       # or load_state_dict(state, assign=True)

What is wrong on one rank ends the start on all ranks: the others come to compare their models
(rank_agreement.py), and would wait there for the one that has raised an error.
"""

from contextlib import suppress
from typing import Any

from torch import nn

from minifsdp.checks.held_values import check_held
from minifsdp.checks.members import check_lists, check_tree
from minifsdp.checks.param_changes import check_unreplaced
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.chunks.flat_parameter import FlatParameter
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Layer
from minifsdp.core.unit_state import Purpose
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.offload import has_memory
from minifsdp.support.shard_changes import check_on_host
from minifsdp.wrapping.module_tree import clean, is_ignored, join_names


class FirstStep(Layer):
    """Checks a model at each start, until its first forward is over.

    Args:
        agreement: tells the other ranks what is wrong on this one.
    """

    def __init__(self, engine: Engine, agreement: RankAgreement) -> None:
        self._engine, self._agreement, self._over = engine, agreement, False

    def start(self, purpose: Purpose) -> None:
        """Raises RuntimeError or ValueError: see the checks."""
        if self._over:
            return
        try:
            self._check(self._engine.root.module, self._engine.units)
        except (RuntimeError, ValueError) as error:
            with suppress(RuntimeError, ValueError):  # this rank's own error says more
                self._agreement.start(purpose, str(error))
            raise

    def _check(self, root: nn.Module, units: list[Any]) -> None:
        check_tree(root)
        check_lists(units)
        for unit in units:
            if unit.mesh is not None and not unit.shows_views:
                check_unreplaced(unit)
            if unit.offload_from is not None:
                check_on_host(unit)
        check_on_meta(root)
        check_held(root)

    def end_of_forward(self, unit: FeaturedUnit) -> None:
        """The first forward is over."""
        self._over = True


def check_on_meta(root: nn.Module) -> None:
    """Refuse a model with something on the meta device.

    Raises:
        RuntimeError: naming the parameters and buffers.
    """
    ignored = {inner for m in root.modules() if is_ignored(m) for inner in m.modules()}
    names = [
        join_names(clean(prefix), name)
        for prefix, module in root.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
        and not (isinstance(tensor, FlatParameter) or is_ignored(tensor) or module in ignored)
        and not has_memory(tensor)
    ]
    if names:
        raise RuntimeError(
            f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}: on the meta device, so without "
            f"memory and values, and fully_shard leaves them there. Before the model is used, call "
            f"model.to_empty(device=...) and then model.init_weights() (or what gives it values), "
            f"or model.load_state_dict(state, assign=True). The device is 'cpu' with "
            f"CPUOffloadPolicy. What is in no state dict, such as a table of positions, needs "
            f"values in both cases."
        )
