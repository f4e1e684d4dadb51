"""sim/models.py: the models have the sizes that their names say."""

import torch

from minifsdp.sim.models import Block


def test_a_block_computes_what_a_transformer_should():
    torch.manual_seed(0)
    causal, free = (Block(8, 2, 16, causal=c, cross=False) for c in (True, False))
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[0, -1] += 1  # the last token; those before it must not see it, if causal
    assert torch.equal(causal(x)[0, :-1], causal(changed)[0, :-1])
    assert not torch.equal(free(x)[0, :-1], free(changed)[0, :-1])
    cross = Block(8, 2, 16, causal=True, cross=True)
    assert not torch.equal(cross(x, x), cross(x, changed))
