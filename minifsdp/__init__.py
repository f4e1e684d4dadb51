"""minifsdp: fully sharded data parallel training, small enough to read in an afternoon.

The README has the map of the files, in the order in which to read them.
"""

from typing import NoReturn

from minifsdp.api import BackwardPrefetch, ForwardPrefetch, ShardingStrategy, Stats
from minifsdp.fully_sharded import FullyShardedDataParallel
from minifsdp.limiter import EventQueue, Limiter, NoLimit, SynchronizeAfterFree
from minifsdp.unit import FlatParameter
from minifsdp.wrap import ModuleWrapPolicy

__all__ = [
    "BackwardPrefetch",
    "EventQueue",
    "FlatParameter",
    "ForwardPrefetch",
    "FullyShardedDataParallel",
    "Limiter",
    "ModuleWrapPolicy",
    "NoLimit",
    "ShardingStrategy",
    "Stats",
    "SynchronizeAfterFree",
]
__version__ = "0.1.0"

# torch.distributed.fsdp has these, and minifsdp will.
_NOT_YET = """
    CPUOffload CustomPolicy FullOptimStateDictConfig FullStateDictConfig fully_shard
    LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision OptimStateDictConfig
    OptimStateKeyType ShardedOptimStateDictConfig ShardedStateDictConfig StateDictConfig
    StateDictSettings StateDictType always_wrap_policy enable_wrap lambda_auto_wrap_policy
    size_based_auto_wrap_policy transformer_auto_wrap_policy wrap
"""


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_YET.split():
        raise NotImplementedError(f"minifsdp.{name} is not there yet")
    raise AttributeError(f"module 'minifsdp' has no attribute {name!r}")
