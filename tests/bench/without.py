"""What of the engine's own time goes to what an engine that only shards could leave out.

minifsdp keeps promises beside that: it notices changes that would be lost, keeps ranks in step,
limits memory, gathers ahead. Here each promise is taken out, and all of them together. Most are
layers (minifsdp/core/layers.py), which a model is then built without. What is left is the five
moments of a step, in which a unit is gathered and freed, and its gradient reduced. Parameters stay
there on demand (minifsdp/on_demand.py): without that, autograd would save them as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from minifsdp.checks.members import Leaks
from minifsdp.checks.misplaced_calls import OneThread, RefusedOperations, Summoned
from minifsdp.checks.param_changes import Unchanged, Unreplaced, Untouched
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.core.hooks import Hooks
from minifsdp.core.layers import Layer
from minifsdp.core.limiter import NoLimit
from minifsdp.features import layers_of
from minifsdp.fully_sharded import make_limiter, make_prefetcher
from minifsdp.support.grad_hooks import GradientHooks
from minifsdp.support.prefetch_stats import CountedPrefetcher, Mistargets
from minifsdp.support.shard_changes import ShardChanges

AHEAD, LIMITED = "the next unit is gathered ahead", "memory is limited"
PROMISES: dict[str, tuple[type[Layer], ...]] = {
    "changes that would be lost are refused": (Unreplaced, Untouched, Unchanged),
    "misplaced calls and leaks have names": (OneThread, Summoned, RefusedOperations, Leaks),
    "parameters may be moved, cast and replaced": (ShardChanges,),
    "ranks stay in step": (RankAgreement,),
    "users' hooks on parameters are called": (GradientHooks,),
    AHEAD: (Mistargets,),
    LIMITED: (),
}
"""By promise, the layers that keep it."""


class NoPrefetch(CountedPrefetcher):
    """Records nothing, and has no target."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def pre_forward(self, unit: Any) -> None:
        return None

    post_forward = pre_backward = post_backward = pre_forward


@contextmanager
def without(*promises: str) -> Iterator[None]:
    """A model that is built inside does not keep them. Models of one small layer each compute the
    same."""
    gone = tuple(kind for promise in promises for kind in PROMISES[promise])

    def some_layers(hooks: Hooks) -> Iterator[Layer]:
        for layer in layers_of(hooks):
            if isinstance(layer, RankAgreement) and RankAgreement in gone:
                layer.steps = 1 << 30  # else others would take each step for the first
            if not isinstance(layer, gone):
                yield layer

    def prefetcher(*args: Any) -> CountedPrefetcher:
        return NoPrefetch() if AHEAD in promises else make_prefetcher(*args)

    def limiter(given: Any) -> Any:
        return NoLimit() if LIMITED in promises else make_limiter(given)

    with (
        patch("minifsdp.fully_sharded.layers_of", some_layers),
        patch("minifsdp.fully_sharded.make_prefetcher", prefetcher),
        patch("minifsdp.fully_sharded.make_limiter", limiter),
    ):
        yield
