"""What of the engine's own time goes to what an engine that only shards could leave out.

minifsdp keeps promises beside that: it notices changes that would be lost, keeps ranks in step,
limits memory, gathers ahead, counts. Here each promise is taken out, and all of them together, as
far as this can be done from outside: the functions that keep it do nothing. What is left is the
five moments of a step, in which a unit is gathered and freed, and its gradient reduced.

A function that does nothing is still called, so a promise costs a little more than is found here.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

nothing: Any = lambda *_, **__: None  # noqa: E731
false: Any = lambda *_, **__: False  # noqa: E731
true: Any = lambda *_, **__: True  # noqa: E731
second: Any = lambda _, given: given  # noqa: E731

PROMISES: dict[str, dict[str, Any]] = {
    "changes that would be lost are refused": {
        "hooks.check_untouched": nothing,
        "hooks.values": nothing,
        "backward.check_one_step": nothing,
        "backward.check_unchanged": nothing,
        "backward.check_first_order": nothing,
        "backward.check_unreduced_grad": nothing,
        "engine.check_unreduced_grad": nothing,
    },
    "parameters may be moved, cast and replaced": {
        "engine.follow_changes": nothing,
        "no_sync.was_moved": false,
        "engine.common_device": nothing,
    },
    "ranks stay in step": {
        "checks.rank_agreement.RankAgreement.at": nothing,
        "checks.rank_agreement.RankAgreement.compares": false,
        "checks.rank_agreement.RankAgreement.agree": nothing,
    },
    "the next unit is gathered ahead": {
        "parameters.Parameters.prefetch": nothing,
        "prefetch.Prefetcher.pre_forward": nothing,
        "prefetch.Prefetcher.post_forward": nothing,
        "prefetch.Prefetcher.pre_backward": nothing,
        "prefetch.Prefetcher.post_backward": nothing,
        "prefetch.Prefetcher.needed": nothing,
    },
    "memory is limited, and freed early": {
        "limiter.EventQueue.admit": true,
        "limiter.EventQueue.freed": nothing,
        "backward.Backward._free_early": nothing,
    },
    "users' hooks on parameters are called": {
        "backward.change_gradient": second,
        "gradients.after_gradient": nothing,
    },
}
"""By promise, the functions of minifsdp that keep it, and what is in their place."""


@contextmanager
def without(*promises: str) -> Iterator[None]:
    """Inside, minifsdp does not keep them. Models of one small layer each compute the same."""
    with ExitStack() as stack:
        for promise in promises:
            for name, function in PROMISES[promise].items():
                stack.enter_context(patch(f"minifsdp.{name}", function))
        yield
