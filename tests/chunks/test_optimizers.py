"""optimizers.py: which optimizers of flat parameters are refused, or warned of, and when."""

import gc
import warnings
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import minifsdp.chunks.optim_state
import minifsdp.chunks.optimizers
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, fully_shard
from tests.ranks import device, on_ranks
from tests.small import batch, stack, step

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]


def someones(name: str) -> type[torch.optim.Optimizer]:
    return type(name, (torch.optim.SGD,), {})


BY_TENSOR = ["Adafactor", "Muon", "SingleDeviceMuon", "FusedLAMB", "LARS", "Shampoo", "Adam_mini"]
BY_MODEL = ["LBFGS", "Prodigy", "DAdaptAdam", "SAM", "ZeroRedundancyOptimizer"]
BY_ELEMENT = ["SGD", "AdamW", "Lion", "Sophia", "LambdaSGD", "SamplingSGD", "FusedAdam"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_names_tell_what_an_optimizer_looks_at(strategy):
    model = stack(1, sharding_strategy=strategy)
    sharded = strategy is ShardingStrategy.FULL_SHARD
    for name in BY_TENSOR + BY_MODEL * sharded:
        with pytest.raises(RuntimeError, match=f"^{name} looks at .*use_orig_params=True"):
            someones(name)(model.parameters(), lr=0.1)
    for name in BY_ELEMENT + BY_MODEL * (not sharded):
        optimizer = someones(name)(model.parameters(), lr=0.1)
        step(model)
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"^Mine looks at"):
        type("Mine", (torch.optim.Adafactor,), {})(model.parameters())


@on_ranks(2)
def test_a_part_of_one_parameter_is_not_the_whole():
    norm = FSDP(nn.LayerNorm(3, bias=False).to(device()))
    with pytest.raises(RuntimeError, match="whole parameters, in their own shapes"):
        someones("Adafactor")(norm.parameters(), lr=0.1)


@pytest.mark.parametrize("chosen", [{}, {"foreach": True}, {"fused": True}])
@on_ranks(2)
def test_dtensors_and_others_are_stepped_one_by_one_unless_the_program_says_how(chosen):
    rows, chunks = stack(1, use_orig_params=True), stack(1)
    for model in (rows, chunks):
        step(model)
    optimizer = torch.optim.SGD([*rows.parameters(), *chunks.parameters()], lr=0.1, **chosen)
    (group,) = optimizer.param_groups
    before = {name: group[name] for name in ("foreach", "fused")}
    with suppress(RuntimeError):  # of torch's, which does not mix them in one kernel
        optimizer.step()
    found = {name: group[name] for name in before}
    assert found == (before if chosen else {"foreach": False, "fused": None})


@on_ranks(1)
def test_one_parameter_of_one_dimension_is_what_it_was():
    norm = FSDP(nn.LayerNorm(3, bias=False).to(device()))
    someones("Adafactor")(norm.parameters(), lr=0.1)
    for other in (nn.LayerNorm(3), nn.Linear(3, 3, bias=False)):
        with pytest.raises(RuntimeError, match="whole parameters, in their own shapes"):
            someones("Adafactor")(FSDP(other.to(device())).parameters(), lr=0.1)


@on_ranks(2)
def test_what_it_has_of_somebody_elses_dtensors_is_nobodys_business():
    whole = stack(1, sharding_strategy=ShardingStrategy.NO_SHARD)
    other = nn.Parameter(distribute_tensor(torch.ones(4), init_device_mesh(device().type, (2,))))
    torch.optim.LBFGS([other, *whole.parameters()], lr=0.1)


@on_ranks(2)
def test_an_optimizer_of_other_parameters_is_nobodys_business():
    stack(1)
    other = nn.Linear(2, 2)
    optimizer = someones("LBFGS")([{"params": []}, {"params": other.parameters()}], lr=0.1)
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[1].keys() == torch.optim.SGD([other.bias]).param_groups[0].keys()


@on_ranks(2)
def test_a_group_that_is_added_later_is_looked_at():
    model, other = stack(1), nn.Linear(6, 6)
    held = list(other.parameters())
    wrapped = FSDP(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    optimizer.add_param_group({"params": held[:1]})
    before = [param.detach().clone() for param in model.parameters()]
    for _ in range(2):  # whoever tries again is told again
        with pytest.raises(RuntimeError, match=r"\(SGD\) holds 'weight' of unit <root> as it was"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert wrapped is not None


@on_ranks(2)
def test_a_parameter_in_a_list_that_is_exchanged_is_looked_at():
    model, other = stack(1), nn.Linear(6, 6)
    held = list(other.parameters())
    wrapped = FSDP(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    optimizer.param_groups[0]["params"] = held
    with pytest.raises(RuntimeError, match="as it was before"):
        optimizer.step()
    del wrapped
    gc.collect()
    optimizer.step()  # nobody has them now, and whoever wants may use them


@on_ranks(2)
def test_a_flat_parameter_that_was_replaced_is_noticed():
    model = stack(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unit = model.engine.units[1]
    unit.module._flat_param = unit.replace_shard(
        nn.Parameter(unit.sharded_flat_param.detach().clone())
    )
    step(model)
    with pytest.raises(RuntimeError, match="holds a flat parameter of unit '1' that has been repl"):
        optimizer.step()


@pytest.mark.parametrize("in_rows", [False, True])
@on_ranks(2)
def test_a_step_without_a_gradient_is_told_once_and_a_step_before_any_forward_is_not(in_rows):
    model = stack(1, use_orig_params=in_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # as some do to make its state
    model(batch()).sum().backward(inputs=list(model.parameters()))
    with pytest.warns(UserWarning, match=r"none of its parameters has a gradient.*inputs="):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        step(model)
        optimizer.step()


@on_ranks(2)
def test_a_step_of_what_is_unused_in_its_unit_needs_no_gradient():
    """Of a unit in rows; an optimizer may have some of its parameters only."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    unused = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model.forward = lambda x: model[0](x)
    model(batch(3)).sum().backward()
    assert model[0].weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unused.step()


@on_ranks(2)
def test_a_step_of_what_is_frozen_needs_no_gradient():
    model = stack(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.requires_grad_(False)
    model(batch().requires_grad_()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@on_ranks(2)
def test_a_step_looks_at_groups_once():
    model = stack(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with patch.object(minifsdp.chunks.optim_state, "agree") as agree:
        for at in range(3):
            step(model, at)
            optimizer.step()
    assert agree.call_count == 1


class Complex(nn.Module):
    """A layer of complex weights, as of spectral convolutions."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.cfloat))

    def forward(self, x):
        return (self.weight * x).abs()


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
@pytest.mark.parametrize("width", [4, 5])
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
@on_ranks(2)
def test_complex_weights_are_trained_or_the_optimizer_is_refused(shape, width, cls):
    """torch views them as real numbers. Of a DTensor that is divided unevenly that is a copy."""
    mesh = init_device_mesh(device().type, shape)
    model = fully_shard(Complex(width).to(device()), mesh=mesh)
    optimizer = cls(model.parameters(), lr=0.1)
    model(torch.ones(width, device=device())).sum().backward()
    if width == 5 and cls is not torch.optim.SGD:
        with pytest.raises(RuntimeError, match="views a complex parameter as real"):
            optimizer.step()
        return
    optimizer.step()
    assert (model.weight.full_tensor().real < 0.95).all()


def split(model, make=list):
    params = list(model.parameters())
    return [{"params": make(params), "lr": 0.2}, {"params": make(params[:0])}]


@pytest.mark.parametrize("make, at_once", [(list, True), (tuple, True), (iter, False)])
@on_ranks(2)
def test_an_empty_group_is_warned_of_as_early_as_it_can_be_seen(make, at_once):
    model = stack(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(split(model, make), lr=0.1)
        assert len(said) == at_once
        for at in range(2):
            step(model, at)
            optimizer.step()
    (warning,) = said
    assert warning.filename == __file__ and warning.category is UserWarning
    assert "number 1 is empty, and number 0 has the flat parameters of units <root>, '1'" in str(
        warning.message
    )


@on_ranks(2)
def test_groups_that_a_user_may_mean_are_not_warned_of():
    model, plain = stack(2), nn.Linear(2, 2)
    first, *rest = model.parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for groups in (
            [[first], rest],
            [[first, *rest], list(plain.parameters())],
            [[first, plain.weight], [*rest, plain.bias]],
        ):
            optimizer = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
            optimizer.step()
    with pytest.warns(UserWarning, match="was given 2 parameter groups; number 0 has the flat"):
        torch.optim.SGD([{"params": [first, *rest, plain.bias]}, {"params": [plain.weight]}])
