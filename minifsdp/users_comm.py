"""What a program has chosen about the communication of a unit: FSDP2's controls, as strategies.

``unit.users_comm`` has what was chosen, one attribute for each method of ``FSDPModule``; at first
nothing. strategies.py asks it when it chooses::

    all_gather, reduce_scatter, reduce_group     UsersCollectives, the ``comm`` of the unit
    divide_factor                                Scale, a stage after the mean
    all_reduce_hook                              UsersHook, a stage after that
    all_reduces=False                            KeepPart, in the place of the all-reduce

A program may change them between steps, on all ranks alike.

Source: ``FSDPModule`` and ``_fsdp_api.py`` of ``torch.distributed.fsdp`` (pytorch 2.13), whose
``AllGather`` and ``ReduceScatter`` say what such a function is called with.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.comm.message_tags import cached
from minifsdp.core.collectives import Group, TorchCollectives, torch_reduce_scatter
from minifsdp.core.reduce import ReduceScatter, Stage
from minifsdp.core.streams import Finish


@dataclass
class UsersComm:
    """The choices for one unit.

    Attributes:
        all_gather, reduce_scatter: what to call in the place of torch's own function.
        reduce_group: the same ranks as the unit's group, in a group for reduce-scatters alone.
        divide_factor: what to divide the sum over all ranks by; None: their number.
        all_reduce_hook: is called with this rank's part of the mean, ``[trained_numel / ranks]``,
            in the dtype of the reduction, and may write to it.
        all_reduces: False: hybrid sharding keeps what it has reduced in its shard group, and
            all-reduces the sum of several backwards later (no_sync.py).
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    reduce_group: Group | None = None
    divide_factor: float | None = None
    all_reduce_hook: Callable[[Tensor], object] | None = None
    all_reduces: bool = True

    @property
    def has_functions(self) -> bool:
        """Whether tensors have to travel by a program's own functions."""
        return self.all_gather is not None or self.reduce_scatter is not None

    def __str__(self) -> str:
        """What differs from the default, for ranks to compare."""
        names = [
            f"{name} {getattr(chosen, '__qualname__', type(chosen).__qualname__)}"
            for name in ("all_gather", "reduce_scatter", "all_reduce_hook")
            if (chosen := getattr(self, name)) is not None
        ]
        names += [f"gradients divided by {self.divide_factor}"] * (self.divide_factor is not None)
        names += ["a group for reduce-scatters"] * (self.reduce_group is not None)
        names += ["no all-reduce"] * (not self.all_reduces)
        return "".join(f", {name}" for name in names)


def hybrid_of(units: Iterable[Any]) -> list[Any]:
    """The units that are sharded in one group and replicated in another."""
    return [u for u in units if u.shard_group is not None and u.replicate_group is not None]


def checked(function: Any) -> Any:
    """A function for a collective.

    Raises:
        TypeError: it cannot be called, or has no ``allocate``.
    """
    if not (callable(function) and callable(getattr(function, "allocate", None))):
        raise TypeError(
            f"{function!r} does not look like torch's AllGather or ReduceScatter: it has to be "
            f"callable, and to have a method allocate(size, *, dtype, device)."
        )
    return function


class UsersCollectives:
    """Collectives by a program's own functions, or by torch's in a group of their own.

    Args:
        inner: does what no function was given for.
        choices: of the unit.
    """

    def __init__(self, inner: TorchCollectives, choices: UsersComm) -> None:
        self.inner, self.choices, self.all_reduce = inner, choices, inner.all_reduce

    def all_gather(self, unit: Any, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`. The function writes to memory
        that its own ``allocate`` has made. The result is copied from there."""
        function = self.choices.all_gather
        if function is None:
            return self.inner.all_gather(unit, full, shard, group)
        gathered = _allocate(function, full)
        work = function(gathered, shard, group, async_op=full.device.type == "cpu")

        def finish() -> None:
            if work is not None:
                work.wait()
            full.copy_(gathered)

        return finish

    def reduce_scatter(self, unit: Any, flat: Tensor, scale: float) -> tuple[Tensor, Finish]:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        function, group = self.choices.reduce_scatter, self.choices.reduce_group
        group = unit.shard_group if group is None else group
        size, by_threads = flat.numel() // group.size(), flat.device.type == "cpu"
        if function is None:
            function, total, sent = torch_reduce_scatter, flat.new_empty(size), flat.mul_(scale)
        else:
            total, sent = _allocate(function, flat[:size]), _allocate(function, flat)
            torch.mul(flat, scale, out=sent)
        work = function(total, sent, group=group, op=dist.ReduceOp.SUM, async_op=by_threads)
        return total, work.wait if work is not None else lambda: None


def _allocate(function: Any, like: Tensor) -> Tensor:
    memory: Tensor = function.allocate(like.size(), dtype=like.dtype, device=like.device)
    return memory


@cached  # so that all units of the same ranks have the same one
def group_for_reductions(group: Group) -> Group:
    """A second group of the ranks of ``group``. All of them have to call this. Two collectives of
    one NCCL communicator run one after the other; those of two may run at the same time."""
    ranks = dist.get_process_group_ranks(group)
    made: Group = dist.new_group(ranks, use_local_synchronization=True)
    return made


def with_choices(unit: Any, stages: list[Stage]) -> list[Stage]:
    """``stages``, those that a gradient of ``unit`` goes through (strategies.py), changed by what
    the program has chosen."""
    choices: UsersComm = unit.users_comm
    end = len(stages) - stages[-1].on_host  # before a download
    if not choices.all_reduces:
        reduced = 1 + [type(stage) for stage in stages].index(ReduceScatter)
        return [*stages[:reduced], KeepPart(), *stages[end:]]
    after: list[Stage] = []
    if choices.divide_factor is not None:
        replicas = 1 if unit.replicate_group is None else unit.replicate_group.size()
        after.append(Scale(unit.shard_world_size * replicas / choices.divide_factor))
    if choices.all_reduce_hook is not None:
        after.append(UsersHook(choices.all_reduce_hook))
    return [*stages[:end], *after, *stages[end:]]


class KeepPart:
    """The stage in the place of an all-reduce that is left out: the result waits in ``unit.parts``,
    and the optimizer is given zeros."""

    stream, travels, on_host = "reduce", False, False

    def launch(self, unit: Any, value: Tensor) -> tuple[Tensor, Finish]:
        """``value``: ``[trained_numel / ranks]``, the mean over the shard group."""
        unit.parts.append(value)
        return torch.zeros_like(value), lambda: None


class Scale:
    """The stage of a reduction that turns a mean into what the program wants to divide by.

    Args:
        factor: what the mean is multiplied by.
    """

    stream, travels, on_host = "reduce", False, False

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def launch(self, unit: Any, value: Tensor) -> tuple[Tensor, Finish]:
        """``value``: the complete mean; scaled in place."""
        return value.mul_(self._factor), lambda: None


class UsersHook:
    """The stage of a reduction in which a program's function writes to the mean.

    Args:
        hook: is called with it, on the stream of reductions.
    """

    stream, travels, on_host = "reduce", False, False

    def __init__(self, hook: Callable[[Tensor], object]) -> None:
        self._hook = hook

    def launch(self, unit: Any, value: Tensor) -> tuple[Tensor, Finish]:
        """``value``: the complete mean; the function may write to it."""
        self._hook(value[: unit.layout.optimized_numel(unit.shard_rank)])
        return value, lambda: None
