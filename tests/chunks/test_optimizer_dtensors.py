"""optimizer_dtensors.py: one state for each parameter, and back; or refused by name."""

import pytest
import torch
import torch.distributed as dist

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import as_dtensors
from minifsdp.chunks.optim_state import MARK
from minifsdp.chunks.optimizer_dtensors import make_states
from tests.ranks import device, on_ranks
from tests.small import stack, step


def trained(make=torch.optim.AdamW, **settings):
    model = stack(2, **settings)
    optimizer = make(model.parameters(), lr=0.01)
    step(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Counting(torch.optim.SGD):
    """It counts its steps in Python, as optimizers did before they could run in CUDA graphs."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["count"] = self.state[param].get("count", 0) + 1


OPTIMIZERS = {
    "without a state": lambda params, lr: torch.optim.SGD(params, lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "three moments": lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True),
    "foreach": lambda params, lr: torch.optim.AdamW(params, lr, foreach=True),
    "a state from the beginning": torch.optim.Adagrad,
    "a number of Python's": lambda params, lr: Counting(params, lr, momentum=0.9),
    "lr in a tensor": lambda params, lr: torch.optim.AdamW(params, torch.tensor(lr)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_there_and_back(name):
    model, optimizer = trained(OPTIMIZERS[name])
    before = {p: {k: torch.as_tensor(v).clone() for k, v in s.items()}
              for p, s in optimizer.state.items()}  # fmt: skip
    params = list(optimizer.param_groups[0]["params"])
    with as_dtensors(model, optimizer):
        assert len(optimizer.param_groups[0]["params"]) == 6
        assert MARK not in optimizer.param_groups[0]
        for param, state in optimizer.state.items():
            assert "1.0.weight" in dict(model.named_parameters())
            assert all(torch.as_tensor(v).shape in (param.shape, ()) for v in state.values())
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, params))
    assert MARK in optimizer.param_groups[0]
    assert optimizer.state.keys() == before.keys()
    for param, state in before.items():
        assert optimizer.state[param].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(optimizer.state[param][key]), value)
    step(model, 1)
    optimizer.step()  # and no check takes its state for another one's


@on_ranks(2)
def test_parameters_of_another_model_stay_as_they_are():
    model, _ = trained()
    own = torch.nn.Parameter(torch.ones(3, device=device()))
    optimizer = torch.optim.AdamW([own, *model.parameters()])
    own.grad = torch.ones_like(own)
    step(model)
    optimizer.step()
    with as_dtensors(model, optimizer):
        assert optimizer.param_groups[0]["params"][0] is own and own in optimizer.state
    assert optimizer.param_groups[0]["params"][0] is own and own in optimizer.state


@on_ranks(2)
def test_a_state_that_is_not_element_wise_is_refused_on_all_ranks():
    model, optimizer = trained()
    first = next(iter(optimizer.state.values()))
    if dist.get_rank() == 1:
        first["row_means"] = torch.ones(5, 1)
    with pytest.raises(RuntimeError, match=r"'row_means' of unit .* \[5, 1\] on rank 1"):
        FSDP.optim_state_dict(model, optimizer)
    first.pop("row_means", None)
    FSDP.optim_state_dict(model, optimizer)


@on_ranks(2)
def test_states_that_differ_between_ranks_are_refused_on_all_ranks():
    model, optimizer = trained()
    if dist.get_rank() == 1:
        optimizer.state.popitem()
    with pytest.raises(RuntimeError, match=r"rank 1 has (None|\{\})"):
        FSDP.optim_state_dict(model, optimizer)


@pytest.mark.parametrize("what", ["a number", "an entry"])
@on_ranks(2)
def test_states_of_one_unit_that_cannot_be_one_are_refused(what):
    model, optimizer = trained()
    before = FSDP.optim_state_dict(model, optimizer)
    with (
        pytest.raises(RuntimeError, match=r"'0\.bias' of unit '1'.*use_orig_params=True"),
        as_dtensors(model, optimizer),
    ):
        state = optimizer.state[dict(model.named_parameters())["1.0.bias"]]
        if what == "a number":
            state["step"] += 1
        else:
            del state["exp_avg"]
    after = FSDP.optim_state_dict(model, optimizer)
    for name, entry in before["state"].items():
        assert all(torch.equal(after["state"][name][key], entry[key]) for key in entry)


class ItsOwnRate(torch.optim.Optimizer):
    """It finds its rate itself, as the Adafactor of transformers does."""

    def __init__(self, params):
        super().__init__(params, {"lr": None})

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param]["mean"] = torch.zeros_like(param)


@pytest.mark.parametrize("rate", [None, torch.tensor(0.1), 0.1])
def test_a_rate_may_be_of_any_kind_and_stays(rate):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = ItsOwnRate([param])
    optimizer.param_groups[0]["lr"] = rate
    make_states(optimizer)
    assert optimizer.state[param]["mean"].tolist() == [0.0] * 3
    assert optimizer.param_groups[0]["lr"] is rate and param.grad is None
