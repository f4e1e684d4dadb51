"""featured_hooks.py: a module may be called while parameters are out between steps."""

import threading

import pytest
import torch

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.unit_state import ShardedState
from tests.ranks import on_ranks
from tests.small import batch, stack, step


@on_ranks(2)
def test_a_module_that_has_its_parameters_just_runs():
    model = stack()
    step(model)
    with torch.no_grad():
        expected = model(batch())
        with FSDP.summon_full_params(model):
            gathers = model.engine.stats.all_gathers
            assert torch.equal(model(batch()), expected)
            assert model.engine.stats.all_gathers == gathers


@on_ranks(2)
def test_a_module_whose_parameters_are_not_out_is_gathered_for_its_forward_and_for_no_step():
    model = stack()
    step(model)
    engine, hooks = model.engine, model._hooks
    order = engine.prefetcher.pre_forward_order
    with torch.no_grad():
        expected = model(batch())
        before, training = [*order.current], engine.units[1].state.training
        with FSDP.summon_full_params(model, recurse=False):
            assert torch.equal(model(batch()), expected)
            assert hooks.calls == [] and hooks.idle
            assert order.current == before and engine.units[1].state.training is training
            root, *inner = (unit.state.sharded for unit in engine.units)
            assert root is ShardedState.UNSHARDED and set(inner) == {ShardedState.SHARDED}
    step(model)


@pytest.mark.parametrize("recurse", [True, False])
@on_ranks(2)
def test_an_error_in_a_module_leaves_what_is_out_as_it_was(recurse):
    def fail(*_):
        raise ZeroDivisionError

    model = stack()
    handle = model.module[1].register_forward_pre_hook(fail)
    with FSDP.summon_full_params(model, recurse=recurse), torch.no_grad():
        before = {name: param.clone() for name, param in model.named_parameters()}
        with pytest.raises(ZeroDivisionError):
            model(batch())
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    handle.remove()
    step(model)


@on_ranks(2)
def test_a_backward_is_refused_and_what_is_out_stays():
    model = stack()
    loss = model(batch()).sum()
    with FSDP.summon_full_params(model):
        before = {name: param.clone() for name, param in model.named_parameters()}
        with pytest.raises(RuntimeError, match=r"backward\(\) was called inside summon_full"):
            loss.backward()
        assert model._hooks.backward.complete  # it never began, so the next step drops nothing
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    step(model)


@pytest.mark.parametrize("goes_on", [step, FSDP.state_dict], ids=["a step", "a checkpoint"])
@on_ranks(2)
def test_after_a_failure_a_program_goes_on_though_autograd_lets_go_late(goes_on):
    """On a GPU its own thread does, when the program has been told already."""
    model, kept = stack(), []
    handle = model.module[2].register_full_backward_hook(
        lambda *_: (kept.append(model._hooks.backward.queued()), 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        model(batch()).sum().backward()
    handle.remove()
    assert kept, "it is not over for autograd"
    lets_go = threading.Timer(0.02, kept.clear)
    lets_go.start()
    goes_on(model)
    lets_go.join()
    assert not model._hooks.backward.running_anywhere
