"""The noun: one unit of sharding.

A unit is a module's parameters, flattened and sharded together. It owns two tensors::

    shard   [<= n]      this rank's chunk. An nn.Parameter: what the optimizer sees. Always there.
    full    [n * ranks] all chunks. What the layers compute with. There only while it is needed.

``full`` never goes away as an *object*; its *storage* shrinks to nothing and grows again. unsharded_storage.py
says why.

Two small state machines say where a unit stands::

    memory   SHARDED --unshard--> GATHERING --waited for--> UNSHARDED --reshard--> SHARDED
    phase    IDLE --forward--> FORWARD --pre-backward--> BACKWARD --gradient ready--> DONE

At the end of a backward DONE and BACKWARD become FORWARD again, since another graph may yet come
through the unit; when the next step begins, all units are IDLE.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minifsdp.api import MixedPrecision
from minifsdp.comm.groups import Placement
from minifsdp.flatten import check_flattenable, flatten
from minifsdp.offload import HOST, host_copy
from minifsdp.shard import chunk_numel, real_numel, shard
from minifsdp.streams import Event
from minifsdp.support.buffers import Buffers
from minifsdp.support.flat_parameter import FlatParameter, flat_parameter
from minifsdp.support.param_access import Slot, StandIn
from minifsdp.support.unsharded_storage import Full, Fulls


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


class Waiting(NamedTuple):
    """A gradient that no_sync has left; see no_sync.py."""

    grad: Tensor  # of ``full``, not reduced
    mark: Tensor  # what was in ``shard.grad`` then
    mark_version: int
    shard_version: int


class Unit:
    """The parameters of one module, as one sharded flat parameter.

    Args:
        module: the unit's module.
        slots: where the parameters are; those of nested units excluded. May be empty.
        params: the parameters themselves, in the same order. They are copied, and let go.
        buffers: those of the same modules.
        placement: who shares them (see groups.py).
        precision: what to compute and to reduce in (see precision.py).
        offload_from: the device to compute on, if the shard is to live on the host (offload.py).
        tag: a number that no other unit of the group has, the same on all ranks.

    Raises:
        ValueError: the parameters cannot share one flat tensor (see flatten.py).
    """

    def __init__(
        self,
        module: nn.Module,
        slots: list[Slot],
        params: list[nn.Parameter],
        buffers: Buffers,
        placement: Placement,
        precision: MixedPrecision,
        offload_from: torch.device | None,
        tag: int,
    ) -> None:
        check_flattenable({s.name: p for s, p in zip(slots, params, strict=True)})
        self.name = ""  # the wrapper's place in the root; the root itself keeps ""
        self.module, self.slots, self.buffers = module, slots, buffers
        self.shard_group, self.replicate_group, self.reshard_after_forward = placement
        self.precision, self.offload_from = precision, offload_from
        self.enclosing: list[Unit] = []  # units around this one, outermost first
        self.memory, self.phase = Memory.SHARDED, Phase.IDLE
        self.tag, self.task = tag, -1  # autograd's: the backward in which the unit's has begun
        self.gathered: Event | None = None  # while GATHERING: passed when the data is there
        self.on_gradient: Callable[[Unit], None] = lambda unit: None  # both are set by backward.py
        self.on_demand: Callable[[Unit], bool] = lambda unit: False  # may gather it

        flat = flatten(params) if params else torch.empty(0)
        group = self.shard_group
        self.rank = group.rank() if group is not None else 0
        self.ranks = group.size() if group is not None else 1  # that share it
        self.numel = flat.numel()
        self.full_numel = chunk_numel(self.numel, self.ranks) * self.ranks

        # The shard's memory, and padding after it.
        self.chunk = host_copy(shard(flat, self.rank, self.ranks), offload_from)
        real = self.chunk[: real_numel(self.numel, self.rank, self.ranks)]
        self.shard = self._new_shard(real, bool(params) and params[0].requires_grad)
        self.waiting: Waiting | None = None
        self.views: list[Tensor] = []
        self.exposed = True  # its modules see parameters, and not stand-ins
        # kept_version: of the shard, if a no_sync backward has left it gathered. leaks: how often
        # somebody else has kept the memory. watched: by flat_parameter.watch_for_losses.
        self.kept_version, self.leaks, self.watched = -1, 0, object()
        self.fulls = Fulls(self._gradient_is_complete)
        self.full: Tensor | None = None  # [n * ranks]: the leaf of the one that is used now,
        self.buffer, self.transient, self.dtype = self.chunk, False, self.chunk.dtype  # its rest,
        self.full_bytes = 0  # its size,
        self.room: Full  # and all of it together
        self.stand_ins = [StandIn(self, slot) for slot in slots]

    def _new_shard(self, data: Tensor, requires_grad: bool) -> FlatParameter:
        low = self.precision.param_dtype if self.precision.keep_low_precision_grads else None
        return flat_parameter(data, requires_grad, self, self.ranks > 1, low)

    def replace_shard(self, found: nn.Parameter) -> FlatParameter:
        """Take over what torch has put in the shard's place, moved or cast."""
        self.shard = self._new_shard(found.data, found.requires_grad)
        return self.shard

    @property
    def label(self) -> str:
        """The unit's name as a message should say it."""
        return repr(self.name) if self.name else "<root>"

    @property
    def device(self) -> torch.device:
        """Where it is computed with, which with offload is not where the shard is."""
        return self.offload_from or self.shard.device

    # -------------------------------------------------------------------------- its two tensors

    def refresh(self, training: bool | None) -> None:
        """Follow what the user did to ``shard`` since the last step: moved, cast, froze, replaced.

        Args:
            training: the mode of the root, on which the precision may depend; None: between steps.

        Raises:
            ValueError: ``shard`` was replaced by one of another size.
            RuntimeError: it was moved away from the host, where it should stay.
        """
        shard, real = self.shard, real_numel(self.numel, self.rank, self.ranks)
        if shard.numel() != real:
            raise ValueError(
                f"the flat parameter of unit {self.label} has {shard.numel()} elements; this "
                f"rank's chunk has {real}. Assign a tensor of that size to its .data."
            )
        if self.offload_from is not None and shard.device != HOST:
            raise RuntimeError(
                f"the parameters of unit {self.label} were moved to {shard.device}, but with "
                f"CPUOffload they live on the CPU and are uploaded when they are needed. Do not "
                f"move the model after wrapping; it computes on {self.offload_from} by itself."
            )
        if self.moved:
            self._take_over(shard, real)
        self.choose_precision(training)

    @property
    def moved(self) -> bool:
        """Whether the shard has other memory than it was given."""
        shard, chunk = self.shard, self.chunk
        # Compared by address: module.to() and `param.data = ...` put new memory under it.
        moved = shard.numel() > 0 and shard.data_ptr() != chunk.data_ptr()
        return moved or shard.device != chunk.device or shard.dtype != chunk.dtype

    @torch.inference_mode(False)  # what is made here outlives the mode that a forward may run in
    def _take_over(self, shard: FlatParameter, real: int) -> None:
        chunk = shard.data.new_zeros(self.chunk.numel())
        self.chunk = host_copy(chunk, self.offload_from)
        self.chunk[:real] = shard.data
        shard.data = self.chunk[:real]
        self.fulls.forget()

    def choose_precision(self, training: bool | None) -> None:
        """Parameters and buffers in the dtypes to compute with in this mode of the root or, with
        None, in those that they are kept in. The unit is sharded."""
        exact = training is None or (self.precision.full_precision_in_eval and not training)
        low = None if exact else self.precision.param_dtype
        # An integer is no number to round: it may be an index, or a weight in somebody's own code.
        self.compute_in(low if low and self.chunk.is_floating_point() else self.chunk.dtype)
        self.buffers.place(self.device, exact)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Choose the ``full`` of a dtype. The unit is sharded."""
        trained = self.shard.requires_grad
        full = self.fulls.get(dtype, trained)
        self._choose(full if full is not None else self._new_full(dtype, trained))

    def compute_with(self, leaf: Tensor) -> None:
        """Choose the ``full`` that a graph was made with, which may be an older one.

        Raises:
            RuntimeError: the parameters were moved or cast since, and it is gone.
        """
        full = self.fulls.of(leaf)
        if full is None:
            raise RuntimeError(
                f"the parameters of unit {self.label} were moved, cast, frozen or replaced between "
                f"a forward and its backward. Call backward() first."
            )
        assert self.memory is Memory.SHARDED, self.label
        self._choose(full)

    def _choose(self, full: Full) -> None:
        if full.leaf is not self.full:
            self.views = []  # they are of another one
        self.room = full
        self.full, self.buffer, self.transient = full.leaf, full.buffer, full.transient
        self.dtype = full.leaf.dtype
        self.full_bytes = self.full_numel * self.dtype.itemsize

    @torch.inference_mode(False)  # it, too
    def _new_full(self, dtype: torch.dtype, trained: bool) -> Full:
        whole = self.shard_group is None and self.offload_from is None
        if whole and dtype is self.chunk.dtype:
            return self.fulls.add(self.chunk.data, trained, transient=False)  # it is all there
        room = torch.empty(self.full_numel, dtype=dtype, device=self.device)
        return self.fulls.add(room, trained, transient=self.numel > 0)

    def _gradient_is_complete(self) -> None:
        self.on_gradient(self)

    def release(self) -> None:
        """Give the memory of ``full`` back; see :meth:`Full.release`."""
        if not self.room.release(self.views):
            self.views = []
            self.leaks += 1
