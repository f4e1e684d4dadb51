"""sim/training/models.py: the models have the sizes that their names say."""

import copy

import pytest
import torch
from torch.nn import functional

from minifsdp.sim.training.models import T5, Block, Gpt, logits_or_loss


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
