"""sim/models.py: the models have the sizes that their names say."""

import copy

import pytest
import torch
from torch.nn import functional

from minifsdp.sim.models import T5, Block, Gpt, Llama, logits_or_loss, rotated


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


def test_a_language_model_has_one_matrix_for_what_it_reads_and_what_it_writes():
    with torch.device("meta"):
        models = Gpt(8, layers=1, heads=2), T5(8, layers=1, heads=2, hidden=16)
    assert all(model.head.weight is model.tokens.weight for model in models)


def test_llama_is_causal_and_its_queries_share_keys():
    torch.manual_seed(0)
    model = Llama(16, layers=2, heads=4, keys=2, hidden=24, vocabulary=11)
    tokens = torch.randint(11, (2, 6))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])
    assert model.blocks[0].k.weight.shape == (2 * 4, 16)


def test_a_rotation_depends_on_the_place_and_keeps_lengths():
    x = torch.randn(1, 3, 1, 4)
    angles = torch.polar(torch.ones(3, 1, 2), torch.arange(6.0).view(3, 1, 2))
    y = rotated(x, angles)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    angle = torch.tensor(3.0)  # the second place's second pair
    a, b = x[0, 1, 0, 2:]
    expected = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()])
    torch.testing.assert_close(y[0, 1, 0, 2:], expected)


@pytest.mark.parametrize("how", ["fused", "chunked"])
@pytest.mark.parametrize("tokens", [3, 50])  # fewer than there are chunks, and more
def test_all_kinds_of_loss_have_the_same_value_and_gradients(how, tokens):
    torch.manual_seed(0)
    whole = torch.nn.Linear(8, 11, bias=False)
    other = copy.deepcopy(whole)
    x = torch.randn(1, tokens, 8, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    targets = torch.randint(11, (1, tokens))
    expected = logits_or_loss(whole, x, targets, "whole")
    torch.testing.assert_close(expected, functional.cross_entropy(whole(x)[0], targets[0]))
    loss = logits_or_loss(other, y, targets, how)
    torch.testing.assert_close(loss, expected)
    (3 * expected).backward()
    (3 * loss).backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(other.weight.grad, whole.weight.grad)
