"""sim/models.py: the models have the sizes that their names say."""

import pytest
import torch
from torch import nn

from minifsdp.sim.models import MODELS, Block, Job, find

SIZES = {
    "gpt-125m": 125e6, "gpt-1.3b": 1.3e9, "gpt-7b": 7e9, "gpt-13b": 13e9,
    "t5-500m": 500e6, "vit-h": 632e6,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_size_of_its_name(name):
    with torch.device("meta"):
        model = MODELS[name].build()
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(SIZES[name], rel=0.12)
        assert any(isinstance(module, MODELS[name].blocks) for module in model.modules())
        assert MODELS[name].loss(model, 2, 16).shape == ()


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


def mine() -> Job:
    return Job(lambda: nn.Linear(3, 3), (nn.Linear,), lambda model, batch, length: model)


def not_a_job() -> nn.Module:
    return nn.Linear(3, 3)


def test_a_job_of_ones_own_is_found_by_its_module():
    assert find("gpt-7b") is MODELS["gpt-7b"]
    assert isinstance(find("tests.sim.test_models:mine").build(), nn.Linear)


@pytest.mark.parametrize(
    "name, match",
    [
        ("gpt-8b", r"'gpt-8b' is not known\. There are gpt-125m, "),
        ("no.such:model", "No module named 'no'"),
        ("tests.sim.test_models:missing", "no attribute 'missing'"),
        ("tests.sim.test_models:not_a_job", r"not_a_job\(\) returned a Linear, not a minifsdp"),
    ],
)
def test_what_is_no_model_is_refused(name, match):
    with pytest.raises(ValueError, match=match):
        find(name)
