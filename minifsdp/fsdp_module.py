"""``fully_shard``: the same units without a wrapper, as PyTorch's FSDP2 makes them.

``FullyShardedDataParallel(module)`` is a new module around the old one. ``fully_shard(module)``
makes the module itself the unit. Its parameters become DTensors in place, its names stay, and its
class becomes a subclass that gathers the unit when the module is called::

    for block in model.blocks:
        fully_shard(block)         # block.__class__: Block -> FSDPBlock(FSDPModule, Block)
    fully_shard(model)             # the root has what is left
    optimizer = torch.optim.AdamW(model.parameters())      # DTensors, under their own names

What is on the meta device stays there until ``model.to_empty()`` or ``load_state_dict()`` with
``assign=True`` gives it memory, for this rank's rows only (checks/first_step.py).

All else is what the wrapper does, with units in rows (rows.py).

Source: ``torch.distributed.fsdp.fully_shard`` (pytorch 2.13), whose names and arguments these are.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from minifsdp.between_steps.full_params import Options, full_params
from minifsdp.between_steps.state_dict import register_rows_hook
from minifsdp.checks.misplaced_calls import check_root_and_idle
from minifsdp.checks.other_wrappers import check_inside
from minifsdp.checks.param_changes import check_unreplaced_by_hand
from minifsdp.checks.unsupported import add_missing, join_hook, refuse
from minifsdp.core.api import BackwardPrefetch
from minifsdp.core.streams import Streams
from minifsdp.dispatch_modes import never_compile
from minifsdp.fully_sharded import make_root
from minifsdp.no_sync import NoSync
from minifsdp.prefetch_lists import ListedParameters, ListedPrefetcher, units_to_prefetch
from minifsdp.strategies import choose_strategies
from minifsdp.support.listed_modules import ListedModules, outermost
from minifsdp.support.pytree import map_tensors
from minifsdp.support.shard_changes import adopt
from minifsdp.support.tensor_parallel import data_mesh
from minifsdp.users_comm import checked, group_for_reductions, hybrid_of
from minifsdp.wrapping.attributes import AVERAGES, check_names
from minifsdp.wrapping.auto_wrap import check_wrappable
from minifsdp.wrapping.build import build_unit
from minifsdp.wrapping.compiled import compiled, is_compiling, uncompiled
from minifsdp.wrapping.fsdp2_settings import fsdp2_settings, post_forward_lines
from minifsdp.wrapping.ignored import ignoring, params_only
from minifsdp.wrapping.root_settings import make_limiter, make_prefetcher
from minifsdp.wrapping.shard_placement import divided_dims


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # it is frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Make a unit of the parameters of ``module`` that no unit inside has. Inner modules first.

    Args:
        module: is changed in place. Or several modules, which are one unit: it is gathered before
            the first of them that runs, and freed after the last; see support/listed_modules.py.
            Modules below others of the list are left out, and so are repeated ones.
        mesh: of one dimension: the ranks to shard over, all of them if None; or of two, (replicate,
            shard), for hybrid sharding. Parameters and buffers are moved to its device, except
            from the meta device. Parameters that are DTensors on another dimension of the same mesh
            are divided further; see support/tensor_parallel.py.
        reshard_after_forward: whether to free the parameters between forward and backward. None is
            True. The root keeps them in any case, since its backward comes next. A number says how
            many ranks share them then: all means True, and 1 means False. Any other number needs
            more memory, and gathers them for the backward in smaller groups (post_forward.py).
        shard_placement_fn: called with each parameter; returns ``Shard(dim)`` for one that is to be
            divided along ``dim``, or None for the first dimension (wrapping/shard_placement.py).
        mp_policy: the dtypes to compute and to reduce in, and of the outputs.
        offload_policy: ``CPUOffloadPolicy()`` for shards in the host's memory (offload.py), always
            pinned where the device is a GPU.
        ignored_params: parameters that stay as they are; see wrapping/ignored.py. Their gradients
            are not reduced.
        dp_mesh_dims: which dimensions of ``mesh`` are for data, if the parameters are DTensors on
            all of it; see support/tensor_parallel.py.

    Returns:
        ``module``, which is an :class:`FSDPModule` now; or the same list of them.

    Raises:
        ValueError: parameters that cannot share a unit, or that two units would share; a parameter
            without a dimension; a DTensor on a mesh that is not beside ``mesh``; a module that is
            sharded already, or that has no forward; a mesh of more than two dimensions; a number of
            ranks that does not divide those of the mesh; an empty list.
        TypeError: something other than modules; ignored things that are no parameters.
        RuntimeError: there is no process group, or an optimizer was built before.
        NotImplementedError: an argument that minifsdp does not have yet.
    """
    on_mesh = mesh if dp_mesh_dims else None  # of all parameters
    mesh = data_mesh(mesh, dp_mesh_dims or None)
    if on_mesh is not None and type(reshard_after_forward) is int:
        refuse(reshard_after_forward=f"{reshard_after_forward} with dp_mesh_dims")
    modules = outermost(module)
    whole = modules[0] if len(modules) == 1 else ListedModules(modules)
    with ignoring(whole, ignored_states=params_only(ignored_params)):
        for position, one in enumerate(modules):
            check_wrappable(one, str(position) if one is not whole else "")
            check_names(one)
        check_inside(whole, mesh, on_mesh)
        settings = fsdp2_settings(mesh, reshard_after_forward, mp_policy, offload_policy)
        group = settings.placement.shard_group
        ranks = 1 if group is None else group.size()
        dims = divided_dims(whole, shard_placement_fn, ranks, mesh)
        unit = build_unit(whole, settings, stays_on_meta=True, dims=dims)
        unit.is_list, unit.unreduced_dtype = whole is not modules[0], mp_policy.reduce_dtype
        unit.post_forward_lines = post_forward_lines(reshard_after_forward, unit.shard_group, mesh)
    for one in modules:
        one.__dict__.update(_unit=unit, _fsdp_output_dtype=mp_policy.output_dtype)
        cls: Any = type(one)
        one.__class__ = _subclass(cls)
        register_rows_hook(one)
    prefetcher = make_prefetcher(BackwardPrefetch.BACKWARD_PRE, None, ListedPrefetcher)
    make_root(whole, make_limiter(True), prefetcher, ListedParameters)
    return module


class FSDPModule:
    """What :func:`fully_shard` adds to the class of a module.

    The names are torch's, or begin with ``_fsdp``, so that a module may have all others itself.
    """

    _unit: Any  # what wrappers have, too; check_names keeps these two free
    _hooks: Any
    _fsdp_output_dtype: Any
    join_hook = join_hook

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the class from before: ``model[:2]`` makes one of the class of ``model``, and
        the new module is not sharded."""
        plain: Any = cls.__mro__[2]
        return plain(*args, **kwargs)

    @uncompiled
    def __call__(self, callback: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's call, with its parameters gathered for as long as it runs."""
        return self._fsdp_gathered(super().__call__, callback, args, kwargs)  # type: ignore[misc]

    @never_compile
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Called by :meth:`__call__`; or directly by ``torch.compile(module)``, if that was called
        before :func:`fully_shard`: then it still has the old ``__call__``."""
        if is_compiling() and not self._hooks.runs(self._unit):
            looked_at = self._unit in self._hooks.summoned and self._unit.by_hand is None
            if not looked_at:
                return self(*args, **kwargs)
        return super()._call_impl(*args, **kwargs)  # type: ignore[misc]

    def _fsdp_gathered(self, function: Any, callback: Any, args: Any, kwargs: Any) -> Any:
        for unit in [*self._hooks.summoned]:
            if unit.by_hand is not None:
                check_unreplaced_by_hand(unit)
                unit.end_by_hand()
        called = function if callback is None else compiled(function, callback)
        if self._hooks.runs(self._unit):
            return called(*args, **kwargs)  # a registered method that calls its own module
        forward = self._hooks.forward
        if self._hooks.summoned:
            forward = self._hooks.forward_between_steps
        output = forward(self._unit, self, called, args, kwargs)
        if self._fsdp_output_dtype is None:
            return output

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._fsdp_output_dtype) if tensor.is_floating_point() else tensor

        return map_tensors(cast, output)

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather the module's unit between steps: its attributes are whole parameters until
        :meth:`reshard`, or until the next forward or backward. Changes of them are lost, and an
        optimizer that is built of them is refused when it steps.

        In a forward or backward: start to gather the unit ahead of its turn, as a list of
        :meth:`set_modules_to_forward_prefetch` does. In both cases every rank has to call this.

        Args:
            async_op: return a handle with a ``wait()``, which need not be called.
        """
        if not self._hooks.idle:
            engine: Any = self._hooks.engine
            engine.parameters.prefetch([self._unit])
        elif self._unit.by_hand is None:
            by_hand, options = ExitStack(), Options(writeback=False)
            by_hand.enter_context(full_params(self._hooks, [self._unit], options))
            self._unit.by_hand = by_hand  # last: it may be refused
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free what :meth:`unshard` has gathered."""
        self._unit.end_by_hand()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether from now on backwards reduce the gradients of this unit, and with ``recurse`` of
        those below it, or leave them on this rank. See no_sync.py. Same on all ranks.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        units = self._fsdp_units_between_steps("set_requires_gradient_sync", recurse)
        no_sync = self._hooks.engine.layer(NoSync)
        change = no_sync.unreduced.difference if requires_gradient_sync else no_sync.unreduced.union
        no_sync.unreduced = change(units)
        self._fsdp_choose(hybrid_of(units), all_reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """The same for the all-reduce of hybrid sharding alone. With False gradients are reduced in
        the shard group, and the sum of several backwards is kept there. Does nothing without hybrid
        sharding. Raises as :meth:`set_requires_gradient_sync`."""
        units = self._fsdp_units_between_steps("set_requires_all_reduce", recurse)
        self._hooks.engine.layer(NoSync).begin_to_use()
        self._fsdp_choose(hybrid_of(units), all_reduces=requires_all_reduce)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """False: units stay gathered after their backward, until an optimizer or the program
        changes their shards. (What is written through ``.data`` is not noticed.) That saves the
        gathers of the next steps of an accumulation, and costs the memory of the units. Raises as
        :meth:`set_requires_gradient_sync`."""
        for unit in self._fsdp_units_between_steps("set_reshard_after_backward", recurse):
            unit.reshard_after_backward = reshard_after_backward
        self._hooks.engine.layer(NoSync).begin_to_use()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients over all ranks by ``factor``, and not by the
        number of ranks.

        Raises:
            ValueError: ``factor`` is not above zero.
            RuntimeError: a forward or backward is running.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): expected a number above 0")
        units = self._fsdp_units_between_steps("set_gradient_divide_factor")
        self._fsdp_choose(units, divide_factor=float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # torch's old name

    def set_all_reduce_hook(self, hook: Callable[[Tensor], object], *, stream: Any = None) -> None:
        """Have ``hook`` called in each backward with this rank's part of the mean of this unit's
        gradient, 1-D, in the dtype of the reduction. The hook may write to this. On GPUs it is
        called on the stream of reductions.

        Raises:
            NotImplementedError: ``stream`` is given.
            RuntimeError: a forward or backward is running.
        """
        refuse(stream=stream)
        self._fsdp_choose(
            self._fsdp_units_between_steps("set_all_reduce_hook"), all_reduce_hook=hook
        )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit by ``comm``, as torch's ``AllGather`` is called. ``comm`` writes to
        memory that its ``allocate`` has made; the result is copied from there.

        Raises:
            TypeError: ``comm`` cannot be called, or has no ``allocate``.
            RuntimeError: a forward or backward is running.
        """
        self._fsdp_choose(
            self._fsdp_units_between_steps("set_custom_all_gather"), all_gather=checked(comm)
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce gradients of this unit by ``comm``, as torch's ``ReduceScatter`` is called. Raises
        as :meth:`set_custom_all_gather`."""
        self._fsdp_choose(
            self._fsdp_units_between_steps("set_custom_reduce_scatter"),
            reduce_scatter=checked(comm),
        )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce gradients in a process group of their own, so that NCCL may gather meanwhile. All
        ranks that share the units call it. Raises as :meth:`set_requires_gradient_sync`."""
        for unit in self._fsdp_units_between_steps("set_separate_reduce_scatter_group", recurse):
            own = enable and unit.shard_group is not None
            group = group_for_reductions(unit.shard_group) if own else None
            self._fsdp_choose([unit], reduce_group=group)

    def set_post_optim_event(self, event: Any) -> None:
        """On a GPU, let the gathers of the next forward wait for ``event``, recorded after the
        optimizer's step, and not for all work that is queued by then."""
        self._hooks.engine.after_optimizer = event

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Does nothing: a unit is gathered in the backward if autograd has saved one of its
        parameters, and only then."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Does nothing: gradients are scaled before they travel, and all reductions are sums."""

    def _fsdp_units_between_steps(self, method: str, recurse: bool = False) -> list[Any]:
        if not self._hooks.idle:
            raise RuntimeError(f"{method} was called in a forward or backward; call it between.")
        return self._fsdp_units(recurse)

    def _fsdp_units(self, recurse: bool) -> list[Any]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        return [*dict.fromkeys(m._unit for m in modules if isinstance(m, FSDPModule))]

    def _fsdp_choose(self, units: list[Any], **choices: Any) -> None:
        for unit in units:
            unit.users_comm = replace(unit.users_comm, **choices)
        choose_strategies(units, self._hooks.engine.streams)

    def _get_fsdp_state(self) -> NoReturn:
        raise NotImplementedError(
            "minifsdp: _get_fsdp_state is not there: it gives torch's own objects. Nothing needs "
            "their reset_sharded_param(): load_state_dict(assign=True), to() and parameters that "
            "are put in place of others are followed in the next step."
        )

    def reset_iter_state(self) -> None:
        """Does nothing: the next forward or backward resets what an exception has left."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Does nothing if it is True: ranks agree in each backward on what any of them has used,
        and those that have not used it reduce zeros.

        Raises:
            NotImplementedError: for False.
        """
        refuse(set_reduce_scatter_unused_params=None if reduce_scatter_unused_params else "False")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """A name of torch's: whether gathers take their memory on the stream of the computation.

        Raises:
            NotImplementedError: for True.
        """
        refuse(_set_unshard_async_op=async_op)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: each backward leaves all its gradients where the optimizer finds them."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """As the argument of :func:`fully_shard`, from the next forward on. Same on all ranks.

        Raises:
            ValueError: ``reshard_after_forward`` is not True or False.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r}: it is True or False here, as in "
                f"torch. A number of ranks is given to fully_shard, when the unit is made."
            )
        for unit in self._fsdp_units(recurse):
            unit.reshard_after_forward, unit.post_forward_lines = reshard_after_forward, None

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the units of ``modules`` when this one's forward begins; see prefetch_lists.py.
        Same on all ranks. An empty list: choose from the recorded order, as without a list.

        Raises:
            ValueError: one of them was not given to :func:`fully_shard`.
        """
        self._unit.forward_targets = units_to_prefetch(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """The same when this one's backward begins."""
        self._unit.backward_targets = units_to_prefetch(modules)

    @torch.inference_mode(False)  # what is made here outlives the mode that a program may be in
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Of ``to()``, ``to_empty()``, ``half()``: torch swaps all that a DTensor has for what a
        new one has, and so drops attributes that a program has set on it."""
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        adopt(self._unit)
        return self

    def extra_repr(self) -> str:
        """For ``print(model)``, which then shows where the units are."""
        own = super().extra_repr()  # type: ignore[misc]
        of_list = f"with the modules {self._unit.label}" if self._unit.is_list else ""
        return ", ".join(filter(None, [own, self._unit.describe(), of_list]))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a module that fully_shard has changed cannot be copied or pickled: it is one part of "
            "something that is spread over processes. Save state_dict(), or build a second model. "
            + AVERAGES
        )


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Does nothing: the gather is complete, or the module itself waits for it when it runs."""


def _subclass(cls: Any) -> type:
    """The subclass of ``cls`` with the methods of :class:`FSDPModule`. It is the same each time, so
    that ``type(block) is type(other_block)`` stays true."""
    bases = (FSDPModule, cls)
    # Not from a cache, which would keep classes for ever.
    made = (one for one in type.__subclasses__(cls) if one.__bases__ == bases)
    return next(made, None) or type(f"FSDP{cls.__name__}", bases, {"__module__": cls.__module__})


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather the module's unit, as a call of the module does.

    Does nothing if ``module`` was not given to :func:`fully_shard`, as in torch.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to gather for")

    def gathered(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_gathered(method, None, args, kwargs)

    module.__dict__[method_name] = MethodType(gathered, module)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Let the roots ``modules`` share their streams, for example the stages of a pipeline that one
    rank runs. The allocator keeps memory apart for each stream, so this saves memory.

    Raises:
        ValueError: one of them was not given to :func:`fully_shard`.
        RuntimeError: one is not a root, or a forward or backward is running.
    """
    units_to_prefetch(modules)  # raises
    streams_on = cache(Streams.on)
    for module in modules:
        hooks: Any = module._hooks
        unit: Any = module._unit
        check_root_and_idle(unit, hooks.engine.root, hooks.idle, "share_comm_ctx")
        hooks.engine.streams_on = streams_on
        hooks.engine.compute_on(hooks.engine.streams.device)


add_missing(
    FSDPModule,
    "set_allocate_memory_from_process_group_for_comm set_reduce_scatter_max_input_buffers "
    "set_symm_mem_for_comm",
)
