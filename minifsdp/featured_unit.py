"""A unit of sharding with all that the features need of it.

core/unit.py has the unit itself. Here are the dtypes that it may be computed in (precision.py), a
shard in the host's memory (offload.py), rows in place of chunks (rows.py), of which the optimizer
sees a DTensor for each parameter (support/divided_param.py), and what else belongs to one unit and
to one feature.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.api import MixedPrecision
from minifsdp.chunks.flat_parameter import FlatParameter, flat_parameter
from minifsdp.chunks.layout import FeaturedChunks
from minifsdp.chunks.param_attributes import common_attributes
from minifsdp.comm.groups import Placement
from minifsdp.comm.message_tags import Launches
from minifsdp.core.flatten import check_flattenable
from minifsdp.core.unit import Unit, gradient_hook
from minifsdp.core.unit_state import Purpose, ShardedState
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.mixed_rows import MixedRows, rows_of
from minifsdp.offload import host_copy
from minifsdp.rows import Rows, check_divisible
from minifsdp.support.buffers import Buffers
from minifsdp.support.divided_param import divided_parameter
from minifsdp.support.param_access import ParamInfo, Placeholder
from minifsdp.support.unsharded_storage import FeaturedFlatParam, UnshardedFlatParams
from minifsdp.users_comm import UsersComm


class UnreducedGrad(NamedTuple):
    """A gradient that no_sync has left; see no_sync.py."""

    grad: Tensor  # ``[padded_numel]``, of this rank alone, perhaps in ``unit.unreduced_dtype``;
    # or, if it ``is_scattered``, ``[padded_numel / ranks]``, this rank's part for its shard group
    mark: Tensor  # what was in ``sharded_flat_param.grad`` then
    mark_version: int
    shard_version: int
    cleared: Sequence[int] = ()  # numbers of the DTensors that had no gradient before the mark
    is_scattered: bool = False  # hybrid sharding has still to all-reduce it


class FeaturedUnit(Unit):
    """A unit of minifsdp.

    Args:
        module: the unit's module.
        param_infos: where the parameters are; those of nested units excluded. May be empty. The
            parameters are copied, and not kept.
        buffers: those of the same modules.
        placement: who shares them (see groups.py).
        precision: what to compute and to reduce in (see precision.py).
        offload_from: the device to compute on, if the shard is to live on the host (offload.py).
        tag: a number that no other unit of the group has, the same on all ranks.
        mesh: of the ranks of ``placement``, to divide the unit in rows. None: in chunks.

    Raises:
        ValueError: the parameters cannot share one flat tensor (see flatten.py and rows.py).
    """

    layout: FeaturedChunks | Rows
    sharded_flat_param: FlatParameter

    def __init__(
        self,
        module: nn.Module,
        param_infos: list[ParamInfo],
        buffers: Buffers,
        placement: Placement,
        precision: MixedPrecision,
        offload_from: torch.device | None,
        tag: int,
        mesh: DeviceMesh | None = None,
    ) -> None:
        named = {info.name: info.parameter for info in param_infos}
        check_flattenable(named) if mesh is None else check_divisible(named)
        trained = [param.requires_grad for param in named.values()]
        dtypes = {name: param.dtype for name, param in named.items()}
        named.clear()  # the unit lets them go
        shapes = [info.shape for info in param_infos]
        group = placement.shard_group
        world_size = group.size() if group is not None else 1
        self.mesh = mesh if param_infos else None
        layout: FeaturedChunks | Rows = FeaturedChunks(shapes, world_size)
        if self.mesh is not None:
            layout = rows_of(shapes, trained, world_size, dtypes, [i.dim for i in param_infos])
        super().__init__(module, param_infos, layout, *placement)

        self.buffers, self.precision, self.offload_from = buffers, precision, offload_from
        # How the shard is laid, if its parameters differ in dtype. `layout` is then that of the
        # unsharded flat parameter in use, which is another one if floating-point numbers are cast.
        self.mixed = layout if isinstance(layout, MixedRows) else None
        self.exact = False  # it is computed in the dtype in which it is kept, whatever `precision`
        self.tag = tag
        self.launches = defaultdict[str, Launches](Launches)  # by name of a group
        self.waits = set[str]()  # reasons not to reduce its gradient yet; see held_gradients.py
        self.on_demand: Callable[[FeaturedUnit], bool] = lambda unit: False  # see Placeholder
        self.is_list = False  # whether it has several modules; see listed_modules.py
        self.by_hand: ExitStack | None = None  # while FSDPModule.unshard() has it gathered
        self.comm_hook: Any = None  # a stage; see between_steps/comm_hooks.py
        self.users_comm = UsersComm()
        self.parts: list[Tensor] = []  # of gradients of this backward; see users_comm.KeepPart
        self.reshard_after_backward = True  # False: it stays until its shard changes; no_sync.py
        self.shard_numel = layout.optimized_numel(self.shard_rank)  # without padding
        self.padded_shard = host_copy(self.padded_shard, offload_from)
        self.unsharded = self.new_unsharded()  # of that copy; else the device would keep its own
        if self.mesh is not None:
            self.sharded_flat_param = divided_parameter(self, trained)
        else:
            unpadded = self.padded_shard[: self.shard_numel]
            self.sharded_flat_param = self._new_chunk(unpadded, any(trained))
        # What it sends of its own shard; `source` differs from it between forward and backward if
        # the unit has ranks to share it then (post_forward.py).
        self.own_source: Any = None
        self.post_forward_lines: tuple[tuple[int, ...], ...] | None = None
        self.unreduced_grad: UnreducedGrad | None = None
        self.unreduced_dtype: torch.dtype | None = None  # to keep it in; None: that of the gradient
        self.forward_targets: list[FeaturedUnit] = []  # what a program wants to have prefetched
        self.backward_targets: list[FeaturedUnit] = []  # at this unit's turn; prefetch_lists.py
        # In rows: this rank has not used one of its parameters, in a gradient that is not reduced.
        self.has_unused = False
        self.has_placeholders = False  # whether its modules have placeholders for parameters
        self.leaks = 0  # how often somebody else has kept the memory
        self.leaked = False  # whether somebody has kept it when it was last freed
        self.kept_views: list[ref[Tensor]] = []  # of the call whose backward runs; on_demand.py
        self.unsharded_by_dtype = UnshardedFlatParams(never_compile_inside(gradient_hook(self)))
        self.placeholders = [Placeholder(self, info) for info in param_infos]

    def new_unsharded(self) -> FeaturedFlatParam:
        """One for the time until the first use, which decides on dtype and device."""
        return FeaturedFlatParam(self.padded_shard, self.padded_shard, False, None)

    def _new_chunk(self, data: Tensor, requires_grad: bool) -> FlatParameter:
        is_sharded = self.shard_world_size > 1
        param = flat_parameter(data, requires_grad, self, is_sharded, self.grad_dtype)
        for name, value in common_attributes(self.param_infos).items():
            if not hasattr(param, name):  # its own attributes come first
                setattr(param, name, value)
        return param

    def replace_shard(self, found: nn.Parameter) -> FlatParameter:
        """Take over what torch has put in the shard's place, moved or cast. Other changes of a
        shard by a program are found by support/shard_changes.py."""
        chunk = self._new_chunk(found.data, found.requires_grad)
        self.sharded_flat_param = chunk
        return chunk

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the optimizer's gradients; None: that of the shard."""
        return self.precision.param_dtype if self.precision.keep_low_precision_grads else None

    def describe(self) -> str:
        """The unit in a few words, for ``print(model)``."""
        return super().describe() + ", in rows" * (self.mesh is not None)

    @property
    def device(self) -> torch.device:
        """Where the unit computes. With offload the shard is elsewhere."""
        return self.offload_from or self.sharded_flat_param.device

    @property
    def is_limited(self) -> bool:
        """As in the core; but a list is not, since it stays until its last module has run."""
        freed = self.reshard_after_forward and self.reshard_after_backward
        return freed and not self.is_list

    @property
    def optimized_params(self) -> list[nn.Parameter]:
        """What an optimizer finds in ``parameters()``: the sharded flat parameter, or a DTensor for
        each parameter."""
        shard: Any = self.sharded_flat_param  # in rows a DividedParameter
        return shard.params if self.mesh is not None else [shard]

    @property
    def trained(self) -> list[bool]:
        """Whether each parameter has a gradient."""
        trained = [param.requires_grad for param in self.optimized_params]
        return trained if self.mesh is not None else trained * len(self.param_infos)

    def end_by_hand(self) -> None:
        """Put away what ``FSDPModule.unshard()`` has gathered between steps, if that was called."""
        by_hand, self.by_hand = self.by_hand, None
        if by_hand is not None:
            by_hand.close()

    # -------------------------------------------------------------------------- its two tensors

    def choose_precision(self, purpose: Purpose) -> None:
        """Use the dtypes of this purpose for parameters and buffers: to look at them, the dtypes in
        which they are kept. The unit is sharded."""
        in_full = purpose is Purpose.EVAL and self.precision.full_precision_in_eval
        self.exact = in_full or purpose is Purpose.LOOK
        self.compute_in(self.dtype)
        if self.buffers.original_dtypes:
            self.buffers.place(self.device, self.exact)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the unit computes in, in the mode of the last forward."""
        kept = self.sharded_flat_param.dtype
        low = None if self.exact else self.precision.param_dtype
        # Integers are not rounded: they may be indices, or weights in a program's own encoding.
        return low if low and kept.is_floating_point else kept

    def dtype_of(self, info: ParamInfo) -> torch.dtype:
        """The same for one parameter; if parameters do not differ, it is the unit's."""
        if self.mixed is None:
            return self.dtype
        return self._computed(self.mixed).dtypes[self.param_infos.index(info)]

    def _computed(self, kept: MixedRows) -> MixedRows:
        return kept.computed_in(None if self.exact else self.precision.param_dtype)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Use the unsharded flat parameter of a dtype. The unit is sharded."""
        trained = self.sharded_flat_param.requires_grad
        layout = self.layout if self.mixed is None else self._computed(self.mixed)
        made = self.unsharded_by_dtype.get(dtype, trained, layout)
        made = made or self._new_unsharded(dtype, trained, layout)
        if made is not self.unsharded:
            self._use(made)

    def compute_with(self, unsharded: FeaturedFlatParam) -> None:
        """Use the unsharded flat parameter that a graph was made with; its dtype may differ.

        Raises:
            RuntimeError: it is gone: the parameters were moved, cast, frozen or replaced.
        """
        if unsharded not in self.unsharded_by_dtype:
            raise RuntimeError(
                f"the parameters of unit {self.label} were moved, cast, frozen or replaced between "
                f"a forward and its backward. Call backward() first."
            )
        assert self.state.sharded is ShardedState.SHARDED, self.label
        self._use(unsharded)

    def _use(self, unsharded: FeaturedFlatParam) -> None:
        self.unsharded, self.layout = unsharded, unsharded.layout
        self.views = []  # they are of another one

    @torch.inference_mode(False)  # what is made here outlives the mode that a forward may run in
    def _new_unsharded(
        self, dtype: torch.dtype, trained: bool, layout: FeaturedChunks | Rows
    ) -> FeaturedFlatParam:
        whole = self.shard_group is None and self.offload_from is None
        whole = whole and dtype is self.padded_shard.dtype and self.mixed in (None, layout)
        if whole:  # it is all there
            memory = self.padded_shard.data
        else:
            # A unit without elements is never gathered: its marks (rows.py) stay as they are here.
            new = torch.empty if self.numel else torch.zeros
            memory = new(layout.padded_numel, dtype=dtype, device=self.device)
        return self.unsharded_by_dtype.add(
            memory,
            trained,
            needs_unshard=not whole and self.numel > 0,
            layout=layout,
        )

    def release(self) -> None:
        """Free the unsharded memory; see :meth:`FeaturedFlatParam.release`."""
        self.leaked = not self.unsharded.release(self.views)
        if self.leaked:
            self.views = []
            self.leaks += 1
