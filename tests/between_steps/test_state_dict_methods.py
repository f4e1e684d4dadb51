"""state_dict_methods.py: FSDP1's names, called as scripts call them."""

import torch

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import StateDictType
from tests.ranks import on_ranks
from tests.small import stack, step

SHARDED = StateDictType.SHARDED_STATE_DICT


@on_ranks(2)
def test_with_the_class_and_with_the_model():
    model = stack(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    for place in (FSDP, model):
        with place.state_dict_type(model, SHARDED):
            assert place.get_state_dict_type(model).state_dict_type is SHARDED
            state = place.optim_state_dict(model, optimizer)
            assert set(state["state"]) == set(model.state_dict())
            optimizer.load_state_dict(place.optim_state_dict_to_load(model, optimizer, state))
        before = place.set_state_dict_type(model, SHARDED)
        assert place.set_state_dict_type(model, before.state_dict_type) is not before
