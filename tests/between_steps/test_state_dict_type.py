"""state_dict_type.py: state dicts by the names of torch's FSDP1."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from minifsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import on_ranks
from tests.small import stack, step

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
ON_THE_FIRST = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
IN_ROWS = pytest.mark.parametrize("in_rows", [False, True])


def trained(steps=2, blocks=2, **settings):
    model = stack(blocks, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for at in range(steps):
        step(model, at)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@IN_ROWS
@on_ranks(2)
def test_a_sharded_state_dict_has_the_rows_of_each_rank(in_rows):
    model, _ = trained(use_orig_params=in_rows)
    full = model.state_dict()
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
        assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
    assert list(state) == list(full)
    for name, value in state.items():
        assert isinstance(value, DTensor) and value.to_local().shape[0] == 3
        assert torch.equal(value.full_tensor(), full[name])


@IN_ROWS
@on_ranks(2)
def test_a_full_one_for_the_first_rank_only(in_rows):
    model, optimizer = trained(use_orig_params=in_rows)
    model.module.register_buffer("buffer", torch.ones(2))
    full = model.state_dict()
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, FULL, ON_THE_FIRST, config):
        state, of_optimizer = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        assert list(state) == list(full) and "buffer" in state
        assert all(torch.equal(state[name], full[name].cpu()) for name in full)
        assert len(of_optimizer["state"]) == len(state) - 1
    else:
        assert not state and not of_optimizer


@pytest.mark.parametrize("strict", [True, False])
@IN_ROWS
@on_ranks(2)
def test_a_sharded_load_says_what_is_missing(in_rows, strict):
    model, _ = trained(use_orig_params=in_rows)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with FSDP.state_dict_type(model, SHARDED):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    state["other"] = state.pop("1.0.bias")
    if strict:
        with pytest.raises(RuntimeError, match=r'(?s)Missing.*"1\.0\.bias".*Unexpected.*"other"'):
            model.load_state_dict(state)
    else:
        assert model.load_state_dict(state, strict=False).missing_keys == ["1.0.bias"]
    after = model.state_dict()
    assert torch.equal(after["1.0.bias"], before["1.0.bias"])
    assert not after["1.0.weight"].any()
    step(model)


@IN_ROWS
@on_ranks(2)
def test_whole_and_divided_values_may_be_mixed(in_rows):
    model, _ = trained(use_orig_params=in_rows)
    expected = model.state_dict()
    with FSDP.state_dict_type(model, SHARDED):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    state["0.weight"] = state["0.weight"].full_tensor()
    state["1.0.weight"] = state["1.0.weight"].redistribute(placements=[Replicate()])
    other, _ = trained(steps=0, use_orig_params=in_rows)
    other.load_state_dict(state)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


@on_ranks(2)
def test_settings_are_those_of_a_model_and_of_a_block():
    model = stack(2)
    before = FSDP.set_state_dict_type(model[1], SHARDED, ShardedStateDictConfig())
    assert before.state_dict_type is FULL
    kinds = {name: type(value) for name, value in model.state_dict().items()}
    assert kinds["1.0.weight"] is DTensor and kinds["2.0.weight"] is torch.Tensor
    with FSDP.state_dict_type(model, FULL):
        assert not any(isinstance(value, DTensor) for value in model.state_dict().values())
    kinds = {name: type(value) for name, value in model.state_dict().items()}
    assert kinds["1.0.weight"] is DTensor and kinds["2.0.weight"] is torch.Tensor


# --------------------------------------------------------------------------------- what is refused


@on_ranks(1)
def test_local_state_dicts_and_wrong_configs_are_refused():
    model = stack(1)
    with pytest.raises(NotImplementedError, match="LOCAL_STATE_DICT"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(ValueError, match="takes a ShardedStateDictConfig, not a FullStateDict"):
        FSDP.set_state_dict_type(model, SHARDED, FullStateDictConfig())
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
