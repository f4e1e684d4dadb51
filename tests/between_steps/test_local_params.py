"""local_params.py: the same steps and the same state, without DTensor's dispatch."""

import sys

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from minifsdp import fully_shard, local_params, state_to_load, state_to_save
from minifsdp.support.dtensors import divided_alike, local_of
from tests.ranks import device, on_ranks, run
from tests.small import batch

OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "one by one": lambda p: optim.AdamW(p, lr=0.01, foreach=False),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: optim.SGD(p, lr=0.01),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "groups": lambda p: optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}]),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
}


def model() -> nn.Module:
    """One weight has an odd number of rows. A bias has one row, so the second rank has none."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 1)).to(device())
    fully_shard(made[0])
    return fully_shard(made)


def train(wrapped: nn.Module, optimizer: optim.Optimizer, steps: int = 3) -> None:
    for number in range(steps):
        wrapped(batch(8, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(wrapped: nn.Module, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    found = [*wrapped.parameters()]
    for param in wrapped.parameters():
        found += [value for value in optimizer.state[param].values() if torch.is_tensor(value)]
    assert len(optimizer.state) <= len(list(wrapped.parameters()))
    return found


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two)
    for mine, theirs in zip(one, two, strict=True):
        assert isinstance(mine, DTensor) is isinstance(theirs, DTensor)
        if isinstance(mine, DTensor):
            assert divided_alike(mine, theirs)
            mine, theirs = mine.to_local(), theirs.to_local()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_and_state_are_the_same(kind):
    run(same_steps, 2, kind)


def same_steps(kind: str) -> None:
    results = []
    for wanted in (lambda optimizer: optimizer, local_params):
        wrapped = model()
        optimizer = wanted(OPTIMIZERS[kind](list(wrapped.parameters())))
        train(wrapped, optimizer)
        results.append(everything(wrapped, optimizer))
    same(*results)


def test_one_that_dtensor_cannot_do_works():
    run(rprop, 2)


def rprop() -> None:
    wrapped = model()
    params: list = list(wrapped.parameters())
    optimizer = local_params(optim.Rprop(params))  # it writes to elements by a mask
    plain = [nn.Parameter(param.to_local().clone()) for param in params]
    reference = optim.Rprop(plain)
    for number in range(3):
        wrapped(batch(8, number)).square().mean().backward()
        for mine, param in zip(plain, params, strict=True):
            mine.grad = param.grad.to_local().clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for mine, param in zip(plain, params, strict=True):
        assert torch.equal(mine, param.to_local())


def test_no_operation_is_dtensors():
    run(no_dispatch, 1)


def no_dispatch() -> None:
    wrapped = model()
    optimizer = local_params(optim.AdamW(wrapped.parameters(), foreach=True))
    train(wrapped, optimizer, 2)  # the state exists
    wrapped(batch(8)).square().mean().backward()
    with Operands() as seen:
        optimizer.step()
    assert seen.kinds == {torch.Tensor}


class Operands(TorchFunctionMode):
    """What the tensors are in the lists that operations get."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.kinds |= {
            type(t) for one in args if isinstance(one, list) for t in one if torch.is_tensor(t)
        }
        return function(*args, **(kwargs or {}))


def test_a_checkpoint_goes_from_one_to_the_other(tmp_path):
    run(checkpoint, 2, str(tmp_path))


def checkpoint(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    wrapped = model()
    optimizer = local_params(optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
    train(wrapped, optimizer)
    dcp.save(state_to_save(wrapped, optimizer), checkpoint_id=folder)
    other = model()
    its = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with state_to_load(other, its) as state:
        dcp.load(state, checkpoint_id=folder)
    train(wrapped, optimizer, 1)
    train(other, its, 1)
    same(everything(wrapped, optimizer), everything(other, its))


def test_a_step_that_fails_leaves_the_optimizer_as_it_was():
    run(failing, 1)


def failing() -> None:
    wrapped = model()
    optimizer = local_params(optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
    params = list(wrapped.parameters())
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    train(wrapped, optimizer)
    assert set(optimizer.state) == set(params)


def test_parameters_that_are_no_dtensors_are_stepped():
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    before = plain.weight.clone()
    local_params(optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)).step()
    assert not torch.equal(plain.weight, before)


class Mine(optim.AdamW):
    """Somebody's own, of which nothing is known."""


class AdamW(optim.AdamW):
    """Somebody's own, under a name of torch's."""


@pytest.mark.parametrize("kind", [optim.LBFGS, optim.Adafactor, Mine, AdamW, "Muon"])
def test_others_are_refused(kind):
    if kind == "Muon":
        kind = getattr(optim, kind, optim.Adafactor)  # there since torch 2.9
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match=f"{kind.__name__} is not known to be one"):
        local_params(kind([weight]))


@on_ranks(2)
def test_nothing_is_kept_from_step_to_step():
    wrapped = model()
    optimizer = local_params(optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9))
    counts = []
    for _ in range(2):
        train(wrapped, optimizer, 2)
        counts.append([sys.getrefcount(local_of(param)) for param in wrapped.parameters()])
    assert counts[0] == counts[1]
