"""The noun: one unit of sharding.

A unit is a module's parameters, flattened and sharded together. It owns two tensors::

    shard   [<= n]      this rank's chunk. An nn.Parameter: what the optimizer sees. Always there.
    full    [n * ranks] all chunks. What the layers compute with. There only while it is needed.

``full`` never goes away as an *object*; its *storage* shrinks to nothing and grows again. It has to
be so: autograd saves views of it during the forward, and those views share its storage. Gathering
into the same storage brings them back to life; a new tensor would leave them pointing at nothing.

Two small state machines say where a unit stands::

    memory   SHARDED --unshard--> GATHERING --waited for--> UNSHARDED --reshard--> SHARDED
    phase    IDLE --forward--> FORWARD --pre-backward--> BACKWARD --gradient ready--> DONE
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from minifsdp.collectives import Group
from minifsdp.flatten import check_flattenable, flatten, unflatten
from minifsdp.shard import chunk_numel, real_numel, shard
from minifsdp.streams import Event


class Memory(Enum):
    """Whether ``full`` has storage and data."""

    SHARDED = auto()
    GATHERING = auto()  # storage is there, the all-gather is under way
    UNSHARDED = auto()


class Phase(Enum):
    """How far the unit is in the current step."""

    IDLE = auto()
    FORWARD = auto()  # ran with gradients on: a backward may come
    BACKWARD = auto()  # its backward has begun
    DONE = auto()  # its gradient is complete


class FlatParameter(nn.Parameter):
    """The parameter the optimizer sees. A type of its own, so that outer units leave it alone."""


@dataclass
class Slot:
    """One original parameter: its place in the flat tensor is its place in ``Unit.slots``."""

    name: str  # fully qualified, below the unit's module
    shape: torch.Size
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)  # several: it is shared


class StandIn:
    """Stands where a parameter was while its unit is sharded: has its shape, refuses to compute.

    Without it a layer called at the wrong time would read freed memory, which on a CPU is a crash.
    """

    def __init__(self, unit: "Unit", slot: Slot) -> None:
        self._unit: Unit = weakref.proxy(unit)
        self._name, self.shape = slot.name, slot.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._unit.shard.dtype

    @property
    def device(self) -> torch.device:
        return self._unit.shard.device

    def _message(self) -> str:
        return (
            f"parameter {self._name!r} of unit {self._unit.label} is sharded now, so it has no "
            f"values here. It has them during the forward and backward of its unit: call that "
            f"unit's module (or one around it), or read it inside FSDP.summon_full_params(model). "
            f"In activation checkpointing, use_reentrant=False keeps them long enough."
        )

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(self._message())

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        found = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)]
        raise RuntimeError(found[0]._message() if found else "a parameter is sharded now")


class Unit:
    """The parameters of one module, as one sharded flat parameter.

    Args:
        slots: where the parameters are; those of nested units excluded. May be empty.
        params: the parameters themselves, in the same order. They are copied, and let go.
        shard_group: ranks that share the parameters, a chunk each; None: each rank has them whole.
        replicate_group: ranks that hold the same chunk and all-reduce its gradient, or None.
        reshard_after_forward: free ``full`` between forward and backward.
        tag: a number that no other unit of the group has, the same on all ranks.

    Raises:
        ValueError: the parameters cannot share one flat tensor (see flatten.py).
    """

    def __init__(
        self,
        slots: list[Slot],
        params: list[nn.Parameter],
        shard_group: Group | None,
        replicate_group: Group | None,
        reshard_after_forward: bool,
        tag: int,
    ) -> None:
        check_flattenable({s.name: p for s, p in zip(slots, params, strict=True)})
        self.name = ""  # the wrapper's place in the root; the root itself keeps ""
        self.slots = slots
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.reshard_after_forward = reshard_after_forward
        self.tag = tag
        self.enclosing: list[Unit] = []  # units around this one, outermost first
        self.memory, self.phase = Memory.SHARDED, Phase.IDLE
        self.gathered: Event | None = None  # while GATHERING: passed when the data is there
        self.on_gradient: Callable[[Unit], None] = lambda unit: None  # set by the root; see hooks

        flat = flatten(params) if params else torch.empty(0)
        self.rank = shard_group.rank() if shard_group is not None else 0
        self.ranks = shard_group.size() if shard_group is not None else 1  # that share it
        self.numel = flat.numel()
        self.full_numel = chunk_numel(self.numel, self.ranks) * self.ranks
        self.sharded = shard_group is not None and self.numel > 0  # is there anything to gather?

        self.chunk = shard(flat, self.rank, self.ranks)  # the shard's memory, and padding after it
        real = self.chunk[: real_numel(self.numel, self.rank, self.ranks)]
        self.shard = FlatParameter(real, requires_grad=bool(params) and params[0].requires_grad)
        self.full: Tensor | None = None  # made at the first forward: the module may move till then
        self.buffer = self.chunk  # the memory of `full`
        self.full_bytes = self.full_numel * self.chunk.element_size()
        self.views: list[Tensor] = []
        self._stand_ins = [StandIn(self, slot) for slot in slots]
        for slot in slots:
            for module, attribute in slot.owners:
                delattr(module, attribute)
        self.hide()

    @property
    def label(self) -> str:
        """The unit's name as a message should say it."""
        return repr(self.name) if self.name else "<root>"

    # -------------------------------------------------------------------------- its two tensors

    def refresh(self) -> None:
        """Follow what the user did to ``shard`` since the last step: moved, cast, froze, replaced.

        Raises:
            ValueError: ``shard`` was replaced by one of another size.
        """
        shard, stale = self.shard, self.full is None
        real = real_numel(self.numel, self.rank, self.ranks)
        if shard.numel() != real:
            raise ValueError(
                f"the flat parameter of unit {self.label} has {shard.numel()} elements; this "
                f"rank's chunk has {real}. Assign a tensor of that size to its .data."
            )
        # Compared by address: module.to() and `param.data = ...` put new memory under it.
        moved = shard.device != self.chunk.device or shard.dtype != self.chunk.dtype
        if moved or (real and shard.data_ptr() != self.chunk.data_ptr()):
            self.chunk = shard.data.new_zeros(self.chunk.numel())
            self.chunk[:real] = shard.data
            shard.data = self.chunk[:real]
            self.full_bytes = self.full_numel * self.chunk.element_size()
            stale = True
        if stale or self.full is None or self.full.requires_grad != shard.requires_grad:
            self._make_full()

    def _make_full(self) -> None:
        if self.shard_group is None:
            full = self.chunk.data  # nothing to gather: compute with the chunk itself
        else:
            full = self.chunk.new_empty(self.full_numel)
        self.full = full.requires_grad_(self.shard.requires_grad)
        if self.full.requires_grad:
            unit = weakref.ref(self)  # autograd owns the hook; a strong reference would be a leak

            def gradient_is_complete(_: Tensor) -> None:
                alive = unit()
                if alive is not None:
                    alive.on_gradient(alive)

            register = self.full.register_post_accumulate_grad_hook
            register(gradient_is_complete)  # type: ignore[no-untyped-call]
        # The same memory with a version counter of its own. Collectives write here: written through
        # `full`, they would look to autograd like a modification of what the forward has saved.
        self.buffer = self.full.data
        if self.sharded:
            self.resize_storage(0)

    def resize_storage(self, size: int) -> None:
        """Give the storage of ``full`` room for ``size`` bytes: ``full_bytes``, or 0 to free it."""
        self.buffer.untyped_storage().resize_(size)

    # ------------------------------------------------------------- what its modules see of them

    def make_views(self) -> None:
        """New views of ``full`` for a forward, which autograd will record as its first operations.

        Not once for all: autograd runs operations in the reverse of the order in which they were
        *created*. Old views would come after the whole backward, no unit's gradient would be
        complete before its end, and all units would be unsharded at once.
        """
        assert self.full is not None
        self.views = unflatten(self.full, [slot.shape for slot in self.slots])

    def expose(self) -> None:
        """Let the modules compute with the views."""
        for slot, view in zip(self.slots, self.views, strict=True):
            _set(slot, view)

    def hide(self) -> None:
        """Put stand-ins where the views were, which say what is wrong when they are used."""
        for slot, stand_in in zip(self.slots, self._stand_ins, strict=True):
            _set(slot, stand_in)


def _set(slot: Slot, value: object) -> None:
    for module, attribute in slot.owners:
        if type(module).__setattr__ is nn.Module.__setattr__:
            module.__dict__[attribute] = value  # a tenth of setattr's price, twice a unit and pass
        else:
            setattr(module, attribute, value)  # an RNN keeps a list of its weights up to date here
