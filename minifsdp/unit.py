"""The noun: one unit of sharding.

A unit is a module's parameters, flattened and sharded together. It owns two tensors::

    sharded_flat_param             this rank's shard, [at most padded_numel / shard_world_size].
                                   An nn.Parameter: what the optimizer sees. Always there.
    unsharded.flat_param           the shards of all ranks, [padded_numel]. What the layers compute
                                   with. Its memory is there only while it is needed.

``unit.layout`` says which elements of the second are in the first: a chunk (shard.py), or rows of
each parameter (rows.py). Of rows the optimizer sees a DTensor for each parameter, in place of the
flat parameter behind them (support/divided_param.py).

The second never goes away as an *object*; its *storage* shrinks to nothing and grows again
(support/unsharded_storage.py says why). Where the unit stands in a step is in unit_state.py.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.api import MixedPrecision
from minifsdp.comm.groups import Placement
from minifsdp.flatten import check_flattenable
from minifsdp.offload import host_copy
from minifsdp.rows import Rows, check_divisible
from minifsdp.shard import Chunks
from minifsdp.streams import Event
from minifsdp.support.buffers import Buffers
from minifsdp.support.divided_param import divided_parameter
from minifsdp.support.flat_parameter import FlatParameter, flat_parameter
from minifsdp.support.param_access import ParamInfo, Placeholder
from minifsdp.support.param_attributes import common_attributes
from minifsdp.support.unsharded_storage import UnshardedFlatParam, UnshardedFlatParams
from minifsdp.unit_state import Purpose, ShardedState, UnitState


class UnreducedGrad(NamedTuple):
    """A gradient that no_sync has left; see no_sync.py."""

    grad: Tensor  # ``[padded_numel]``, of this rank alone, perhaps in ``unit.unreduced_dtype``
    mark: Tensor  # what was in ``sharded_flat_param.grad`` then
    mark_version: int
    shard_version: int
    cleared: Sequence[int] = ()  # numbers of the DTensors that had no gradient before the mark


class Unit:
    """The parameters of one module, as one sharded flat parameter.

    Args:
        module: the unit's module.
        param_infos: where the parameters are; those of nested units excluded. May be empty. The
            parameters are copied, and not kept.
        buffers: those of the same modules.
        placement: who shares them (see groups.py).
        precision: what to compute and to reduce in (see precision.py).
        offload_from: the device to compute on, if the shard is to live on the host (offload.py).
        tag: a number that no other unit of the group has, the same on all ranks.
        mesh: of the ranks of ``placement``, to divide the unit in rows, of which the optimizer sees
            a DTensor for each parameter (rows.py). None: in chunks (shard.py).

    Raises:
        ValueError: the parameters cannot share one flat tensor (see flatten.py and rows.py).
    """

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
        params = [info.parameter for info in param_infos]
        named = {info.name: param for info, param in zip(param_infos, params, strict=True)}
        check_flattenable(named) if mesh is None else check_divisible(named)
        self.rename("")
        self.module, self.param_infos, self.buffers = module, param_infos, buffers
        self.shard_group, self.replicate_group, self.reshard_after_forward = placement
        self.precision, self.offload_from = precision, offload_from
        self.exact = False  # it is computed in the dtype in which it is kept, whatever `precision`
        self.ancestors: list[Unit] = []  # units around this one, outermost first
        self.state, self.tag = UnitState(), tag
        self.unshard_event: Event | None = None  # while UNSHARDING: passed when the data is there
        self.on_demand: Callable[[Unit], bool] = lambda unit: False  # see param_access.Placeholder
        self.is_list = False  # of several modules; see listed_modules.py
        self.reasons = set[str]()  # to stay gathered; see unit_state.py
        self.waits = set[str]()  # reasons not to reduce its gradient yet; see gradients.py
        self.free: Callable[[Unit], None] = lambda unit: None  # when no reason is left; the root's
        self.by_hand: ExitStack | None = None  # while FSDPModule.unshard() has it gathered
        self.comm_hook: Any = None  # a stage; see between_steps/comm_hooks.py

        group = self.shard_group
        self.shard_rank = group.rank() if group is not None else 0
        self.shard_world_size = group.size() if group is not None else 1  # that share it
        shapes = [info.shape for info in param_infos]
        self.mesh = mesh if params else None
        trained = [param.requires_grad for param in params]
        self.layout: Chunks | Rows = Chunks(shapes, self.shard_world_size)
        if self.mesh is not None:
            self.layout = Rows(shapes, trained, self.shard_world_size)
        self.numel = sum(shape.numel() for shape in shapes)

        # The shard's memory, and padding in it.
        self.padded_shard = host_copy(
            self.layout.shard(self.layout.flatten(params), self.shard_rank), offload_from
        )
        self.sharded_flat_param: FlatParameter
        if self.mesh is not None:
            self.sharded_flat_param = divided_parameter(self, trained)
        else:
            unpadded = self.padded_shard[: self.layout.optimized_numel(self.shard_rank)]
            self.sharded_flat_param = self._new_chunk(unpadded, any(trained))
        # Its strategies, which strategies.py chooses. What it sends in a gather, and what it sends
        # of its shard (unshard.py), differ between forward and backward if it has ranks to share
        # it then; see post_forward.py.
        self.source: Any = None
        self.own_source: Any = None
        self.places: Any = None  # what its modules find; see views.py
        self.comm: Any = None  # how that travels, and its gradient; see collectives.py
        self.stages: Sequence[Any] = ()  # of the reduction of its gradient; see reduce.py
        self.view_maker: Any = None  # of what its layers compute with; see views.py
        self.post_forward_lines: tuple[tuple[int, ...], ...] | None = None
        self.unreduced_grad: UnreducedGrad | None = None
        self.unreduced_dtype: torch.dtype | None = None  # to keep it in; None: that of the gradient
        self.forward_targets: list[Unit] = []  # what a program wants to have prefetched when this
        self.backward_targets: list[Unit] = []  # unit's turn begins; see prefetch_lists.py
        self.views: list[Tensor] = []
        # In rows: this rank has not used one of its parameters, in a gradient that is not reduced.
        self.has_unused = False
        self.shows_views = True  # its modules see unsharded parameters
        self.has_placeholders = False  # its modules see those, and no parameters
        self.leaks = 0  # how often somebody else has kept the memory
        self.leaked = False  # this is so since it was freed last
        self.watched: object = None  # by flat_parameter.watch_for_losses
        self.unsharded_by_dtype = UnshardedFlatParams()
        # Till the first use. Then the one of the dtype that is computed in.
        self.unsharded = UnshardedFlatParam(self.padded_shard, self.padded_shard, False, None)
        self.placeholders = [Placeholder(self, info) for info in param_infos]

    def _new_chunk(self, data: Tensor, requires_grad: bool) -> FlatParameter:
        is_sharded = self.shard_world_size > 1
        param = flat_parameter(data, requires_grad, self, is_sharded, self.grad_dtype)
        for name, value in common_attributes(self.param_infos).items():
            if not hasattr(param, name):  # what it has is its own
                setattr(param, name, value)
        return param

    def replace_shard(self, found: nn.Parameter) -> FlatParameter:
        """Take over what torch has put in the shard's place, moved or cast. What a program does to
        a shard in other ways is found by support/shard_changes.py."""
        self.sharded_flat_param = self._new_chunk(found.data, found.requires_grad)
        return self.sharded_flat_param

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of the optimizer's gradients; None: that of the shard."""
        return self.precision.param_dtype if self.precision.keep_low_precision_grads else None

    def rename(self, name: str) -> None:
        """Take a name, which is the wrapper's place in the root; the root itself keeps ``""``. The
        label is the name as a message should say it."""
        self.name, self.label = name, repr(name) if name else "<root>"

    def describe(self) -> str:
        """The unit in a few words, for ``print(model)``."""
        ranks = f"{self.shard_world_size} rank{'s' * (self.shard_world_size > 1)}"
        rows = ", in rows" if self.mesh is not None else ""
        return f"unit of {self.numel:,} parameters, sharded over {ranks}{rows}"

    @property
    def padded_numel(self) -> int:
        """Elements of the unsharded flat parameter."""
        return self.layout.padded_numel

    @property
    def device(self) -> torch.device:
        """Where it is computed with, which with offload is not where the shard is."""
        return self.offload_from or self.sharded_flat_param.device

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

    def hold(self, reason: str) -> None:
        """Keep the unit, once it is gathered, until :meth:`let_go` of the same reason."""
        self.reasons.add(reason)

    def let_go(self, *reasons: str) -> None:
        """Free the unit if there was a reason to keep it, and there is no other."""
        if self.reasons:
            self.reasons.difference_update(reasons)
            if not self.reasons:
                self.free(self)

    def end_by_hand(self) -> None:
        """Put away what ``FSDPModule.unshard()`` has gathered between steps, if that was called."""
        by_hand, self.by_hand = self.by_hand, None
        if by_hand is not None:
            by_hand.close()

    # -------------------------------------------------------------------------- its two tensors

    def choose_precision(self, purpose: Purpose) -> None:
        """Parameters and buffers in the dtypes that they have for this purpose: to look at them,
        those in which they are kept. The unit is sharded."""
        in_full = purpose is Purpose.EVAL and self.precision.full_precision_in_eval
        self.exact = in_full or purpose is Purpose.LOOK
        self.compute_in(self.dtype)
        self.buffers.place(self.device, self.exact)

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in, in the mode of the last forward."""
        kept = self.sharded_flat_param.dtype
        low = None if self.exact else self.precision.param_dtype
        # An integer is no number to round: it may be an index, or a weight in somebody's own code.
        return low if low and kept.is_floating_point else kept

    def compute_in(self, dtype: torch.dtype) -> None:
        """Use the unsharded flat parameter of a dtype. The unit is sharded."""
        trained = self.sharded_flat_param.requires_grad
        made = self.unsharded_by_dtype.get(dtype, trained)
        self._use(made if made is not None else self._new_unsharded(dtype, trained))

    def compute_with(self, unsharded: UnshardedFlatParam) -> None:
        """Use the one that a graph was made with, which may be of another dtype.

        Raises:
            RuntimeError: the parameters were moved or cast since, and it is gone.
        """
        if unsharded not in self.unsharded_by_dtype:
            raise RuntimeError(
                f"the parameters of unit {self.label} were moved, cast, frozen or replaced between "
                f"a forward and its backward. Call backward() first."
            )
        assert self.state.sharded is ShardedState.SHARDED, self.label
        self._use(unsharded)

    def _use(self, unsharded: UnshardedFlatParam) -> None:
        if unsharded is not self.unsharded:
            self.views = []  # they are of another one
        self.unsharded = unsharded

    @torch.inference_mode(False)  # what is made here outlives the mode that a forward may run in
    def _new_unsharded(self, dtype: torch.dtype, trained: bool) -> UnshardedFlatParam:
        whole = self.shard_group is None and self.offload_from is None
        whole = whole and dtype is self.padded_shard.dtype
        if whole:  # it is all there
            memory = self.padded_shard.data
        else:
            memory = torch.empty(self.padded_numel, dtype=dtype, device=self.device)
        return self.unsharded_by_dtype.add(
            memory,
            trained,
            needs_unshard=not whole and self.numel > 0,
            trained_numel=self.layout.trained_numel,
        )

    def release(self) -> None:
        """Free the unsharded memory; see :meth:`UnshardedFlatParam.release`."""
        self.leaked = not self.unsharded.release(self.views)
        if self.leaked:
            self.views = []
            self.leaks += 1
