"""sim/training/llama.py: what Llama's layers have that GPT's have not."""

import torch

from minifsdp.sim.training.llama import Llama, LlamaBlock, rotated


def test_rotated_products_depend_on_how_far_apart_two_places_are():
    torch.manual_seed(0)
    angles = torch.polar(
        torch.ones(10, 1, 2), torch.outer(torch.arange(10.0), torch.tensor([1, 0.1]))[:, None]
    )
    q, k = (torch.randn(1, 1, 1, 4).expand(1, 10, 1, 4) for _ in range(2))
    scores = rotated(q, angles).flatten(2)[0] @ rotated(k, angles).flatten(2)[0].T
    assert torch.allclose(scores.diagonal(3), scores[0, 3].expand(7), atol=1e-5)
    assert not torch.allclose(scores[0], scores[0, :1].expand(10), atol=1e-2)
    assert rotated(q.bfloat16(), angles).dtype is torch.bfloat16  # computed in fp32, as Meta does


def test_no_token_sees_those_after_it():
    torch.manual_seed(0)
    block, angles = LlamaBlock(8, 4, 2, 16), torch.ones(5, 1, 1, dtype=torch.complex64)
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[0, 2] += 1
    before, after = block(x, angles), block(changed, angles)
    assert torch.equal(before[0, :2], after[0, :2])
    assert (before[0, 2:] != after[0, 2:]).any(-1).all()


def test_several_heads_share_a_key():
    with torch.device("meta"):
        model = Llama(64, 2, 8, keys=2, hidden=96, vocabulary=100)
        assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 100)
    block = model.blocks[0]
    assert block.k.weight.shape == block.v.weight.shape == (16, 64)
    assert model.head.weight is not model.tokens.weight  # unlike GPT's
