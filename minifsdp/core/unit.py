"""The noun: one unit of sharding.

A unit is a module's parameters, flattened and sharded together. It owns two tensors::

    sharded_flat_param             this rank's shard, [at most padded_numel / shard_world_size].
                                   An nn.Parameter: what the optimizer sees. Always there.
    unsharded.flat_param           the shards of all ranks, [padded_numel]. What the layers compute
                                   with. Its memory is there only while it is needed.

The second never goes away as an *object*; its *storage* shrinks to nothing and grows again
(storage.py says why). Where the unit stands in a step is in unit_state.py.

What some units do in another way than others is a *strategy*, an object that the unit refers to:
``layout`` (which elements of the second tensor are in the first), ``source`` (what is sent in a
gather), ``comm`` (how that travels), ``view_maker`` (what the modules compute with), ``places``
(where they find it), ``stages`` (what a gradient goes through).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd_hooks import when_complete
from .storage import UnshardedFlatParam
from .streams import Event
from .unit_state import UnitState


@dataclass
class ParamInfo:
    """One original parameter. The order of ``Unit.param_infos`` is that of the flat parameter.

    Attributes:
        name: fully qualified, below the unit's module.
        owners: (module, attribute) where modules have it; several if it is shared.
    """

    name: str
    shape: torch.Size
    owners: list[Any] = field(default_factory=list)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the modules have now: before sharding the original one."""
        module, name = self.owners[0]
        param: nn.Parameter | None = module._parameters.get(name)
        assert param is not None, self.name
        return param


class Unit:
    """The parameters of one module, as one sharded flat parameter.

    Args:
        module: the unit's module.
        param_infos: where the parameters are; those of nested units excluded. May be empty. The
            parameters are copied, and not kept.
        layout: how they are divided (shard.py).
        shard_group: the ranks that share them; None: this rank has all of them.
        replicate_group: the ranks that have the same shard; None: no others have it.
        reshard_after_forward: they are freed between forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        param_infos: Sequence[Any],
        layout: Any,
        shard_group: dist.ProcessGroup | None,
        replicate_group: dist.ProcessGroup | None,
        reshard_after_forward: bool,
    ) -> None:
        self.rename("")
        self.module, self.param_infos, self.layout = module, param_infos, layout
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.reshard_after_forward = reshard_after_forward
        self.shard_rank = shard_group.rank() if shard_group is not None else 0
        self.shard_world_size = shard_group.size() if shard_group is not None else 1
        self.ancestors: list[Any] = []  # units around this one, outermost first
        self.state = UnitState()
        self.reasons = set[str]()  # to stay gathered; see unit_state.py
        self.free: Callable[[Any], None] = lambda unit: None  # when no reason is left; the root's
        self.on_gradient: Callable[[], None] = lambda: None  # when its gradient is complete

        params = [info.parameter for info in param_infos]
        self.numel = sum(param.numel() for param in params)
        # The shard's memory, and padding in it.
        self.padded_shard: Tensor = layout.shard(layout.flatten(params), self.shard_rank)
        self.sharded_flat_param: Any = nn.Parameter(
            self.padded_shard[: layout.optimized_numel(self.shard_rank)],
            requires_grad=any(param.requires_grad for param in params),
        )
        self.unshard_event: Event | None = None  # while UNSHARDING: passed when the data is there
        self.views: list[Tensor] = []  # of `unsharded`, one for each parameter
        self.shows_views = True  # its modules see unsharded parameters
        self.source: Any = None  # strategies; the wrapper chooses them
        self.comm: Any = None
        self.view_maker: Any = None
        self.places: Any = None
        self.stages: Sequence[Any] = ()
        self.unsharded: Any = self.new_unsharded()

    def new_unsharded(self) -> UnshardedFlatParam:
        """The unsharded flat parameter, without memory."""
        shard = self.padded_shard.detach()
        if self.shard_group is not None:
            shard = shard.new_empty(self.layout.padded_numel)
        flat_param, trained = shard.data, self.sharded_flat_param.requires_grad
        flat_param.requires_grad_(trained)
        node = when_complete(flat_param, gradient_hook(self)) if trained else None
        needs_unshard = self.shard_group is not None and self.numel > 0
        unsharded = UnshardedFlatParam(flat_param, shard, needs_unshard, node)
        if needs_unshard:
            unsharded.free()
        return unsharded

    def rename(self, name: str) -> None:
        """Take a name, which is the wrapper's place in the root; the root itself keeps ``""``. The
        label is the name as a message should say it."""
        self.name, self.label = name, repr(name) if name else "<root>"

    def describe(self) -> str:
        """The unit in a few words, for ``print(model)``."""
        ranks = f"{self.shard_world_size} rank{'s' * (self.shard_world_size > 1)}"
        return f"unit of {self.numel:,} parameters, sharded over {ranks}"

    @property
    def is_limited(self) -> bool:
        """Whether it counts for a limiter. A unit that stays from forward to backward does not: no
        limit could free it."""
        return self.reshard_after_forward

    def hold(self, reason: str) -> None:
        """Keep the unit, once it is gathered, until :meth:`let_go` of the same reason."""
        self.reasons.add(reason)

    def let_go(self, *reasons: str) -> None:
        """Free the unit if there was a reason to keep it, and there is no other."""
        if self.reasons:
            if self.reasons <= {*reasons}:
                self.free(self)
            # Last: if an interrupt ends free(), the reasons are there, and the next call frees it.
            self.reasons.difference_update(reasons)

    def release(self) -> None:
        """Free the unsharded memory."""
        self.unsharded.free()


def gradient_hook(unit: Unit) -> Callable[..., None]:
    """What autograd calls when a gradient of the unit is complete."""
    weak = ref(unit)  # autograd keeps a hook as long as a graph, and must not keep the unit

    def hook(*_: object) -> None:
        found = weak()
        if found is not None:
            found.on_gradient()

    return hook
