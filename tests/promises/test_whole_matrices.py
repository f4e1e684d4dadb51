"""Optimizers that look at whole matrices, of a model in rows: right, or refused by name."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from tests.promises import WAYS, Block, batch, ddp, parameters, seeded
from tests.ranks import device, on_ranks

PAGE = Path(__file__).parents[2] / "tutorials/reference/using.md"
IN_ROWS = [way for way in WAYS if way != "chunks"]
by_way = pytest.mark.parametrize("way", IN_ROWS)
LR = 0.02


class Layer(Block):
    """Of 9 rows, which 2 ranks do not divide evenly; the second matrix is tall, the first wide."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = nn.Linear(16, 9), nn.Linear(9, 16)

    def forward(self, x):
        return self.tall(torch.tanh(self.wide(x)))


def network() -> nn.Module:
    return nn.Sequential(Layer(), Layer(), nn.Linear(16, 4))


def trained(optimizer):
    """Its matrices by ``optimizer``, the rest by AdamW."""

    def program(wrap):
        model = wrap(network())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        optimizers = [optimizer(matrices, lr=LR), torch.optim.AdamW(rest, lr=LR)]
        for step in range(3):
            model(batch(32, 16, step=step)).pow(2).sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return parameters(model)

    return program


def muon_of_the_page():
    (code,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.S)
    names = {"torch": torch}
    exec(code, names)
    return names["Muon"]


@by_way
@on_ranks(2)
def test_the_muon_of_the_page_is_that_of_a_plain_model_bit_for_bit(way):
    expected = seeded(trained(torch.optim.Muon), ddp)
    found = seeded(trained(muon_of_the_page()), WAYS[way])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def exact(update: Tensor, coefficients, steps: int, eps: float) -> Tensor:
    """torch's orthogonalization in float64 in the place of bfloat16."""
    a, b, c = coefficients
    found = update.double()
    tall = found.size(0) > found.size(1)
    found = found.T if tall else found
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = a * found + (b * gram + c * gram @ gram) @ found
    return (found.T if tall else found).float()


@by_way
@on_ranks(2)
def test_torchs_muon_rounds_otherwise_by_no_more_than_bfloat16_does(way):
    """What it gets of exact products is the measure: the plain model's is as far from that."""
    expected = seeded(trained(torch.optim.Muon), ddp)
    with patch("torch.optim._muon._zeropower_via_newtonschulz", exact):
        reference = seeded(trained(torch.optim.Muon), ddp)
    found = seeded(trained(torch.optim.Muon), WAYS[way])

    def distance(one, other):
        names = [name for name in one if one[name].ndim == 2]
        return torch.cat([(one[n] - other[n]).view(-1) for n in names]).norm().item()

    of_rounding = distance(expected, reference)
    assert of_rounding > 0
    assert distance(found, reference) < 1.5 * of_rounding
    assert distance(found, expected) < 2 * of_rounding
    assert distance(expected, seeded(parameters_before, ddp)) > 5 * of_rounding


def parameters_before(wrap):
    return parameters(wrap(network()))


def closure_of(model, optimizer):
    """What LBFGS calls as often as it needs."""

    def closure():
        optimizer.zero_grad()
        loss = model(batch(3, 16)).pow(2).sum()
        loss.backward()
        return loss

    return closure


REFUSED = {"Adafactor": {}, "LBFGS": {"lr": 0.1}}


@pytest.mark.parametrize("name", REFUSED)
@by_way
@on_ranks(2)
def test_what_dtensors_cannot_do_is_refused_before_anything_is_changed(name, way):
    model = seeded(lambda wrap: wrap(network()), WAYS[way])
    before = parameters(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **REFUSED[name])
    closure = closure_of(model, optimizer)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"^{name} computes .* DTensors.*SGD, AdamW.*Muon"):
            optimizer.step(closure)
    assert all(torch.equal(value, before[key]) for key, value in parameters(model).items())
    plain = nn.Linear(3, 3).to(device())
    plain(batch(3, 3)).sum().backward()
    getattr(torch.optim, name)(plain.parameters(), **REFUSED[name]).step(lambda: 0.0)


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_with_torchs_fully_shard_they_fail_too(name):
    """If this no longer holds with a new torch, they need not be refused."""
    model = seeded(lambda wrap: torchs_fully_shard(network().to(device())), ddp)
    optimizer = getattr(torch.optim, name)(model.parameters(), **REFUSED[name])
    closure = closure_of(model, optimizer)

    closure()
    with pytest.raises(RuntimeError):
        optimizer.step(closure)
