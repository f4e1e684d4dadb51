"""Optimizers that look at whole matrices, of a model in rows: right, or refused by name."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

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
    (code,) = re.findall(r"test_whole_matrices.py runs.*?```py\n(.*?)```", PAGE.read_text(), re.S)
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


class Shampoo(torch.optim.Optimizer):
    """As it is written in a few lines: of each matrix, roots of what its gradients' rows and
    columns have in common. ``whole`` is what is done to a gradient first."""

    whole = staticmethod(lambda grad: grad)

    def __init__(self, params, lr=LR):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                grad, state = self.whole(param.grad), self.state[param]
                for name, product in (("left", grad @ grad.mT), ("right", grad.mT @ grad)):
                    state[name] = state.get(name, torch.zeros_like(product)) + product
                update = root(state["left"]) @ grad @ root(state["right"])
                if isinstance(param, DTensor) and not isinstance(update, DTensor):
                    update = distribute_tensor(
                        update, param.device_mesh, param.placements, src_data_rank=None
                    )
                param.add_(update, alpha=-group["lr"])


class ShampooOfWholes(Shampoo):
    whole = staticmethod(lambda grad: grad.full_tensor() if isinstance(grad, DTensor) else grad)


def root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag((values.clamp(min=0) + 0.01).pow(-0.25)) @ vectors.mT


@by_way
@on_ranks(2)
def test_a_shampoo_that_gathers_each_matrix_is_that_of_a_plain_model_bit_for_bit(way):
    expected = seeded(trained(ShampooOfWholes), ddp)
    found = seeded(trained(ShampooOfWholes), WAYS[way])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@by_way
@on_ranks(2)
def test_a_shampoo_of_dtensors_differs_by_rounding_alone(way):
    """Its root makes much of that: in float32 the third digit may differ, so this is float64."""

    def in_double(wrap):
        return trained(Shampoo)(lambda model: wrap(model.double()))

    in_float32 = batch
    with patch(f"{__name__}.batch", lambda *a, **k: in_float32(*a, **k).double()):
        expected, found = seeded(in_double, ddp), seeded(in_double, WAYS[way])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


class ShampooThatMixes(Shampoo):
    """Its own matrices are plain tensors."""

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            torch.eye(len(param), device=device()).add_(param.grad @ param.grad.mT)


@by_way
@on_ranks(2)
def test_plain_tensors_among_dtensors_are_an_error_of_torchs(way):
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        seeded(trained(ShampooThatMixes), WAYS[way])


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
