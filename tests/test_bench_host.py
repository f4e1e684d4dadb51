"""bench/host.py: minifsdp's own work is the same on 8 ranks and on 1,024."""

import pytest
import torch
from torch import nn

from tests.bench.host import (
    RANKS,
    WRAPS,
    _one_of,
    calls_and_shares,
    calls_without,
    results,
    work,
)
from tests.bench.without import PROMISES, without


def test_minifsdps_host_work_does_not_grow_with_the_ranks():
    """Counted in tensors that operators return: one that cuts a tensor for all ranks returns 1,024.
    FSDP1, which does so in each step, and FSDP2, when it wraps, show that they would be seen."""
    few, many = (work(results, ranks, units=3, rounds=1) for ranks in RANKS)
    for name in ("mini", "mini rows"):
        assert many[name] == few[name] and few[name].later > 0
    assert many["FSDP1"].later > 10 * few["FSDP1"].later
    assert many["FSDP2"].wrapping > 10 * few["FSDP2"].wrapping


def test_calls_and_shares_are_of_one_step_and_of_all_files():
    """A plain module makes few calls, none of them in minifsdp; and minifsdp's are in its files."""
    (plain, plain_shares), (mini, shares) = map(calls_and_shares, ("local", "mini"))
    assert plain < 40 < mini < 1000 and set(plain_shares) == {"torch"}
    assert sum(shares.values()) == pytest.approx(1)
    assert {"torch", "hooks.py", "engine.py", "support", "limiter.py"} < set(shares)


@pytest.mark.slow
def test_without_its_promises_minifsdp_computes_the_same_with_fewer_calls():
    def gradients(*promises: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with _one_of(1), without(*promises):
            model = WRAPS["mini"](nn.Sequential(nn.Linear(2, 2), WRAPS["mini"](nn.Linear(2, 2))))
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
            return [param.grad.clone() for param in model.parameters()]

    for one, other in zip(gradients(), gradients(*PROMISES), strict=True):
        assert torch.equal(one, other) and one.any()
    *each, all_of_them = calls_without(steps=1).values()
    assert min(each) >= 1 and all_of_them > max(each) + min(each)
