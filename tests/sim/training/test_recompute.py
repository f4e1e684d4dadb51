"""sim/training/recompute.py: the same gradients, less memory, more arithmetic."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minifsdp.sim.training.recompute import recompute


class Counting(nn.Sequential):
    """A block that counts how often it is computed. Its last product is never needed again."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def trained(how):
    """Gradients of four blocks, how often each was computed, and the flops."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting() for _ in range(4)))
    recompute(list(model), how)
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(8, 4)).square().sum().backward()
    return [p.grad for p in model.parameters()], [b.calls for b in model], counter.get_total_flops()


@pytest.mark.parametrize(
    "how, calls, again",
    [
        ("none", [1, 1, 1, 1], 0),
        ("full", [2, 2, 2, 2], 8),
        ("selective", [2, 2, 2, 2], 4),  # of the first two of each block the second
        ("1/2", [1, 2, 1, 2], 4),
        ("3/4", [1, 2, 2, 2], 6),
        ("0", [1, 1, 1, 1], 0),
    ],
)
def test_gradients_are_the_same_and_what_is_not_kept_is_computed_again(how, calls, again):
    expected, _, flops = trained("none")
    grads, found, more = trained(how)
    assert all(torch.equal(a, b) for a, b in zip(expected, grads, strict=True))
    assert found == calls and more - flops == again * 2 * 8 * 4 * 4


@pytest.mark.parametrize("how", ["yes", "3/2", "-1", "1/0", ""])
def test_what_is_none_of_them_is_refused(how):
    with pytest.raises(ValueError, match="--recompute is none, full, selective, or a share of the"):
        recompute([], how)
