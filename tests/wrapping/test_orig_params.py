"""orig_params.py: nothing should refer to what wrapping has replaced."""

import gc
import io
import warnings
import weakref
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, as_dtensors, fully_shard
from minifsdp.wrapping.orig_params import unit_of_full_param, unit_of_orig_param
from tests.ranks import device, on_ranks
from tests.small import Block, batch, layers, mean_gradients, stack, step


@on_ranks(2)
def test_an_optimizer_built_before_is_refused_and_one_built_after_trains():
    model = nn.Sequential(nn.Linear(6, 6)).to(device())
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"Adam.* was built before wrapping. It holds 0.weight, 0.bias"
    ):
        FSDP(model)
    wrapped = FSDP(nn.Sequential(nn.Linear(6, 6)).to(device()))
    before = wrapped.engine.root.sharded_flat_param.detach().clone()
    optimizer = torch.optim.Adam(wrapped.parameters())
    step(wrapped)
    optimizer.step()
    assert not torch.equal(before, wrapped.engine.root.sharded_flat_param)


class Lazy:
    """As a module that is loaded when somebody asks for its class."""

    def __init__(self):
        self.asked = 0

    @property
    def __class__(self):
        self.asked += 1
        return Lazy


@on_ranks(1)
def test_whoever_looks_for_optimizers_does_not_load_what_is_lazy():
    lazy, model = Lazy(), nn.Sequential(nn.Linear(6, 6)).to(device())
    held = model[0].weight  # else nobody looks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FSDP(model)
    assert not lazy.asked and held is not None


def by_fully_shard(model: nn.Module, **_) -> nn.Module:
    fully_shard(model[1])
    return fully_shard(model)


rows = partial(FSDP, use_orig_params=True)
in_rows = pytest.mark.parametrize("shard", [rows, by_fully_shard], ids=["wrapper", "fully_shard"])


def shared() -> nn.Module:
    """Two blocks; the weight of the second one is that of the layer before both."""
    model = layers(2)
    model[2][0].weight = model[0].weight
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    others = [param for name, param in model.named_parameters() if "bias" not in name]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0}, {"params": others}], lr=0.1)


@in_rows
@on_ranks(2)
def test_in_rows_an_optimizer_of_torchs_gets_the_dtensors(shard):
    """As in torch's FSDP1 with use_orig_params=True. In its fully_shard it steps for nothing."""
    plain = shared()
    optimizer, originals = adamw(plain), [weakref.ref(param) for param in plain.parameters()]
    model, expected = shard(plain), shard(shared())
    gc.collect()
    assert not any(original() is not None for original in originals)
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    its = adamw(expected)
    for at in range(3):
        assert torch.equal(step(model, at), step(expected, at))
        for each in (optimizer, its):
            each.step()
            each.zero_grad()


class Own(torch.optim.SGD):
    """It may have parameters in other places, too."""


REFUSED = {
    "it has stepped": (torch.optim.AdamW, "it has a state for them already"),
    "it has a state from the start": (torch.optim.Adagrad, "it has a state for them already"),
    "it is not torch's": (Own, r"not one of torch\.optim's"),
}


@in_rows
@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_in_rows_an_optimizer_that_cannot_get_dtensors_is_refused(what, shard):
    cls, why = REFUSED[what]
    model = layers(2)
    optimizer = cls(model.parameters(), lr=0.1)
    if what == "it has stepped":
        step(model)
        optimizer.step()
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}\) was built before .*0\..*{why}"):
        shard(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    for found in (model.parameters(), optimizer.param_groups[0]["params"]):
        assert all(a is b for a, b in zip(found, params, strict=True))


@on_ranks(2)
def test_a_parameter_that_is_gone_when_the_model_is_materialized_is_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def without_bias(module):
        if isinstance(module, nn.Sequential):
            module[0] = nn.Linear(6, 6, bias=False)

    model = rows(model, param_init_fn=without_bias)
    step(model)
    with pytest.raises(RuntimeError, match=r"an optimizer \(SGD\) holds '0\.bias' of unit <root>"):
        optimizer.step()


@on_ranks(2)
def test_somebody_else_who_holds_a_parameter_is_no_optimizer():
    model = nn.Linear(6, 6).to(device())
    held = list(model.parameters())
    FSDP(model)
    assert len(held) == 2


@on_ranks(1)
def test_an_optimizer_that_nobody_uses_any_more_is_none():
    model = nn.Linear(6, 6).to(device())
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=1)
    optimizer.itself = optimizer  # garbage, but not known to be until Python looks for it
    gc.disable()
    try:
        del optimizer
        FSDP(model)
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Block})])
@pytest.mark.parametrize("nested", [False, True])
@on_ranks(2)
def test_the_model_that_is_refused_is_as_it_was(policy, nested):
    model = layers(2)
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    if nested:
        model[1] = FSDP(model[1])  # of which the optimizer has nothing
    modules, params = list(model.modules()), dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r"It holds 0\.weight, which"):
        FSDP(model, auto_wrap_policy=policy)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    after = dict(model.named_parameters())
    assert after.keys() == params.keys() and all(after[name] is params[name] for name in params)
    if nested:
        return  # a wrapper and the layers around it are no model that can be trained yet
    model(torch.ones(2, 6, device=device())).sum().backward()
    optimizer.step()


@on_ranks(2)
def test_nobody_is_looked_for_where_modules_share_a_parameter():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device())
    model[0].weight = model[1].weight
    with patch.object(gc, "get_objects", None):
        FSDP(model)


@on_ranks(1)
def test_a_shared_one_is_known_by_its_first_name():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device())
    model[1].weight = held = model[0].weight
    wrapped = FSDP(model)
    assert unit_of_orig_param(held) == (wrapped._unit, "0.weight")


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Block})])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@on_ranks(2)
def test_hooks_on_parameters_are_refused_before_anything_is_wrapped(register, policy):
    model = layers(2)
    hook = getattr(model[0].bias, register)(lambda _: None)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"parameter '0\.bias' has a hook"):
        FSDP(model, auto_wrap_policy=policy)
    assert [name for name, _ in model.named_parameters()] == names
    hook.remove()
    FSDP(model, auto_wrap_policy=policy)


# ---------------------------------------------------------------- parameters that a block has shown


def summon(model):
    return FSDP.summon_full_params(model)


@contextmanager
def unsharded(model):
    model.unshard()
    yield
    model.reshard()


BLOCKS = {
    "chunks": (stack, summon),
    "rows": (partial(stack, use_orig_params=True), summon),
    "fully_shard": (lambda: fully_shard(layers().to(device())), unsharded),
    "as_dtensors": (stack, as_dtensors),
}


@pytest.mark.parametrize("form", BLOCKS)
@on_ranks(2)
def test_an_optimizer_of_full_parameters_is_refused_when_it_steps_after_their_block(form):
    make, block = BLOCKS[form]
    model = make()
    with block(model):
        by_dimension = [[p for p in model.parameters() if p.dim() == d] for d in (1, 2)]
        optimizer = torch.optim.SGD([{"params": params} for params in by_dimension], lr=0.1)
    step(model)
    with pytest.raises(RuntimeError, match=r"\(SGD\) holds '.*' of unit .* outside of the block"):
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    assert not torch.equal(step(model), step(make()))


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_inside_of_the_block_it_steps_and_parameters_are_pickled(rows):
    model, plain = stack(use_orig_params=rows), layers().to(device())
    step(model)
    mean_gradients(plain, plain(batch()).pow(2).sum())
    with FSDP.summon_full_params(model, with_grads=True):
        params = [*model.parameters()]
        for tested in (params, plain.parameters()):
            torch.optim.SGD(tested, lr=0.1).step()
        torch.save(params, io.BytesIO())
        assert unit_of_full_param(params[0]) == (None, "")
    assert unit_of_full_param(params[0])[1] == "0.weight"
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.state_dict()[name], param.detach())


@on_ranks(2)
def test_a_parameter_that_the_block_was_given_stays_that_of_its_own_model():
    model, plain = stack(), layers().to(device())
    with FSDP.summon_full_params(model):
        model.module[0].weight = plain[0].weight
    plain(batch()).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
