"""minifsdp: PyTorch's fully sharded data parallel training, written again to be read.

The README has the map of the core's files, in the order in which to read them, and
tutorials/reference/engine.md that of the features around it.

Names are looked up when they are first used (PEP 562). torch takes seconds to import, and not all
of minifsdp needs it: ``minifsdp sim --help`` does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; _HOMES says the same to Python
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        MixedPrecisionPolicy,
        OffloadPolicy,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )

    from minifsdp.api import CPUOffload, DataParallelMeshDims, MixedPrecision
    from minifsdp.between_steps.checkpoint_state import state_to_load, state_to_save
    from minifsdp.between_steps.explain import explain
    from minifsdp.between_steps.local_params import local_params
    from minifsdp.chunks.as_dtensors import as_dtensors
    from minifsdp.chunks.flat_parameter import FlatParameter
    from minifsdp.chunks.grad_scaler import ShardedGradScaler
    from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
    from minifsdp.core.limiter import EventQueue, Limiter, NoLimit, SynchronizeAfterFree
    from minifsdp.fsdp_module import (
        FSDPModule,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from minifsdp.fully_sharded import FullyShardedDataParallel
    from minifsdp.support.stats import Stats
    from minifsdp.wrapping.policies import (
        CustomPolicy,
        ModuleWrapPolicy,
        _or_policy,
        always_wrap_policy,
        enable_wrap,
        lambda_auto_wrap_policy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
        wrap,
    )

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "DataParallelMeshDims",
    "EventQueue",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FlatParameter",
    "ForwardPrefetch",
    "FullyShardedDataParallel",
    "Limiter",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "NoLimit",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "ShardedGradScaler",
    "ShardingStrategy",
    "Stats",
    "SynchronizeAfterFree",
    "UnshardHandle",
    "_or_policy",  # which scripts import from torch, too
    "always_wrap_policy",
    "as_dtensors",
    "enable_wrap",
    "explain",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "local_params",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "state_to_load",
    "state_to_save",
    "transformer_auto_wrap_policy",
    "wrap",
]
__version__ = "0.1.0"

_HOMES = (
    "minifsdp.api",
    "minifsdp.core.api",
    "minifsdp.chunks.as_dtensors",
    "minifsdp.between_steps.checkpoint_state",
    "minifsdp.between_steps.explain",
    "minifsdp.between_steps.local_params",
    "minifsdp.chunks.grad_scaler",
    "minifsdp.fsdp_module",
    "minifsdp.fully_sharded",
    "minifsdp.support.stats",
    "minifsdp.core.limiter",
    "minifsdp.chunks.flat_parameter",
    "minifsdp.wrapping.policies",
    "torch.distributed.fsdp",  # last: it has names that are also minifsdp's
)


def __getattr__(name: str) -> Any:
    """Look up a public name, or a module of minifsdp, that is used for the first time."""
    if name in __all__ or not name.startswith("_"):
        homes = [import_module(home) for home in _HOMES]
        missing = import_module("minifsdp.checks.unsupported").MISSING
        if name in missing:  # torch.distributed.fsdp has these, and minifsdp not yet
            return missing[name]
        for public in __all__:
            globals()[public] = next(vars(home)[public] for home in homes if public in vars(home))
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'minifsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
