"""Checksums of what is saved, so that bytes that change in a file are noticed when it is loaded.

torch.distributed.checkpoint has none: it loads what the file says. Here each tensor can have a
number that is computed when it is saved, and once more when it has been loaded::

    "model.weight"   sum of bits(element) * (2 * place + 1), modulo 2**64

``place`` is that of the element in the whole tensor. So each rank can add up what it has, however
the tensor is divided, and the sum over the ranks is the same for any number of them. The factors
are odd, so any change of one element changes the sum. Changes of several elements are missed only
if they happen to cancel.

The checksums are an entry of their own beside "model" and "optimizer". Other programs do not ask
for this entry. :class:`StateToLoad` asks for it if it is there.
"""

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minifsdp.checks.agreement_groups import agreement_groups
from minifsdp.chunks.boxes import BoxedTensor
from minifsdp.comm.consensus import consensus
from minifsdp.featured_unit import FeaturedUnit

KEY = "checksums"
Found = dict[str, tuple[str, dict[Any, set[int]]]]
"""By name, the dtype of a tensor; and by where each part of it begins, the sums that ranks have
found. There are several sums only if ranks have different values in the same place."""

_AT_ONCE = 1 << 20  # elements, for which the places take 8 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOADER = "torch.distributed.checkpoint.state_dict_loader"


class StateToLoad(dict[str, Any]):
    """What ``state_to_load`` gives to ``dcp.load``, which asks for the keys after it has opened the
    checkpoint. If this has checksums, they are one of the keys.

    If the state is a part of another dict, ``dcp.load`` does not ask, and nothing is compared.
    """

    def keys(self) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != _LOADER:
            frame = frame.f_back
        reader: Any = None if frame is None else frame.f_locals.get("storage_reader")
        if reader is not None and KEY in reader.read_metadata().state_dict_metadata:
            self.setdefault(KEY, [])
        return super().keys()


def checksums(state: dict[str, Any], units: list[FeaturedUnit]) -> list[list[Any]]:
    """The name, the dtype and the checksums of each tensor of a state. There are several checksums
    where each rank has a tensor of its own, such as the statistics of a batch norm: any of these
    tensors may be the one that is saved.

    Args:
        units: whose ranks have the state; all of them take part.

    Raises:
        RuntimeError: ranks that have the same part of a parameter have different values there.
    """
    found = []
    for name, (dtype, parts) in sorted(_of_all_ranks(state, units).items()):
        if len(parts) > 1 and any(len(numbers) > 1 for numbers in parts.values()):
            raise RuntimeError(
                f"ranks that have the same part of {name!r} have different values there, so "
                f"it has no checksum, and nobody knows which of them would be saved."
            )
        numbers = set().union(*parts.values())
        if len(parts) > 1:
            numbers = {sum(number for its in parts.values() for number in its)}
        found.append([name, dtype, sorted(number % 2**64 for number in numbers)])
    return found


def check(state: dict[str, Any], saved: list[list[Any]], units: list[FeaturedUnit]) -> None:
    """Compare what was loaded with the checksums that were saved. What was saved in another dtype
    was rounded, and is not compared.

    Raises:
        ValueError: naming the tensors that have changed. All ranks raise it.
    """
    here = {name: (dtype, numbers) for name, dtype, numbers in checksums(state, units)}
    changed = [
        name
        for name, dtype, numbers in saved
        if name in here and here[name][0] == dtype and not {*here[name][1]} <= {*numbers}
    ]
    if changed:
        raise ValueError(
            f"the checkpoint has other values than those that were saved, in "
            f"{', '.join(map(repr, changed[:3]))}{' ...' if len(changed) > 3 else ''} "
            f"({len(changed)} of {len(saved)} tensors): bytes have changed since, in the file or "
            f"on the way. Nothing was loaded. Load another checkpoint."
        )


def _of_all_ranks(state: dict[str, Any], units: list[FeaturedUnit]) -> Found:
    found: Found = {}
    for name, tensor in _tensors(state):
        begins: Any = None
        total = 0
        for offset, part in _parts(tensor):
            begins = tuple(offset) if begins is None else begins
            total += _sum(part, offset, tensor.shape)
        if begins is not None:
            found[name] = str(tensor.dtype), {begins: {total % 2**64}}
    for group in agreement_groups(units):
        about = "the checksums of a checkpoint"
        found = consensus(group.process_groups, about, None, found, _together)
    return found


def _together(_: list[None], of_ranks: list[Found]) -> Found:
    together: Found = {}
    for found in of_ranks:
        for name, (dtype, parts) in found.items():
            known = together.setdefault(name, (dtype, {}))[1]
            for place, numbers in parts.items():
                known[place] = known.get(place, set()) | numbers
    return together


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by the names that torch.distributed.checkpoint gives them."""
    for name, value in state["model"].items():
        if isinstance(value, Tensor):
            yield f"model.{name}", value
    for name, entry in state["optimizer"].get("state", {}).items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                yield f"optimizer.state.{name}.{key}", value


def _parts(tensor: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
    """What this rank has of a tensor, and where each part begins."""
    parts: Any
    if isinstance(tensor, BoxedTensor):
        parts = tensor.parts.items()
    elif isinstance(tensor, DTensor):
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        parts = [(offset, tensor._local_tensor.detach())]
    else:
        parts = [((0,) * tensor.dim(), tensor.detach())]
    return ((offset, part) for offset, part in parts if part.numel())


def _sum(part: Tensor, offset: Sequence[int], whole: Sequence[int]) -> int:
    """The sum over a part of a tensor. Integers of 64 bits overflow without harm: the sum is modulo
    2**64.

    Args:
        part: of any shape and dtype.
        offset: where it begins in the whole tensor.
        whole: the shape of that.
    """
    if part.is_complex():
        part, offset, whole = torch.view_as_real(part.resolve_conj()), (*offset, 0), (*whole, 2)
    if not part.dim():
        part, offset, whole = part.view(1), (0,), (1,)
    bits, total = part.view(_INTEGERS[part.element_size()]), 0
    rows = max(1, _AT_ONCE // part[0].numel())
    for start in range(0, len(bits), rows):
        block = bits[start : start + rows]
        place = torch.zeros((), dtype=torch.int64, device=part.device)
        begins = (offset[0] + start, *offset[1:])
        for first, size, length in zip(begins, block.shape, whole, strict=True):
            along = torch.arange(first, first + size, device=part.device)
            place = place.unsqueeze(-1) * length + along
        total += int((block * (2 * place + 1)).sum())
    return total
