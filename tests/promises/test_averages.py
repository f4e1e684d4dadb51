"""Promises around averages of the parameters (EMA, SWA): sharded as the model is, they are those of
a plain model; a copy of a sharded model is refused, and says how to have them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.promises import WAYS, Block, batch, ddp, parameters, seeded
from tests.ranks import device, on_ranks

DECAY = 0.75
by_way = pytest.mark.parametrize("way", WAYS)


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += self.training  # the same on all ranks
        return torch.tanh(self.norm(self.linear(x)))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), Layer(), Layer())


def steps(model: nn.Module, update) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        model(batch(3, 6, step=step)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(batch(3, 6))


KINDS = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    "ema, one by one": {"avg_fn": get_ema_avg_fn(DECAY)},
    "buffers, too": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY), "use_buffers": True},
}


def averaged_model(kind: str):
    """Made of the plain model, and sharded as that is."""

    def program(wrap):
        plain = network()
        averaged = AveragedModel(plain.to(device()), **KINDS[kind])
        model, averaged.module = wrap(plain), wrap(averaged.module)
        steps(model, lambda: averaged.update_parameters(model))
        result = outputs(averaged), parameters(averaged.module)
        assert outputs(model).ne(result[0]).any()
        return *result, [buffer.clone() for buffer in averaged.module.buffers()]

    return program


def by_hand(wrap):
    """And the model is evaluated with its averages, and goes on with what it had."""
    model = wrap(network())
    averages = [p.detach().clone() for p in model.parameters()]

    def update() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(averages, list(model.parameters()), 1 - DECAY)

    def exchange() -> None:
        with torch.no_grad():
            for param, average in zip(model.parameters(), averages, strict=True):
                before = param.clone()
                param.copy_(average)
                average.copy_(before)

    steps(model, update)
    exchange()
    found = outputs(model), parameters(model)
    exchange()
    assert outputs(model).ne(found[0]).any()
    return *found, outputs(model), parameters(model)


PROGRAMS = {**{kind: averaged_model(kind) for kind in KINDS}, "by hand": by_hand}


@by_way
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_averages_are_those_of_a_plain_model(program, way):
    expected = seeded(PROGRAMS[program], ddp)
    found = seeded(PROGRAMS[program], WAYS[way])
    for its, mine in zip(expected, found, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel])
@by_way
@on_ranks(2)
def test_a_copy_of_a_sharded_model_is_refused_and_says_how(way, copied):
    model = seeded(lambda wrap: wrap(network()), WAYS[way])
    match = r"cannot be copied .*make AveragedModel\(model\) before .*torch._foreach_lerp_\(\)"
    for module in (model, nn.Sequential(model)):
        with pytest.raises(TypeError, match=match):
            copied(module)
    outputs(model)


@by_way
@on_ranks(2)
def test_copies_of_parameters_are_plain_tensors_of_their_own(way):
    """``ema = copy.deepcopy(list(model.parameters()))``: nothing of them is the model's."""
    model = seeded(lambda wrap: wrap(network()), WAYS[way])
    before, copies = parameters(model), copy.deepcopy(list(model.parameters()))
    with torch.no_grad():
        for own, copied in zip(model.parameters(), copies, strict=True):
            assert type(copied) is type(own) and copied.shape == own.shape
            torch._foreach_lerp_([copied], [own], 0.5)
            local = [getattr(t, "_local_tensor", t) for t in (own, copied)]
            assert torch.equal(*local)
            copied.zero_()
    found = parameters(model)
    assert all(torch.equal(found[name], value) for name, value in before.items())
    if way == "fully_shard":
        given = copy.deepcopy(dict(model.named_parameters())["1.linear.weight"])
        with torch.no_grad():
            given.mul_(2)
        model[1].linear.weight = given
        name = "1.linear.weight"
        assert torch.equal(parameters(model)[name], 2 * before[name])
        outputs(model)
