"""The core: a whole FSDP in one folder, which imports torch and itself, and nothing else.

It shards, gathers, prefetches, limits and reduces. On two ranks its results are DDP's, bit for bit;
on more, sums of three or more terms are made in another order. Copy the folder out under any name,
and it trains there::

    from core import FullyShardedDataParallel, ModuleWrapPolicy

    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.AdamW(model.parameters())

minifsdp is this core, with features around it that are added in four ways: a reason to keep a unit
(unit_state.py), a stage of a reduction (reduce.py), a strategy of a unit (its source, comm, views
and layout), and a layer (layers.py). Where a feature is absent, no line of it is on your way here.

In the order in which to read them::

    what a unit has     flatten.py, shard.py, unit_state.py, storage.py
    what devices do     streams.py, collectives.py
    what a unit is      autograd_hooks.py, unit.py, views.py
    what a unit does    unshard.py, reshard.py, reduce.py
    what units share    api.py, gradients.py, limiter.py, prefetch.py, parameters.py
    when                layers.py, engine.py, outputs.py, backward.py, hooks.py
    what users hold     auto_wrap.py, fully_sharded.py

What the core does not promise is in fully_sharded.py, and who does.
"""

from .api import BackwardPrefetch, ForwardPrefetch, ShardingStrategy
from .auto_wrap import ModuleWrapPolicy
from .fully_sharded import FullyShardedDataParallel
from .limiter import EventQueue, Limiter, NoLimit, SynchronizeAfterFree

__all__ = [
    "BackwardPrefetch",
    "EventQueue",
    "ForwardPrefetch",
    "FullyShardedDataParallel",
    "Limiter",
    "ModuleWrapPolicy",
    "NoLimit",
    "ShardingStrategy",
    "SynchronizeAfterFree",
]
