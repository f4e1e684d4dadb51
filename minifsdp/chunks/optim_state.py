"""The state of an optimizer belongs to one rank's chunks.

Adam's moments have the shape of their parameters. The optimizer of a sharded model steps chunks,
so each rank has the moments of its own chunks, and ``optimizer.state_dict()`` is that of one rank.
That is all right if each rank saves its own and loads its own, into a model sharded alike::

    torch.save(optimizer.state_dict(), f"optimizer{rank}.pt")

Any other use would go wrong silently: all ranks may load rank 0's (moments of other elements), or
a single rank may load one of two ranks' (torch's fused kernels read past its end, and the process
dies). So each parameter group gets an entry, the :class:`Mark`, that says which chunks these are.
torch saves and loads the entries of a group without looking at them. ::

    {"params": [0, 1], "lr": 0.1, "minifsdp": Mark(["chunk 0 of 2 of 42 elements", ...])}

A mark that does not fit is not refused when it is loaded but at the next step. By then all ranks
have loaded, so they can compare, and all of them raise. If only some of the ranks have loaded,
these wait for the others, and deadlock_watch.py ends the wait.
"""

import sys
from collections import OrderedDict
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from minifsdp.checks.agreement_groups import agreement_groups
from minifsdp.chunks.flat_parameter import FlatParameter
from minifsdp.comm.consensus import first_problem
from minifsdp.featured_unit import FeaturedUnit

MARK = "minifsdp"  # the key in a parameter group

_ADVICE = (
    "A sharded optimizer's state_dict() is that of one rank: save each rank's to a file of its "
    "own, and load it on the same rank, into a model that is sharded alike over as many ranks. "
    "For all other uses there is FSDP.optim_state_dict(model, optimizer)."
)
_NOT_DISTRIBUTED = (
    "torch.distributed.checkpoint would take one rank's chunks of the optimizer's state for those "
    "of all ranks. Call its functions inside of `with minifsdp.as_dtensors(model, optimizer):`, or "
    "wrap the model with use_orig_params=True. " + _ADVICE
)


class Mark:
    """Which chunk each parameter of a group is, in words."""

    def __init__(self, places: list[str]) -> None:
        self.places = places

    def __eq__(self, other: object) -> bool:
        """Programs compare groups with those that they have saved."""
        if isinstance(other, dict):  # what was a mark; see __reduce__
            return other == {"places": self.places}
        return isinstance(other, Mark) and other.places == self.places

    __hash__ = None  # type: ignore[assignment]  # as of anything that is equal by what is in it

    def __repr__(self) -> str:
        return f"<chunks of {len(self.places)} parameters>"

    def __reduce__(self) -> tuple[type, tuple[list[tuple[str, list[str]]]]]:
        # torch.load(weights_only=True) refuses classes that it does not know, and knows this one.
        return OrderedDict, ([("places", self.places)],)

    def __create_write_items__(self, *_: object) -> NoReturn:
        """torch.distributed.checkpoint calls this on an object that has it, to save the object.

        It would take one rank's state for that of all ranks, so this refuses.
        """
        raise RuntimeError(_NOT_DISTRIBUTED)


def mark_groups(groups: list[dict[str, Any]]) -> None:
    """Set the mark of each parameter group. Groups without chunks have none."""
    for group in groups:
        group.pop(MARK, None)
        places = _places(group)
        if places is not None:
            group[MARK] = Mark(places)


def check_state(optimizer: Any, group: dict[str, Any]) -> str | None:
    """What is wrong with the state of a parameter group, in words; None if nothing is.

    Args:
        optimizer: an optimizer, or what has the ``state`` of one.
        group: one that is new, or has just been loaded.
    """
    state: Any = getattr(optimizer, "state", {})
    if not any(state.get(param) for param in group["params"]):
        return None  # as of plain SGD: all that was loaded is a learning rate
    mark, here = group.get(MARK), _places(group)
    # With a mark, compare what it says. Without one (saved by a plain model), compare shapes.
    if mark is not None:
        there = mark.places if isinstance(mark, Mark) else mark["places"]  # see Mark.__reduce__
        if there == here:
            return None
        whole = ["a whole parameter"] * len(there)
        pairs = zip(group["params"], there, here or whole, strict=False)
        param, a, b = next((pair for pair in pairs if pair[1] != pair[2]), (None, "more", "fewer"))
        return _not_its_own(optimizer, param, a, b)
    for param in group["params"]:
        if isinstance(param, FlatParameter):
            for key, value in (state.get(param) or {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != param.shape:
                    return _not_its_own(
                        optimizer, param, f"{key} {tuple(value.shape)}", str(tuple(param.shape))
                    )
    return None


def agree(wrong: str | None, groups: list[dict[str, Any]]) -> None:
    """Compare with all ranks that share these parameters whether one of them has to raise.

    Args:
        wrong: this rank's reason, or None.
        groups: the parameter groups of the optimizer.

    Raises:
        RuntimeError: this rank has a reason, or another one has.
    """
    params = (param for group in groups for param in group["params"])
    units = (param.unit() for param in params if isinstance(param, FlatParameter))
    everyones = None if wrong is None else f"rank {dist.get_rank()}: {wrong}"
    for group in agreement_groups([unit for unit in units if unit is not None]):
        about = "the comparison of states before an optimizer's step"
        everyones = first_problem(group.process_groups, about, everyones)
    if everyones is not None:
        raise RuntimeError(wrong or everyones)


def refuse_distributed_checkpoints(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Make ``state_dict()`` raise when torch.distributed.checkpoint calls it."""
    flat = any(isinstance(param, FlatParameter) for group in groups for param in group["params"])
    if flat and "_minifsdp_asked" not in optimizer.__dict__:
        optimizer.__dict__["_minifsdp_asked"] = optimizer.register_state_dict_pre_hook(_check_asker)


def _check_asker(optimizer: Optimizer) -> None:
    if not any(isinstance(p, FlatParameter) for g in optimizer.param_groups for p in g["params"]):
        return  # inside of as_dtensors it has DTensors
    # state_dict() is not told who calls it, so look for that in the stack.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            raise RuntimeError(_NOT_DISTRIBUTED)
        frame = frame.f_back


def _places(group: dict[str, Any]) -> list[str] | None:
    """Which chunk each parameter is, as text, because every format can save text and errors show
    it. None if the group has no chunks."""
    if not any(is_sharded(param) for param in group["params"]):
        return None
    return [_place(param) for param in group["params"]]


def _place(param: Tensor) -> str:
    unit: FeaturedUnit | None = param.unit() if isinstance(param, FlatParameter) else None
    if unit is None or unit.shard_world_size == 1:
        return "a whole parameter"
    return f"chunk {unit.shard_rank} of {unit.shard_world_size} of {unit.numel} elements"


def is_sharded(param: Tensor) -> bool:
    """Whether this is a flat parameter of which other ranks have the rest."""
    return isinstance(param, FlatParameter) and param.is_sharded


def _not_its_own(optimizer: Any, param: Any, there: str, here: str) -> str:
    unit = param.unit() if isinstance(param, FlatParameter) else None
    of = f"unit {unit.label}" if unit is not None else "a parameter"
    return (
        f"the state of an optimizer ({type(optimizer).__name__}) was loaded from elsewhere: for "
        f"{of} it is that of {there}, and this is {here}. " + _ADVICE
    )
