"""checkpoint_calls.py: what torch.distributed.checkpoint writes into a state dict is loaded."""

import copy
import io
from collections import OrderedDict
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import ShardingStrategy, as_dtensors
from tests.ranks import on_ranks
from tests.small import stack


@contextmanager
def counted_gathers(model):
    """A list with the number of all-gathers in the block."""
    before, counts = model.engine.stats.all_gathers, []
    yield counts
    counts.append(model.engine.stats.all_gathers - before)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@on_ranks(2)
def test_what_a_distributed_checkpoint_writes_into_a_state_dict_reaches_the_model(
    strategy, tmp_path
):
    """As with a plain module, whose state_dict() has its own tensors."""
    import torch.distributed.checkpoint as dcp

    model = stack(sharding_strategy=strategy)
    saved = model.state_dict()
    if dist.get_rank() == 0:  # ranks that save together need NumPy
        dcp.save({"model": saved}, checkpoint_id=tmp_path, no_dist=True)
    dist.barrier()
    if dist.get_rank() == 0:
        dcp.save({**saved, "step": torch.tensor(3)}, checkpoint_id=tmp_path / "1", no_dist=True)
    dist.barrier()
    for how in ("a dict of dicts", "a module", "the dict itself"):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        state = model.state_dict()
        if how == "the dict itself":
            state["step"] = torch.tensor(0)  # with something of the program's beside it
            with counted_gathers(model) as gathers:
                dcp.load(state, checkpoint_id=tmp_path / "1", no_dist=True)
            assert state["step"] == 3
            with counted_gathers(model) as of_one_load:
                model.load_state_dict(saved)
            assert gathers == of_one_load  # not one for each entry
        else:
            value = model if how == "a module" else state
            dcp.load({"model": value}, checkpoint_id=tmp_path, no_dist=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved[name])


@on_ranks(2)
def test_torchs_function_gets_dtensors():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

    model = stack()
    state, whole = get_model_state_dict(model), model.state_dict()
    assert list(state) == list(whole)
    for name, value in state.items():
        assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), whole[name])


@on_ranks(2)
def test_to_anybody_else_it_is_a_dict_as_any_other():
    state = stack().state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for other in (copy.deepcopy(state), torch.load(file, weights_only=True)):
        assert type(other) is OrderedDict and list(other) == list(state)
        assert other._metadata == state._metadata and len(state._metadata) > 1


@pytest.mark.parametrize("inside", [False, True], ids=["root", "below another module"])
@pytest.mark.parametrize("option", ["full_state_dict", "broadcast_from_rank0"])
@on_ranks(2)
def test_whole_values_are_not_dealt_out_to_flat_parameters(option, inside):
    from torch.distributed.checkpoint import state_dict as dsd

    model = nn.Sequential(stack()) if inside else stack()
    whole = dsd.StateDictOptions(full_state_dict=True)
    options = dsd.StateDictOptions(**{"full_state_dict": True, option: True})
    state = dsd.get_model_state_dict(model, options=whole)
    new = {name: value + 1 for name, value in state.items()}
    mine = new if option == "full_state_dict" or dist.get_rank() == 0 else {}
    with pytest.raises(NotImplementedError, match="as_dtensors"):
        dsd.set_model_state_dict(model, dict(mine), options=options)
    with as_dtensors(model):  # here they are dealt out to DTensors
        dsd.set_model_state_dict(model, dict(mine), options=options)
    found = dsd.get_model_state_dict(model, options=whole)
    assert all(torch.equal(found[name], new[name]) for name in new)
    dsd.set_model_state_dict(model, state)  # without these options each rank has all of them
    found = dsd.get_model_state_dict(model, options=whole)
    assert all(torch.equal(found[name], state[name]) for name in new)
