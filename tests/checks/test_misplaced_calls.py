"""misplaced_calls.py: calls that are right, but not here or not now."""

import warnings

import pytest
import torch
from torch._dynamo import compiled_autograd

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from minifsdp.checks.misplaced_calls import check_root_and_idle
from tests.core.common import StubUnit
from tests.parity import check_at_rest
from tests.ranks import on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
)


@pytest.mark.direct
def test_what_concerns_all_units_is_asked_of_the_root_between_steps():
    root, inner = StubUnit("root"), StubUnit("inner")
    check_root_and_idle(root, root, idle=True, method="no_sync")
    with pytest.raises(RuntimeError, match=r"on unit .*inner.*inside of another"):
        check_root_and_idle(inner, root, idle=True, method="no_sync")
    with pytest.raises(RuntimeError, match="no_sync was called in a forward or backward"):
        check_root_and_idle(root, root, idle=False, method="no_sync")


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_a_backward_inside_is_refused_and_the_parameters_stay(rows):
    model = stack(use_orig_params=rows)
    loss = model(batch()).pow(2).sum()
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match=r"inside summon_full_params .* <root>, '1', '2'"):
            loss.backward()
        assert model.module[0].weight.shape == (6, 6)
    step(model)
    check_at_rest(model)


@on_ranks(2)
def test_a_forward_inside_is_refused_and_the_parameters_stay():
    model = stack()
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match="inside summon_full_params"):
            model(batch())
        assert torch.equal(model.module[1].module[0].weight, layers()[1][0].weight)


@on_ranks(2)
def test_what_is_not_trained_may_be_called_inside_of_summon_full_params():
    model = stack()
    with FSDP.summon_full_params(model), torch.no_grad():
        assert torch.equal(model(batch()), layers()(batch()))
    for param in model.parameters():
        param.requires_grad_(False)
    with FSDP.summon_full_params(model):
        assert torch.equal(model(batch()), layers()(batch()))


@pytest.mark.parametrize("name", ["grad", "vjp", "jvp", "jacrev", "jacfwd"])
@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_a_gradient_by_torch_func_is_refused_before_anything_is_gathered(rows, name):
    model, x = stack(use_orig_params=rows), batch()
    args = {"vjp": (x,), "jvp": ((x,), (x,))}.get(name)
    for _ in range(2):  # what is made in the first step is there in the second
        with (
            warnings.catch_warnings(),
            pytest.raises(RuntimeError, match=r"<root> was called inside of torch\.func\.grad"),
        ):
            # torch 2.14 makes a script for gradients in forward mode, and warns of that.
            warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
            if args is None:
                getattr(torch.func, name)(lambda x: model(x).sum())(x)
            else:
                getattr(torch.func, name)(lambda x: model(x).sum(), *args)
        step(model)
        check_at_rest(model)


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_a_model_trains_inside_of_torch_func_vmap(rows):
    """Also if nothing was made outside of it yet."""
    model, plain = stack(use_orig_params=rows), layers()
    for at in range(2):
        model.zero_grad()
        loss, expected = (torch.func.vmap(m)(batch(step=at)).pow(2).sum() for m in (model, plain))
        assert torch.equal(loss, expected)
        loss.backward()
        assert_same_gradients(gathered_gradients(model), mean_gradients(plain, expected))
        check_at_rest(model)


@pytest.mark.parametrize("how", ["chunks", "rows", "fully_shard"])
@on_ranks(2)
def test_a_record_of_a_forward_is_made_where_parameters_are_out_and_nowhere_else(how):
    """It had parameters in it whose memory was freed, and the process ended without a message."""
    plain = layers().requires_grad_(False)
    model = layers().requires_grad_(False)
    if how == "fully_shard":
        for block in model[1:]:
            fully_shard(block)
        fully_shard(model)
    else:
        rows = how == "rows"
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=rows)
    expected = plain(batch())
    for _ in range(2):  # what is made in the first forward is there in the second
        with pytest.raises(RuntimeError, match=r"<root> was called inside of torch\.jit\.trace"):
            traced(model)
        with torch.no_grad():
            assert torch.equal(model(batch()), expected)
    if how == "fully_shard":
        with pytest.raises(RuntimeError, match=r"torch\.export, which would record parameters"):
            torch.export.export(model, (batch(),), strict=False)
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        found = traced(getattr(model, "module", model))
        assert torch.equal(found(batch()), expected)
    model(batch())
    assert torch.equal(found(batch()), expected)


def traced(model):
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", ".*torch.jit.trace", kind)
        return torch.jit.trace(model, batch(), check_trace=False)


def compiled_backward(model):
    """With compiled autograd around the backward alone."""
    loss = model(batch()).pow(2).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def compiled_step(model):
    """With compiled autograd in a step that is compiled. It makes modules there."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: model(batch()).pow(2).sum().backward(), backend="eager")()


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("run", [compiled_backward, compiled_step])
@on_ranks(2)
def test_compiled_autograd_is_refused_and_the_next_step_is_right(run, rows):
    """It calls nothing at the end of a backward: no parameter had a gradient, without a word."""
    torch._dynamo.reset()  # what an earlier one has compiled would not be compiled again
    model, plain = stack(use_orig_params=rows), layers()
    step(model)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="was called with compiled autograd"):
        run(model)
    loss, expected = (m(batch()).pow(2).sum() for m in (model, plain))
    loss.backward()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, expected))
    check_at_rest(model)
