"""Reading and changing whole parameters between steps.

Outside of its forward and backward a unit is a flat chunk without names. To look at
``layer.weight``, or to set it, all ranks gather it together::

    with FSDP.summon_full_params(model):
        print(model.layer.weight)       # the whole parameter, on every rank
        model.layer.weight.zero_()      # kept, in the shards, when the block ends
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from minifsdp.hooks import Hooks
from minifsdp.unit import Unit
from minifsdp.unshard import wait_for_unshard


@contextmanager
def full_params(hooks: Hooks, units: list[Unit], writeback: bool) -> Iterator[None]:
    """Hold the full parameters of ``units``, under their own names, as ordinary parameters.

    Args:
        hooks: of the root that the units belong to.
        writeback: on leaving, each rank stores its own chunk of what the parameters are then.

    Raises:
        RuntimeError: called in a forward or backward, which gather and free by themselves.
    """
    if not hooks.idle or hooks.summoned:
        raise RuntimeError(
            "summon_full_params was called in a forward, in a backward or in another "
            "summon_full_params of this model. Call it between steps, once."
        )
    engine = hooks.engine
    engine.start()
    hooks.summoned = True
    try:
        with torch.no_grad():  # only while gathering: what the caller computes is his to decide
            for unit in units:
                engine.gather(unit)
            for unit in units:
                wait_for_unshard(unit)
                unit.make_views()
                _register(unit)
        yield
        if writeback:
            for unit in units:
                _write_back(unit)
    finally:
        hooks.summoned = False
        for unit in units:
            _unregister(unit)
            engine.free(unit)


def _register(unit: Unit) -> None:
    """Turn the views into parameters, so that torch finds them under their names."""
    for slot, view in zip(unit.slots, unit.views, strict=True):
        param = nn.Parameter(view.detach(), requires_grad=unit.shard.requires_grad)
        for module, attribute in slot.owners:
            module.__dict__.pop(attribute, None)
            module.register_parameter(attribute, param)


def _unregister(unit: Unit) -> None:
    """Undo :func:`_register`, whatever the caller has put in the parameters' places."""
    for slot in unit.slots:
        for module, attribute in slot.owners:
            module._parameters.pop(attribute, None)
    unit.hide()


def _write_back(unit: Unit) -> None:
    """Store this rank's chunk of what the parameters are now.

    Raises:
        ValueError: a parameter was replaced by a tensor of another shape.
    """
    for slot, view in zip(unit.slots, unit.views, strict=True):
        for module, attribute in slot.owners:
            param = module._parameters[attribute]
            if param is None or param.shape != slot.shape:
                raise ValueError(
                    f"parameter {slot.name!r} of unit {unit.label} was replaced inside "
                    f"summon_full_params by {None if param is None else list(param.shape)}; it has "
                    f"to stay a tensor of shape {list(slot.shape)}."
                )
            if param.data_ptr() != view.data_ptr():
                view.data.copy_(param.data)  # replaced, not changed in place: `weight.data = ...`
    if unit.sharded:  # otherwise the views are of the shard itself
        size = unit.chunk.numel()
        unit.chunk.copy_(unit.buffer[unit.rank * size : (unit.rank + 1) * size])
