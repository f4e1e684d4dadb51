"""``FullyShardedDataParallel``: the thin module that users hold.

It wraps a module, makes a unit of the parameters that no wrapper inside has taken, and calls the
hooks around ``forward``. The outermost wrapper is the *root*: it has the streams, the limiter and
the prefetching of all units below it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.api import CPUOffload, MixedPrecision
from minifsdp.between_steps.checkpoint_calls import refuse_full_options
from minifsdp.between_steps.clip_grad import clip_grad_norm
from minifsdp.between_steps.comm_hooks import register_comm_hook
from minifsdp.between_steps.full_params import Options, summon
from minifsdp.between_steps.state_dict import register_hooks
from minifsdp.between_steps.state_dict_methods import StateDictMethods
from minifsdp.checks.misplaced_calls import check_root_and_idle
from minifsdp.checks.other_wrappers import check_inside
from minifsdp.chunks.param_names import as_before_wrapping
from minifsdp.core import fully_sharded as core
from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
from minifsdp.core.limiter import Limiter
from minifsdp.core.parameters import Parameters
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_hooks import FeaturedBackward, FeaturedHooks
from minifsdp.features import layers_of
from minifsdp.no_sync import NoSync
from minifsdp.strategies import choose_strategies
from minifsdp.support.prefetch_stats import CountedPrefetcher
from minifsdp.support.shard_changes import adopt
from minifsdp.wrapping.attributes import Forward, ModuleWrapper
from minifsdp.wrapping.auto_wrap import Policy, check_wrappable
from minifsdp.wrapping.build import build_unit, wrap_below
from minifsdp.wrapping.compiled import call_wrappers, compiled, uncompiled
from minifsdp.wrapping.ignored import ignoring
from minifsdp.wrapping.module_tree import clean, ignored_params, name_units, unit_of
from minifsdp.wrapping.root_settings import make_limiter, make_prefetcher
from minifsdp.wrapping.settings import Settings
from minifsdp.wrapping.torch_names import from_torch


class FullyShardedDataParallel(StateDictMethods, ModuleWrapper):
    """Shard a module's parameters, gradients and optimizer state over the ranks of a group.

    Args:
        module: parameters of one dtype on one device, with the same values on every rank (or see
            ``sync_module_states``).
        process_group: the ranks to shard over; the default group if None. For hybrid strategies a
            pair (shard group, replicate group); if None, the ranks of each host shard.
        sharding_strategy: FULL_SHARD if None.
        cpu_offload: see offload.py.
        auto_wrap_policy: which modules inside become units of their own, such as a
            :class:`~minifsdp.wrapping.policies.ModuleWrapPolicy`. None: only what is wrapped by
            hand.
        backward_prefetch: see prefetch.py; None is none.
        mixed_precision: see precision.py.
        ignored_modules: modules to leave alone, with all below them; see wrapping/ignored.py.
            Their gradients are not reduced.
        param_init_fn: called with each module of a unit that has something on the meta device, to
            give it memory and values; None: ``reset_parameters()`` does. See materialize.py.
        device_id: move the module there first, unit by unit.
        sync_module_states: give every rank the parameters and buffers that the first one has.
        forward_prefetch: see prefetch.py; True is ``ForwardPrefetch.FORWARD_PRE``. None is that on
            a CPU, where the host does not run ahead, and no gather would be hidden otherwise.
        limit_all_gathers: how many units may be alive at once: a number; True for PyTorch's limit,
            2 and one that only the device has not freed; False for no limit; or a
            :class:`~minifsdp.core.limiter.Limiter`.
        use_orig_params: cut units in rows (rows.py). ``parameters()`` then has a DTensor for each
            parameter, under its own name. False: in chunks (shard.py), one 1-D chunk for each unit.
        ignored_states: parameters, or modules, to leave alone; instead of ``ignored_modules``.
        device_mesh: instead of ``process_group``; with two dimensions, (replicate, shard), for
            hybrid strategies.

    The root's prefetching and limit are used for all its units. All other arguments are for one
    unit; units that ``auto_wrap_policy`` makes get these, unless the policy gives others.

    Build the optimizer *after* wrapping, from this module's ``parameters()``. ``backward()`` puts
    the mean over all ranks into their ``grad``.

    Raises:
        ValueError: parameters that cannot share a unit, or that two units would share; a module
            that is wrapped already, or that has no forward; groups that do not fit the strategy;
            something that cannot be ignored.
        TypeError: a strategy, policy or prefetch that is none of minifsdp's; ignored things that
            are no modules or parameters.
        RuntimeError: there is no process group, or an optimizer was built before.

    Sources: Zhao et al., "PyTorch FSDP", arXiv:2304.11277; Rajbhandari et al., "ZeRO",
    arXiv:1910.02054.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool | ForwardPrefetch | None = None,
        limit_all_gathers: bool | int | Limiter = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        with ignoring(module, ignored_modules, ignored_states):
            if auto_wrap_policy is None:
                check_wrappable(module)
            check_inside(module)
            limiter = make_limiter(limit_all_gathers)
            prefetcher = make_prefetcher(from_torch(backward_prefetch), forward_prefetch)
            settings = Settings(  # last: it may make process groups, in which all ranks take part
                process_group, sharding_strategy, cpu_offload, mixed_precision, param_init_fn,
                device_id, sync_module_states, device_mesh, use_orig_params,
            )  # fmt: skip
            if auto_wrap_policy is not None:
                policy = from_torch(auto_wrap_policy)
                wrap_below(module, policy, settings, FullyShardedDataParallel)
            call_wrappers(module)
            self._unit = build_unit(module, settings)
        self._fsdp_wrapped_module = module
        register_hooks(self)
        make_root(self, limiter, prefetcher)
        self.training = module.training
        self.__dict__["forward"] = Forward(type(self).forward, self)

    @uncompiled
    def forward(self, callback: Any, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered for as long as it runs."""
        # Looked up as an attribute it would take as long as all that a gather needs of the host.
        module: Any = self._modules["_fsdp_wrapped_module"]
        called = module if callback is None else compiled(module, callback)
        if self._hooks.summoned:
            return self._hooks.forward_between_steps(self._unit, module, called, args, kwargs)
        return self._hooks.forward(self._unit, module, called, args, kwargs)

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self._engine.root is self._unit

    @property
    def module(self) -> Any:
        """The wrapped module, also if ``apply_activation_checkpointing`` has put a wrapper of its
        own between the two."""
        return self._unit.module

    @property
    def _engine(self) -> FeaturedEngine:
        """What this wrapper's root shares among its units: counts, orders, limiter. It can be
        reached as ``engine`` too, unless the wrapped module has something of that name."""
        engine: FeaturedEngine = self._hooks.engine
        return engine

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Flat parameters, or DTensors in rows, or inside :meth:`summon_full_params` the original
        parameters; names as they were before wrapping."""
        return as_before_wrapping(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers are not sharded; names as they were before wrapping."""
        refuse_full_options()
        return ((clean(name), b) for name, b in super().named_buffers(*args, **kwargs))

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> "list[FullyShardedDataParallel]":
        """All wrappers at and below ``module``, outer ones first; or only those that are roots."""
        wrappers = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [w for w in wrappers if not root_only or w.check_is_root()]

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards leave whole gradients on this rank, and the first one after it reduces
        them with its own; see no_sync.py.

        Raises:
            RuntimeError: this is not the root, or a forward or backward is under way.
        """
        self._check_root_and_idle("no_sync")
        return self._engine.layer(NoSync)()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``.
        Every rank has to call it. Returns the norm before that, the same on all; see clip_grad.py.

        Raises:
            ValueError: ``norm_type`` is not positive.
            RuntimeError: this is not the root; a forward or backward is under way; gradients of
                ``no_sync`` wait to be reduced.
        """
        self._check_root_and_idle("clip_grad_norm_")
        max_norm, norm_type = float(max_norm), float(norm_type)
        return clip_grad_norm(self._engine.units, max_norm, norm_type, ignored_params(self))

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Average gradients with ``hook(state, gradient, shard)``, such as torch's
        ``fp16_compress_hook``. Every rank calls it, before its first step; see comm_hooks.py.

        Raises:
            RuntimeError: this is not the root; there has been a step; there is a hook already.
            TypeError: ``hook`` is not callable with these arguments.
            ValueError: a unit has a hybrid strategy, which torch's hooks do not have either.
        """
        self._check_root_and_idle("register_comm_hook")
        register_comm_hook(self._engine, state, hook)

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call ``fn`` on every module, inner ones first, each while the whole parameters of its
        unit are there. Changes are kept. Every rank has to call this, and make the same changes."""
        with self.summon_full_params(self, recurse=False):
            return super().apply(fn)

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Gather full parameters outside of forward and backward; see full_params.py.

        Args:
            module: with wrappers at or below it, or modules that fully_shard was given. Every rank
                has to take part.
            recurse: also the units below ``module``'s own.
            writeback: keep changes. Each rank keeps those to its own chunk, so make the same ones
                on all ranks.
            rank0_only: show them on the first rank only. Needs ``writeback=False``.
            offload_to_cpu: in the host's memory; the device holds one unit at a time.
            with_grads: their gradients as well, in ``grad``.

        Raises:
            RuntimeError: inside of a forward or backward; ``with_grads`` where ``no_sync`` has left
                gradients that are not reduced.
            ValueError: ``rank0_only`` with ``writeback``.
        """
        found: list[Any] = [m for m in module.modules() if unit_of(m) is not None]
        units = {m._unit: m._hooks for m in found if recurse or m is module}
        with summon(units, Options(writeback, rank0_only, offload_to_cpu, with_grads)):
            yield

    def _check_root_and_idle(self, method: str) -> None:
        check_root_and_idle(self._unit, self._engine.root, self._hooks.idle, method)

    @torch.inference_mode(False)  # what is made here outlives the mode that a program may be in
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Of ``to()``, ``cuda()``, ``half()``: torch may put a new parameter in place of ours."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        adopt(self._unit)
        return self


def make_root(
    module: nn.Module,
    limiter: Limiter,
    prefetcher: CountedPrefetcher,
    kind: type[Parameters] = Parameters,
) -> None:
    """Name the units at and below ``module``, and give them hooks and layers of their own. See
    :func:`minifsdp.core.fully_sharded.make_root`."""

    def hooks_of(units: list[Any]) -> FeaturedHooks:
        engine = FeaturedEngine(units, limiter, prefetcher, kind)
        return FeaturedHooks(FeaturedBackward(engine))

    wrappers = name_units(module)
    core.make_root(wrappers, hooks_of)
    hooks = wrappers[0]._hooks
    choose_strategies(hooks.engine.units, hooks.engine.streams)
    hooks.engine.use(layers_of(hooks))
