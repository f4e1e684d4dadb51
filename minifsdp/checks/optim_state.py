"""What an optimizer remembers belongs to one chunk.

Adam's moments have the shape of the parameters. Of a sharded model each rank has those of its own
chunks, and ``optimizer.state_dict()`` is one rank's. There is nothing wrong with that, if every
rank saves its own and gets its own back, in a model that is sharded alike::

    torch.save(optimizer.state_dict(), f"optimizer{rank}.pt")

Anything else would be read without a word: rank 0's by all (moments of other elements), that of two
ranks by one (torch's fused kernels read past its end, and the process dies). So a mark goes with it
that says which chunks these are. It is an entry of each parameter group, since that is what torch
saves and loads without knowing it. Groups without chunks have none.

A load is not refused when it happens, but at the next step: by then all ranks have loaded, and can
tell each other whether one of them must not go on. If only some of them raised, the others would
wait for them until a timeout. If only some of them have loaded, nobody tells these anything; that
they wait in vain is found out by deadlock_watch.py.
"""

import sys
from collections import OrderedDict
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from minifsdp.comm.collectives import Group, gather_objects
from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.unit import Unit

MARK = "minifsdp"  # the key in a parameter group

_ADVICE = (
    "A sharded optimizer's state_dict() is that of one rank: save each rank's to a file of its "
    "own, and load it on the same rank, into a model that is sharded alike over as many ranks. "
    "(State dicts of the whole optimizer are not there yet.)"
)
_NOT_DISTRIBUTED = (
    "torch.distributed.checkpoint cannot save or load the optimizer of a minifsdp model yet. It "
    "would take one rank's chunks for those of all ranks. " + _ADVICE
)


class Mark:
    """Which chunk each parameter of a group is."""

    def __init__(self, places: list[str]) -> None:
        self.places = places

    def __repr__(self) -> str:
        return f"<chunks of {len(self.places)} parameters>"

    def __reduce__(self) -> tuple[type, tuple[list[tuple[str, list[str]]]]]:
        # Saved and copied as something that torch.load(weights_only=True) knows.
        return OrderedDict, ([("places", self.places)],)

    def __create_write_items__(self, *_: object) -> NoReturn:
        """What torch.distributed.checkpoint asks an object that knows how it is saved."""
        raise RuntimeError(_NOT_DISTRIBUTED)


def mark_groups(groups: list[dict[str, Any]]) -> None:
    """Write down which chunks these are."""
    for group in groups:
        group.pop(MARK, None)
        places = _places(group)
        if places is not None:
            group[MARK] = Mark(places)


def check_state(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """What is wrong with the state of a group, in words; None: nothing.

    Args:
        group: it is new, or has just been loaded.
    """
    state: Any = getattr(optimizer, "state", {})
    if not any(state.get(param) for param in group["params"]):
        return None  # plain SGD, say: what was loaded is a learning rate
    mark, here = group.get(MARK), _places(group)
    if mark is not None:
        there = mark.places if isinstance(mark, Mark) else mark["places"]
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
    """Have all ranks that share these parameters raise, if one of them has to.

    Raises:
        RuntimeError: something is ``wrong``, here or there.
    """
    said = None if wrong is None else f"rank {dist.get_rank()}: {wrong}"
    for peers in _conversations(groups):
        heard = gather_objects(said, peers, "the comparison of states before an optimizer's step")
        said = said or next((words for words in heard if words is not None), None)
    if wrong is not None or said is not None:
        raise RuntimeError(wrong or said)


def refuse_distributed_checkpoints(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Have ``state_dict()`` refuse to be asked by torch.distributed.checkpoint."""
    sharded = any(is_sharded(param) for group in groups for param in group["params"])
    if sharded and "_minifsdp_asked" not in optimizer.__dict__:
        optimizer.__dict__["_minifsdp_asked"] = optimizer.register_state_dict_pre_hook(_check_asker)


def _check_asker(optimizer: Optimizer) -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            raise RuntimeError(_NOT_DISTRIBUTED)
        frame = frame.f_back


def _places(group: dict[str, Any]) -> list[str] | None:
    """Which chunk each of them is, as text: that is what messages say, and any format can save."""
    if not any(is_sharded(param) for param in group["params"]):
        return None
    return [_place(param) for param in group["params"]]


def _place(param: Tensor) -> str:
    unit: Unit | None = param.unit() if isinstance(param, FlatParameter) else None
    if unit is None or unit.shard_world_size == 1:
        return "a whole parameter"
    return f"chunk {unit.shard_rank} of {unit.shard_world_size} of {unit.numel} elements"


def is_sharded(param: Tensor) -> bool:
    """Whether other ranks have the rest of this parameter."""
    return isinstance(param, FlatParameter) and param.is_sharded


def _not_its_own(optimizer: Optimizer, param: Any, there: str, here: str) -> str:
    unit = param.unit() if isinstance(param, FlatParameter) else None
    of = f"unit {unit.label}" if unit is not None else "a parameter"
    return (
        f"the state of an optimizer ({type(optimizer).__name__}) was loaded from elsewhere: for "
        f"{of} it is that of {there}, and this is {here}. " + _ADVICE
    )


def _conversations(groups: list[dict[str, Any]]) -> list[Group]:
    """Those with whom to agree; the widest last, so that it hears what was found in the others."""
    found: dict[tuple[int, int, str], Group] = {}
    for param in (param for group in groups for param in group["params"]):
        unit = param.unit() if isinstance(param, FlatParameter) else None
        if unit is not None:
            for second, peers in enumerate((unit.shard_group, unit.replicate_group)):
                # (torch's fake ranks never answer.)
                if peers and peers.size() > 1 and "fake" not in dist.get_backend_config(peers):
                    found[peers.size(), second, peers.group_name] = peers
    return [found[key] for key in sorted(found)]
