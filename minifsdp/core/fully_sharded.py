"""``FullyShardedDataParallel``: the thin module that users hold.

It wraps a module, makes a unit of the parameters that no wrapper inside has taken, and calls the
hooks around ``forward``. The outermost wrapper is the *root*: streams, limiter and prefetching are
its own, for all units below it.

This is the core's wrapper. ``minifsdp.FullyShardedDataParallel`` has the features around it. What
the core does not promise, and the file of minifsdp that does:

- a gradient that comes past a unit's outputs: a loss of tensors that a module has left in an
  attribute; views of parameters that live on after the forward (on_demand.py), or that NumPy has
  seen (support/unsharded_storage.py); a gradient of a gradient, which minifsdp does not compute
  either, but refuses by name (support/grad_hooks.py)
- a frozen unit with a leaf among several inputs that is freed before the end of the whole backward
  (on_demand.py), and a unit that is freed between two forwards of one backward
  (support/several_forwards.py)
- ranks that differ: units that only some of them use, exceptions on one of them
  (checks/rank_agreement.py), other models or values at the start (checks/same_model.py), a rank
  that is lost (comm/deadlock_watch.py)
- an exception in a backward that is noticed at once, and not by the next step
  (support/broken_backward.py)
- changes of parameters between a forward and its backward, or by the forward itself, and parameters
  that are replaced (checks/param_changes.py), frozen, thawed, moved or cast after wrapping
  (support/shard_changes.py); attributes of parameters (chunks/param_attributes.py)
- a parameter read while it is sharded says which one it is (support/param_access.py); full
  parameters between steps (between_steps/full_params.py); on a GPU, an RNN whose weights are freed
  after its forward, of which cuDNN makes a copy (support/param_views.py); matrices that begin at a
  multiple of 16 bytes, whatever precedes them (wrapping/build.py)
- ``state_dict()`` of full parameters (between_steps/state_dict.py), here it has shards; optimizer
  states (between_steps/optim_state_dict.py); the norm of all gradients (between_steps/clip_grad.py)
- one reduction for several backwards (no_sync.py), users' hooks on gradients
  (support/grad_hooks.py), a hook in place of the reduction (between_steps/comm_hooks.py)
- low precision (precision.py), shards in the host's memory (offload.py), shards that are replicated
  over hosts (strategies.py), a parameter as rows for the optimizer (rows.py), shards for the time
  after the forward (post_forward.py), several modules in one unit (support/listed_modules.py)
- modules on the meta device, and one rank's values for all (wrapping/materialize.py); what is to be
  ignored (wrapping/ignored.py); policies that count parameters, or that have settings for a unit
  (wrapping/policies.py); an attribute that is set on the wrapper is not set on the module
  (wrapping/attributes.py); torch.compile (wrapping/compiled.py); ``fully_shard`` (fsdp_module.py)
- messages of ranks on one machine without a network library (comm/same_machine.py)
- what the engine does is hidden from a program's dispatch modes, such as selective activation
  checkpoints around units (dispatch_modes.py); it counts what it has done (support/stats.py)
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .api import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
from .auto_wrap import params_of_units, select, wrap_inside
from .backward import Backward
from .collectives import TorchCollectives
from .engine import Engine
from .gradients import Gradients
from .hooks import Hooks
from .layers import Layer
from .limiter import Limiter, limiter_of
from .parameters import Parameters
from .prefetch import Prefetcher, forward_prefetch_of
from .reduce import AllReduce, ReduceScatter
from .shard import Chunks
from .streams import Streams
from .unit import ParamInfo, Unit
from .unshard import OwnShard
from .views import FLAT_PARAM, InModules, SplitViews, hide_views


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks of a group.

    Args:
        module: parameters of one dtype on one device for each unit, with the same values on every
            rank. Move it to its device first.
        process_group: the ranks to shard over; the default group if None.
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD.
        auto_wrap_policy: which modules inside become units of their own (auto_wrap.py). None: only
            what is wrapped by hand.
        backward_prefetch: see prefetch.py; None is none.
        forward_prefetch: see prefetch.py; True is ``ForwardPrefetch.FORWARD_PRE``. None is that on
            a CPU, where the host does not run ahead, and no gather would be hidden otherwise.
        limit_all_gathers: how many units may be alive at once: True is PyTorch's limit, 2 and one
            that only the device has not freed; False is no limit; or a :class:`Limiter`.

    Build the optimizer *after* wrapping, from this module's ``parameters()``. ``backward()`` leaves
    in their ``grad`` the mean over all ranks.

    Raises:
        ValueError: parameters that cannot share a unit, or that two units would share; a module
            that is wrapped already, or that has no forward; a strategy that the core has not.
        TypeError: a policy that is none.

    Sources: Zhao et al., "PyTorch FSDP", arXiv:2304.11277; Rajbhandari et al., "ZeRO",
    arXiv:1910.02054.
    """

    _unit: Unit
    _hooks: Hooks

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        auto_wrap_policy: Callable[[nn.Module], bool] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: bool | ForwardPrefetch | None = None,
        limit_all_gathers: bool | int | Limiter = True,
    ) -> None:
        super().__init__()
        settings = {"process_group": process_group, "sharding_strategy": sharding_strategy}
        inside = {} if auto_wrap_policy is None else select(module, auto_wrap_policy, _is_taken)
        # What cannot be is refused before the first unit is made.
        params = params_of_units(module, inside, _is_taken)
        wrap_inside(module, dict.fromkeys(inside, settings), FullyShardedDataParallel)
        group = process_group or dist.group.WORLD
        self._unit = build_unit(module, params[module], group, sharding_strategy)
        self._fsdp_wrapped_module = module
        wrappers = [m for m in self.modules() if isinstance(m, FullyShardedDataParallel)]
        name_units(self)
        devices = (w._unit.padded_shard.device for w in wrappers if w._unit.numel)
        streams = Streams.on(next(devices, torch.device("cpu")))
        forward = forward_prefetch_of(forward_prefetch, streams.host_runs_ahead)
        prefetcher = Prefetcher(backward_prefetch, forward)
        parameters = Parameters(streams, limiter_of(limit_all_gathers), prefetcher)
        make_root(
            wrappers, lambda units: Hooks(Backward(Engine(units, parameters, Gradients(streams))))
        )
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered for as long as it runs."""
        module: Any = self._modules["_fsdp_wrapped_module"]
        return self._hooks.forward(self._unit, module, module, args, kwargs)

    @property
    def engine(self) -> Engine:
        """What this wrapper's root shares among its units."""
        return self._hooks.engine

    def use(self, layers: Callable[[Hooks], Iterable[Layer]]) -> None:
        """Have these layers (layers.py) at the moments of each step. For the root.

        Args:
            layers: makes them of the root's hooks.
        """
        self.engine.use(layers(self._hooks))

    def __getattr__(self, name: str) -> Any:
        # A program may read model.blocks[0].scale, whether that block is wrapped or not.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_fsdp_wrapped_module"), name)

    def extra_repr(self) -> str:
        """For ``print(model)``, which then shows where the units are."""
        return self._unit.describe()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NoReturn:
        # Of to(), cuda(), half(). A shard is one part of memory that the unit knows by its address.
        raise RuntimeError(
            "move or cast a model before you wrap it; its shards stay where they are"
        )


def _is_taken(item: Any) -> bool:
    """Whether a module or a parameter is part of a unit."""
    return isinstance(item, FullyShardedDataParallel) or hasattr(item, "_fsdp_flattened")


def build_unit(
    module: nn.Module, infos: list[ParamInfo], group: Any, strategy: ShardingStrategy
) -> Unit:
    """Make a unit of these parameters of ``module``, and choose its strategies.

    Raises:
        ValueError: the core does not have this strategy.
    """
    if strategy not in (*_SHARDED, ShardingStrategy.NO_SHARD):
        raise ValueError(f"the core has no {strategy}; minifsdp has")
    is_sharded = strategy in _SHARDED and group.size() > 1
    layout = Chunks([info.shape for info in infos], group.size() if is_sharded else 1)
    shared_by, copied_by = (group, None) if is_sharded else (None, group)
    frees = strategy is ShardingStrategy.FULL_SHARD
    unit = Unit(module, infos, layout, shared_by, copied_by, frees)
    unit.source, unit.comm = OwnShard(unit.shard_group), TorchCollectives()
    unit.view_maker, unit.places = SplitViews(), InModules(infos)
    unit.stages = [ReduceScatter()] if is_sharded else [AllReduce("reduce")]
    unit.sharded_flat_param._fsdp_flattened = True  # under this name torch marks them
    for info in infos:
        info.parameter._fsdp_flattened = True  # type: ignore[attr-defined]  # somebody may share it
        for owner, name in info.owners:
            del owner._parameters[name]
    hide_views(unit)
    if infos:
        module.register_parameter(FLAT_PARAM, unit.sharded_flat_param)
    return unit


_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


def name_units(root: nn.Module) -> None:
    """Set the name of each unit at and below ``root``, and its ancestors."""
    around: dict[str, Unit] = {}
    for path, module in root.named_modules():  # outer ones first
        if isinstance(module, FullyShardedDataParallel):
            name = f"{path}.".replace("_fsdp_wrapped_module.", "")[:-1]
            module._unit.rename(name)
            module._unit.ancestors = [
                unit for outer, unit in around.items() if not outer or name.startswith(outer + ".")
            ]
            around[name] = module._unit


def make_root(wrappers: Iterable[Any], hooks_of: Callable[[list[Any]], Hooks]) -> None:
    """Give the units of some wrappers hooks of their own. The last module to become a root is the
    outermost, whichever of them runs first: nothing has to be guessed later.

    Args:
        wrappers: the root first.
        hooks_of: makes the hooks of the units.
    """
    for wrapper in wrappers:
        if "_hooks" in wrapper.__dict__:
            wrapper._hooks.engine.fail()  # it was a root, and may have been in use
    units = dict.fromkeys(wrapper._unit for wrapper in wrappers)  # two may have one
    hooks = hooks_of([*units])
    for wrapper in wrappers:
        wrapper._hooks = hooks
