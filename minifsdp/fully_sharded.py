"""``FullyShardedDataParallel``: the thin module that users hold.

It wraps a module, makes a unit of the parameters that no wrapper inside has taken, and calls the
hooks around ``forward``. The outermost wrapper is the *root*: streams, limiter and prefetching are
its own, for all units below it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NoReturn
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.api import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
from minifsdp.engine import Engine
from minifsdp.full_params import full_params
from minifsdp.hooks import Hooks
from minifsdp.limiter import Limiter, make_limiter
from minifsdp.prefetch import Prefetcher
from minifsdp.unit import Unit
from minifsdp.wrap import (
    Policy,
    check_optimizers,
    check_sharing,
    clean,
    collect,
    mark_taken,
    select,
    unit_of,
    wrap_inside,
)

# A tag for each unit of a group, the same on all its ranks, since they make its units in the same
# order. By group: a rank may be in several, and make units that others have no part in. The numbers
# are far from the small ones that users give to messages of their own.
_tags: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(0x4D46_0000))


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks of a group.

    Args:
        module: parameters of one dtype on one device, with the same values on every rank.
        process_group: the ranks to shard over; the default group if None.
        sharding_strategy: of this unit and of those that ``auto_wrap_policy`` makes. FULL_SHARD if
            None. Units of one model may differ.
        auto_wrap_policy: which modules inside become units of their own, such as a
            :class:`~minifsdp.wrap.ModuleWrapPolicy`. None: only what is wrapped by hand.
        backward_prefetch: see prefetch.py; None is none.
        forward_prefetch: see prefetch.py; True is ``ForwardPrefetch.FORWARD_PRE``.
        limit_all_gathers: how many units may be alive at once: True is 2, False is no limit; or a
            :class:`~minifsdp.limiter.Limiter`.

    Prefetching and limit are the root's, for all its units. The other arguments are those of
    ``torch.distributed.fsdp``, in its order; they are not there yet and refused.

    Build the optimizer *after* wrapping, from this module's ``parameters()``: one 1-D chunk for
    each unit. ``backward()`` leaves in their ``grad`` the mean over all ranks.

    Raises:
        ValueError: parameters that cannot share a unit, or that two units would share; a module
            that is wrapped already, or that has no forward.
        RuntimeError: there is no process group, or an optimizer was built before.
        NotImplementedError: an argument that minifsdp does not have yet.

    Sources: Zhao et al., "PyTorch FSDP", arXiv:2304.11277; Rajbhandari et al., "ZeRO",
    arXiv:1910.02054.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Any = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool | ForwardPrefetch = False,
        limit_all_gathers: bool | int | Limiter = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
    ) -> None:
        _refuse_what_is_not_there(
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
        )
        super().__init__()
        _check_wrappable(module)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        group = process_group if process_group is not None else _default_group()
        limiter = make_limiter(limit_all_gathers)
        forward = ForwardPrefetch.FORWARD_PRE if forward_prefetch is True else forward_prefetch
        prefetcher = Prefetcher(backward_prefetch, forward or None)
        if auto_wrap_policy is not None:
            borders = select(module, auto_wrap_policy)
            check_sharing(module, borders)
            wrap_inside(module, borders, lambda m: FullyShardedDataParallel(m, group, strategy))
        self._unit = _make_unit(module, group, strategy)
        self._fsdp_wrapped_module = module
        if self._unit.slots:
            self._flat_param = self._unit.shard
        self._become_root(prefetcher, limiter)

    def _become_root(self, prefetcher: Prefetcher, limiter: Limiter) -> None:
        """Name the units here and below, and give them hooks of their own. The last wrapper to do
        so is the outermost, whichever of them runs first: nothing has to be guessed later."""
        wrappers = {m: clean(n) for n, m in self.named_modules() if unit_of(m) is not None}
        for wrapper in wrappers:
            if "_hooks" in wrapper.__dict__:
                wrapper._hooks.engine.reset()  # it was a root, and may have been in use
        self._hooks = Hooks(Engine([w._unit for w in wrappers], limiter, prefetcher))
        for wrapper, name in wrappers.items():
            wrapper._hooks, wrapper._unit.name = self._hooks, name
            wrapper._unit.enclosing = [
                outer._unit
                for outer, its_name in wrappers.items()
                if outer is not wrapper and (not its_name or name.startswith(its_name + "."))
            ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered for as long as it runs."""
        hooks, unit = self._hooks, self._unit
        hooks.depth += 1
        try:
            hooks.pre_forward(unit, args, kwargs)
            output = self._fsdp_wrapped_module(*args, **kwargs)
            hooks.post_forward(unit, output)
        except BaseException:
            hooks.forward_failed(unit)
            raise
        finally:
            hooks.depth -= 1
        return output

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self.engine.root is self._unit

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped: nn.Module = self._fsdp_wrapped_module
        return wrapped

    @property
    def engine(self) -> Engine:
        """What this wrapper's root shares among its units: counts, orders, limiter."""
        return self._hooks.engine

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise  # not wrapped yet: looking there would never end
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: int) -> Any:
        """For a wrapped ``nn.Sequential``."""
        return self.module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Flat parameters, or inside :meth:`summon_full_params` the original ones; names as they
        were before wrapping."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield clean(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Buffers are not sharded; names as they were before wrapping."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean(name), buffer

    @staticmethod
    def fsdp_modules(module: nn.Module) -> "list[FullyShardedDataParallel]":
        """All wrappers at and below ``module``, outer ones first."""
        return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]

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
            module: with wrappers at or below it. Every rank has to take part.
            recurse: also the units below ``module``'s own.
            writeback: keep changes. Each rank keeps those to its own chunk, so make the same ones
                on all ranks.

        Raises:
            RuntimeError: inside of a forward or backward.
            NotImplementedError: ``rank0_only``, ``offload_to_cpu`` and ``with_grads``, not there
            yet.
        """
        _refuse_what_is_not_there(
            rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads
        )
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        if not recurse:
            wrappers = [wrapper for wrapper in wrappers if wrapper is module]
        by_root: dict[Hooks, list[Unit]] = {}
        for wrapper in wrappers:
            by_root.setdefault(wrapper._hooks, []).append(wrapper._unit)
        with ExitStack() as stack:
            for hooks, units in by_root.items():
                stack.enter_context(full_params(hooks, units, writeback))
            for wrapper in wrappers:
                # The flat ones leave the stage meanwhile: no element may be listed twice.
                flat = wrapper._parameters.pop("_flat_param", None)
                if flat is not None:
                    stack.callback(wrapper.register_parameter, "_flat_param", flat)
            yield


# Methods of torch's. If they were just missing, nn.Module's own state_dict would give nameless
# chunks, and its apply would meet stand-ins.
_NOT_THERE = """
    apply clip_grad_norm_ flatten_sharded_optim_state_dict full_optim_state_dict
    get_state_dict_type load_state_dict no_sync optim_state_dict optim_state_dict_to_load
    register_comm_hook rekey_optim_state_dict scatter_full_optim_state_dict set_state_dict_type
    shard_full_optim_state_dict sharded_optim_state_dict state_dict state_dict_type
"""


def _not_there(name: str) -> Callable[..., NoReturn]:
    def method(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"minifsdp: {name} is not there yet. FSDP.summon_full_params(model) gives access to "
            f"whole parameters under their own names."
        )

    return method


for _name in _NOT_THERE.split():
    setattr(FullyShardedDataParallel, _name, _not_there(_name))


def _make_unit(module: nn.Module, group: Any, strategy: ShardingStrategy) -> Unit:
    """A strategy is two groups and a bit: who shares the parameters, who holds copies of the same
    chunk, and whether to free between forward and backward."""
    groups = {
        ShardingStrategy.FULL_SHARD: (group, None, True),
        ShardingStrategy.SHARD_GRAD_OP: (group, None, False),
        ShardingStrategy.NO_SHARD: (None, group, False),
    }
    if strategy not in groups:
        raise NotImplementedError(f"minifsdp: {strategy} is not there yet")
    slots, params = collect(module)
    unit = Unit(slots, params, *groups[strategy], tag=next(_tags[group.group_name]))
    mark_taken(unit, params)
    originals = {slot.name: ref(param) for slot, param in zip(slots, params, strict=True)}
    params.clear()  # the last references here; who else has one should not
    check_optimizers(originals)
    return unit


def _check_wrappable(module: nn.Module) -> None:
    """Refuse a wrapper, and containers that are only looked into."""
    if unit_of(module) is not None:
        raise ValueError("the module is a FullyShardedDataParallel already. Wrap a module once.")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{type(module).__name__} has no forward, so there is no moment to gather its unit. "
            f"Wrap the modules in it, or the one that holds it."
        )


def _default_group() -> Any:
    if not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group. Start the program with torchrun and "
            "call torch.distributed.init_process_group() first."
        )
    return dist.group.WORLD


def _refuse_what_is_not_there(**arguments: Any) -> None:
    """Better no sharding than another one than was asked for."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"minifsdp: {name}={value!r} is not there yet")
