"""Promises around the step: the wrapped module, state dicts, evaluation between steps."""

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from tests.promises import Averaged, Block, batch, fsdp, parameters, refused, same, seeded, train
from tests.ranks import device, on_ranks
from tests.small import scripted

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]


class Part(Block):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


class Model(nn.Module):
    """Embedding and head are the root's own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(x)


def square(model, x):
    return model(x).pow(2).mean()


# ------------------------------------------------------------------------- the wrapped module


def an_optimizer_on_the_wrapped_module(wrap):
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    return train(model, square, optimizer=optimizer)


def zero_grad_of_the_wrapped_module(wrap):
    model = wrap(Model())
    square(model, batch(3, 6, step=9)).backward()
    model.module.zero_grad()
    return train(model, square)


def freezing_the_wrapped_module(wrap):
    model, scale = wrap(Model()), nn.Parameter(torch.ones(6, device=device()))
    model.module.requires_grad_(False)
    square(model, batch(3, 6) * scale).backward()
    return scale.grad, parameters(model)


def state_of_the_wrapped_module(wrap):
    model = wrap(Model())
    result = train(model, square)
    state = model.module.state_dict()
    plain = Model().to(device())
    plain.load_state_dict(state)
    assert list(state) == list(plain.state_dict())
    return dict(state), result


def loading_the_wrapped_module(wrap):
    torch.manual_seed(5)
    other = Model().to(device()).state_dict()
    model = wrap(Model())
    assert str(model.module.load_state_dict(other)) == "<All keys matched successfully>"
    return train(model, square)


def moving_the_wrapped_module(wrap):
    model = wrap(Model())
    model.module.double()
    return train(model, lambda m, x: square(m, x.double()))


# ---------------------------------------------------------------------------- state dicts that fail


class Extra(nn.Module):
    """Its state cannot be saved or loaded, for a while."""

    broken = False

    def forward(self, x):
        return x

    def get_extra_state(self):
        if self.broken:
            raise KeyError("extra")
        return {"version": 1}

    def set_extra_state(self, state):
        if self.broken:
            raise KeyError("extra")


class Brittle(Model):
    def __init__(self):
        super().__init__()
        self.extra = Extra()
        self.parts[0].extra = Extra()


def failing(where):
    def program(wrap):
        model = wrap(Brittle())
        before = train(model, square, steps=2)
        state = {name: value for name, value in model.state_dict().items()}
        broken = next(m for n, m in model.named_modules() if isinstance(m, Extra) and where in n)
        for call in (model.state_dict, lambda: model.load_state_dict(state)):
            broken.broken = True
            with pytest.raises(KeyError):
                call()
            broken.broken = False
            looked_at = parameters(model)
        return before, looked_at, train(model, square), len(model.state_dict()) == len(state)

    return program


# ------------------------------------------------------------------------------- evaluation


def generating_in_summon_full_params(wrap):
    model = wrap(Model())
    model.eval()
    found = []
    with torch.no_grad():
        if isinstance(model, FSDP):
            with FSDP.summon_full_params(model, recurse=False, writeback=False):
                found += [model(batch(3, 6)), model.module.parts[0](batch(3, 6))]
            with FSDP.summon_full_params(model, writeback=False):
                found += [model(batch(3, 6)), model.module.last(batch(3, 6))]
        else:
            found += [model(batch(3, 6)), model.module.parts[0](batch(3, 6))]
            found += [model(batch(3, 6)), model.module.last(batch(3, 6))]
    model.train()
    return found, train(model, square)


def a_norm_between_forward_and_backward(wrap):
    def loss(model, x):
        total = square(model, x)
        parameters_norm = sum(float(p.norm()) for p in parameters_of(model).values())
        return total + 0 * parameters_norm

    def parameters_of(model):
        if not isinstance(model, FSDP):
            return dict(model.named_parameters())
        with FSDP.summon_full_params(model):
            return {n: p.detach().clone() for n, p in model.named_parameters()}

    return train(wrap(Model()), loss)


def compiled(wrap):
    return train(torch.compile(wrap(Model()), backend="eager"), square)


RIGHT = [
    an_optimizer_on_the_wrapped_module,
    zero_grad_of_the_wrapped_module,
    freezing_the_wrapped_module,
    state_of_the_wrapped_module,
    loading_the_wrapped_module,
    moving_the_wrapped_module,
    generating_in_summon_full_params,
    a_norm_between_forward_and_backward,
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@on_ranks(2)
def test_right(program, strategy):
    same(program, Averaged, sharding_strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("where", ["extra", "parts.0"])
@on_ranks(2)
def test_a_state_dict_that_fails_leaves_the_model_as_it_was(where, strategy):
    same(failing(where), Averaged, sharding_strategy=strategy)


# ----------------------------------------------------------------------------- refused by name


def setting_data(wrap):
    wrap(Model()).module.parts[0].module.layer.weight.data = torch.zeros(6, 6)


def freezing_a_part(wrap):
    wrap(Model()).module.first.weight.requires_grad = False


def another_parameter(wrap):
    model = wrap(Model())
    model.module.first.weight = nn.Parameter(torch.zeros(6, 6))


def one_parameter_more(wrap):
    wrap(Model()).module.parts[1].module.layer.register_parameter("scale", nn.Parameter(batch(6)))


def a_block_in_between(wrap):
    model = wrap(Model())
    model.module.parts.insert(1, nn.Linear(6, 6))  # which torch tells nobody
    model(batch(3, 6))


def freezing_a_part_as_a_module(wrap):
    wrap(Model()).module.parts[0].module.layer.requires_grad_(False)


def sparse_gradients(wrap):
    wrap(nn.Sequential(nn.Embedding(6, 6, sparse=True)))


def a_scripted_part(wrap):
    wrap(nn.Sequential(scripted(nn.Linear(6, 6))))


def tying_afterwards(wrap):
    model = wrap(Model())
    model.module.last.weight = model.module.first.weight


def training_in_summon_full_params(wrap):
    model = wrap(Model())
    with FSDP.summon_full_params(model, recurse=False):
        model(batch(3, 6))


REFUSED = [
    (setting_data, RuntimeError, ["'data' cannot be set", "'layer.weight'", "unit 'parts.0'"]),
    (freezing_a_part, RuntimeError, ["'requires_grad' cannot be set", "'first.weight'", "<root>"]),
    (another_parameter, RuntimeError, ["'first.weight'", "unit <root>", "summon_full_params"]),
    (one_parameter_more, RuntimeError, ["'scale' of Linear", "unit 'parts.1'", "before you wrap"]),
    (a_block_in_between, RuntimeError, ["'parts.1' (Linear)", "in no unit", "before you wrap"]),
    (freezing_a_part_as_a_module, RuntimeError, ["layer.weight, layer.bias of Linear", "frozen"]),
    (sparse_gradients, ValueError, ["module '0' (Embedding)", "sparse=False"]),
    (a_scripted_part, ValueError, ["module '0'", "torch.jit", "Wrap the plain module"]),
    (tying_afterwards, TypeError, ["parameter 'weight'"]),
    (training_in_summon_full_params, RuntimeError, ["gradients enabled", "torch.no_grad()"]),
]


@pytest.mark.parametrize("program, error, words", REFUSED, ids=lambda x: getattr(x, "__name__", ""))
@on_ranks(2)
def test_refused(program, error, words):
    refused(program, error, words)


@on_ranks(2)
def test_units_that_keep_their_parameters_are_gathered_once_for_all_batches_of_no_sync():
    wrap = fsdp(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    model = seeded(lambda wrap: wrap(Model()), wrap)
    gathers = []
    for _ in range(2):
        with model.no_sync():
            for step in range(3):
                square(model, batch(3, 6, step=step)).backward()
                gathers.append(model.engine.stats.all_gathers)
        square(model, batch(3, 6, step=3)).backward()
        gathers.append(model.engine.stats.all_gathers)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad()
    assert gathers == [3] * 4 + [6] * 4
