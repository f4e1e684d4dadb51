"""minifsdp: fully sharded data parallel training, small enough to read in an afternoon.

The README has the map of the files, in the order in which to read them.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from minifsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    ForwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    Stats,
)
from minifsdp.between_steps.as_dtensors import as_dtensors
from minifsdp.between_steps.checkpoint_state import state_to_load, state_to_save
from minifsdp.between_steps.explain import explain
from minifsdp.between_steps.grad_scaler import ShardedGradScaler
from minifsdp.checks.unsupported import MISSING, Missing
from minifsdp.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from minifsdp.fully_sharded import FullyShardedDataParallel
from minifsdp.limiter import EventQueue, Limiter, NoLimit, SynchronizeAfterFree
from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.wrapping.policies import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
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
    "always_wrap_policy",
    "as_dtensors",
    "enable_wrap",
    "explain",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "size_based_auto_wrap_policy",
    "state_to_load",
    "state_to_save",
    "transformer_auto_wrap_policy",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Missing:
    if name in MISSING:  # torch.distributed.fsdp has these, and minifsdp will
        return MISSING[name]
    raise AttributeError(f"module 'minifsdp' has no attribute {name!r}")
