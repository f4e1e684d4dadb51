"""minifsdp: fully sharded data parallel training, small enough to read in an afternoon.

The README has the map of the files, in the order in which to read them.
"""

from typing import NoReturn

from minifsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    ForwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    Stats,
)
from minifsdp.flat_parameter import FlatParameter
from minifsdp.fully_sharded import FullyShardedDataParallel
from minifsdp.grad_scaler import ShardedGradScaler
from minifsdp.limiter import EventQueue, Limiter, NoLimit, SynchronizeAfterFree
from minifsdp.wrap import (
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
    "CustomPolicy",
    "EventQueue",
    "FlatParameter",
    "ForwardPrefetch",
    "FullyShardedDataParallel",
    "Limiter",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "NoLimit",
    "ShardedGradScaler",
    "ShardingStrategy",
    "Stats",
    "SynchronizeAfterFree",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]
__version__ = "0.1.0"

# torch.distributed.fsdp has these, and minifsdp will.
_NOT_YET = """
    FullOptimStateDictConfig FullStateDictConfig fully_shard LocalOptimStateDictConfig
    LocalStateDictConfig OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig
    ShardedStateDictConfig StateDictConfig StateDictSettings StateDictType
"""


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_YET.split():
        raise NotImplementedError(f"minifsdp.{name} is not there yet")
    raise AttributeError(f"module 'minifsdp' has no attribute {name!r}")
