"""Second copies of a model's parameters, which would silently keep old values.

A unit copies its parameters. Whatever else shared their memory, or held the parameters themselves,
keeps the values from before::

    decoder.weight.data = encoder.weight.data       two parameters, one memory: refused at wrapping
    self.register_buffer("w", self.weight.data)     a buffer in it: refused at wrapping
    self.weights = [layer.weight for ...]           parameters in a list: refused at the first step,
                                                    in which a penalty on them would find the old
                                                    values, and reach no gradient
    decoder.weight = encoder.weight                 fine: one parameter in two places

A list that is in no module, a closure, and a tensor that is neither parameter nor buffer cannot be
found.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.wrapping.module_tree import Modules, clean, own_params
from minifsdp.wrapping.orig_params import unit_of_orig_param


def check_memory(modules: Modules) -> None:
    """Refuse two parameters in one memory, or a parameter and a buffer, before they are sharded.

    Args:
        modules: by name.

    Raises:
        ValueError: naming both.
    """
    found: dict[Tensor, str] = {}
    for name, attribute in own_params(modules, buffers=True).items():
        found.setdefault(attribute.get(), name)  # a shared one once
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in found:
        known = type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided
        if known and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for tensors in by_storage.values():
        for one, other in _overlapping(tensors):
            if isinstance(one, nn.Parameter) or isinstance(other, nn.Parameter):
                raise ValueError(
                    f"{found[one]!r} and {found[other]!r} are not one parameter, but they are in "
                    f"one memory (by an assignment to .data, load_state_dict(assign=True), views "
                    f"of one tensor?). Wrapping copies both, so they would part. Make them one "
                    f"parameter, by an assignment to the module's attribute (or the model's "
                    f"tie_weights()); or give one of them memory of its own: b.data = "
                    f"b.data.clone()."
                )


def check_held(root: nn.Module) -> None:
    """Refuse parameters from before wrapping that a module holds in an attribute, or in a list or
    dict there.

    Raises:
        RuntimeError: naming the attribute, the parameter, and its unit.
    """
    for name, module in root.named_modules():
        for attribute, value in vars(module).items():
            for param in _params_in(value):
                unit, its_name = unit_of_orig_param(param)
                if unit is not None:
                    where = clean(f"{name}.{attribute}".lstrip("."))
                    raise RuntimeError(
                        f"{where!r} ({type(value).__name__}) holds parameter {its_name!r} of unit "
                        f"{unit.label} as it was before wrapping. It has the values from then, and "
                        f"nothing that is computed with it reaches the gradient. Read the "
                        f"parameters from their modules, in the forward of the model; or delete "
                        f"{where!r} before the first step."
                    )


def _overlapping(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs that have an element in common, of tensors with one storage."""
    before: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda tensor: _bytes(tensor).start):
        # Tensors that end before this one begins are not looked at again: a file of weights that
        # is mapped to memory may be one storage for all parameters of a model.
        before = [one for one in before if _bytes(one).stop > _bytes(tensor).start]
        yield from ((one, tensor) for one in before if _have_common_elements(one, tensor))
        before.append(tensor)


def _bytes(tensor: Tensor) -> range:
    """From its first to its last byte in its storage."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in lengths)
    begins = int(tensor.storage_offset())
    return range(begins * tensor.itemsize, (begins + int(last) + 1) * tensor.itemsize)


def _have_common_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common. The second begins within the first, but they
    may only interleave, as ``base[:, :2]`` and ``base[:, 2:]`` do."""
    if one.dtype is not other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    begins = int(one.storage_offset())
    places = torch.arange(max(_bytes(one).stop, _bytes(other).stop) // one.itemsize - begins)
    inside = [
        places.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()) - begins)
        for tensor in (one, other)
    ]
    return bool(torch.isin(*(found.reshape(-1) for found in inside)).any())


def _params_in(value: Any, depth: int = 2) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, (list, tuple, set, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _params_in(item, depth - 1)
