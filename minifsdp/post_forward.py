"""The post-forward shard: between forward and backward a larger part of a unit, in a smaller group.

A unit that is freed after its forward is gathered twice in a step, both times from all ranks. If a
few of them are close to each other, such as the GPUs of one host, the second gather can stay among
these. After the forward each of them keeps a part, and together they have all parameters::

    fully_shard(block, reshard_after_forward=2)           4 ranks; parameters A B C D

    sharded                rank 0: A     rank 1: B     rank 2: C     rank 3: D
    forward                gathered from all four ranks
    post-forward shard     rank 0: A B   rank 1: C D   rank 2: A B   rank 3: C D
    backward               gathered from ranks 0 and 1     from ranks 2 and 3

From the unit's forward to its backward this costs memory, here ``numel / 2`` on each rank in place
of ``numel / 4``. Gradients and the optimizer's states stay divided among all ranks.

The part is a piece of the unsharded flat parameter, and may be cut anywhere, since no program sees
it. (PyTorch registers it with the module, as DTensors.)

Sources: the "secondary partition" (hpZ) of Wang et al., "ZeRO++", arXiv:2306.10209;
``FSDPParam.to_sharded_post_forward`` (pytorch 2.13).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifsdp.comm.groups import smaller_group
from minifsdp.core.collectives import Group
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Call, Layer
from minifsdp.core.streams import Event, Streams
from minifsdp.core.unit_state import FORWARD, ShardedState
from minifsdp.featured_unit import FeaturedUnit


class PostForwardShard(NamedTuple):
    """The source of a unit (unshard.py) between its forward and its backward: this rank's part for
    the smaller group. The part is on the device, in the dtype that the unit is computed in."""

    shard: Tensor  # ``[padded_numel / ranks of the smaller group]``
    ready: Event  # on the compute stream: it has been copied
    group: Group  # the smaller one; all its ranks have a part

    def prepare(self, unit: FeaturedUnit, streams: Streams) -> None:
        """Let the unshard stream wait until the part is there."""
        streams.unshard.wait_event(self.ready)  # else it might send what has not been copied yet

    def tensor(self, unit: FeaturedUnit, streams: Streams) -> Tensor:
        """The part."""
        return self.shard


class PostForward(Layer):
    """Has units send their post-forward shard between their forward and their backward."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def after_forward(self, call: Call, output: object) -> object:
        """Keep the part, if the unit is about to be freed and a backward may follow."""
        unit, engine = call.unit, self._engine
        if unit.reasons == {FORWARD} and unit is not engine.root and torch.is_grad_enabled():
            keep_post_forward_shard(unit, engine.streams)
        return output

    def gradient(self, unit: FeaturedUnit, grad: Any) -> Any:
        """From here on the unit sends its shard again."""
        unit.source = unit.own_source
        return grad

    def reset(self) -> None:
        """An optimizer may have stepped."""
        for unit in self._engine.units:
            unit.source = unit.own_source

    end_of_backward = reset


def keep_post_forward_shard(unit: FeaturedUnit, streams: Streams) -> None:
    """Copy this rank's part of an unsharded unit that is about to be freed. Gathers send the copy
    until the unit sends its shard again. Does nothing if the unit has no smaller group."""
    lines = unit.post_forward_lines
    if lines is None or unit.shard_group is None:
        return
    # Made when it is first used. All ranks have to make it, and by now they have checked that all
    # of them want it (checks/same_model.py).
    group = smaller_group(unit.shard_group, lines)
    if unit.state.sharded is ShardedState.UNSHARDED:
        # A copy: the memory of a view would be freed.
        shard = unit.unsharded.data.chunk(group.size())[group.rank()].clone()
        unit.source = PostForwardShard(shard, streams.compute.record_event(), group)
