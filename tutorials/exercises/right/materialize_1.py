"""Right: outer modules have shorter paths, and what was shared is looked up at the end."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from minifsdp.wrapping.materialize import _hidden_units, _on_meta, _reset
from minifsdp.wrapping.module_tree import Modules, own_modules


def materialize(
    modules: Modules, device: torch.device, init_fn: Callable[[nn.Module], None] | None
) -> None:
    waiting = list(_on_meta(modules).values())
    if not waiting or device.type == "meta":
        return
    places = [(attribute, attribute.get()) for attribute in waiting]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_hidden_units(modules))
        if init_fn is None:
            _reset(modules, device)
        else:
            for name in sorted(modules, key=lambda path: len(path.split(".")) if path else 0):
                init_fn(modules[name])
    for attribute, before in places:
        for other, same in places:
            if same is before and (made := other.get()) is not None and not made.is_meta:
                attribute.set(made)
                break
    if left := list(_on_meta(own_modules(modules[""]))):
        raise ValueError(f"param_init_fn has left {left[0]!r} on the meta device")
