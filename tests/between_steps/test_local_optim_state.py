"""local_optim_state.py: what this rank's optimizer gets of a state under names.

(That it is the state of the plain model is in test_optim_state_dict.py and
test_older_optim_state.py.)
"""

import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps import local_optim_state
from minifsdp.between_steps.local_optim_state import group_settings, local_state
from tests.between_steps.test_state_dict_type import IN_ROWS, trained
from tests.patience import Patience
from tests.ranks import device, on_ranks
from tests.small import Scaled, layers, step


def groups(**settings):
    """Groups by the letters of their parameters: groups(ab=0.1, c=0.2)."""
    return [{"params": list(names.strip("_")), "lr": lr} for names, lr in settings.items()]


@pytest.mark.direct
def test_groups_get_the_settings_of_their_parameters():
    given = {"state": {}, "param_groups": groups(ab=0.1, c=0.2)}
    assert group_settings("abc", groups(ab=1, c=1), given) == [{"lr": 0.1}, {"lr": 0.2}]
    assert group_settings("cba", groups(c=1, b=1, a=1), given) == [
        {"lr": 0.2}, {"lr": 0.1}, {"lr": 0.1},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'b' and 'c' are in one parameter group"):
        group_settings("abc", groups(a=1, bc=1), given)
    with pytest.raises(ValueError, match=r"has parameter 'd', .* has 3 parameters, a, b, c"):
        group_settings("abcd", groups(ab=1, cd=1), given)
    unknown = {**given, "state": {"d": {"step": 1}}}  # a state without a group is a state
    assert group_settings("abd", groups(ab=1, d=1), unknown) == [{"lr": 0.1}, {}]
    assert group_settings("abc", groups(ab=1, c=1), {"state": {}}) == [{}, {}]


@pytest.mark.direct
def test_groups_without_parameters_are_taken_in_turn():
    given = {"state": {}, "param_groups": groups(_=0.1, a=0.2, __=0.3)}
    own = groups(_=1, __=1, a=1)
    assert group_settings("a", own, given) == [{"lr": 0.1}, {"lr": 0.3}, {"lr": 0.2}]
    assert group_settings("a", groups(a=1, _=1), given) == [{"lr": 0.2}, {}]  # which of the two?


@IN_ROWS
@on_ranks(2)
def test_only_the_first_rank_ever_has_a_whole_state(in_rows):
    model, optimizer = trained(use_orig_params=in_rows)
    whole = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    given = whole if dist.get_rank() == 0 else None
    received, alive = [], []
    receive = local_optim_state._received

    def noted(value, unit):
        found = receive(value, unit)
        received.append(value.is_meta)
        alive.append(found.untyped_storage()._weak_ref())
        return found

    with patch.object(local_optim_state, "_received", noted):
        found = local_state(model, optimizer.param_groups, given, from_first=True)
    assert received and all(meta is (dist.get_rank() == 1) for meta in received)
    expired, patience = torch.UntypedStorage._expired, Patience(10)
    while not all(map(expired, alive)) and patience.left:
        time.sleep(0.001)  # the thread of gloo's that has sent the last one lets go of it
        patience.count()
    assert all(map(expired, alive))
    for storage in alive:
        torch.UntypedStorage._free_weak_ref(storage)
    assert set(found["state"]) == {*range(len([*model.parameters()]))}


@on_ranks(2)
def test_what_is_divided_is_taken_from_each_rank_even_if_the_first_is_to_send():
    model, optimizer = trained(use_orig_params=True)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    found = local_state(model, optimizer.param_groups, sharded, from_first=True)
    for entry, own in zip(found["state"].values(), optimizer.state.values(), strict=True):
        # torch's default for what is sharded is to save it from the host.
        assert torch.equal(entry["exp_avg"].to_local(), own["exp_avg"].to_local().cpu())


@on_ranks(2)
def test_a_number_for_a_parameter_without_dimensions_stays_one():
    model = FSDP(Scaled(6, 6).to(device()))
    optimizer = torch.optim.NAdam(model.parameters())
    step(model)
    optimizer.step()
    given = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    found = local_state(model, optimizer.param_groups, given, from_first=False)
    (own,), (entry,) = optimizer.state.values(), found["state"].values()
    assert entry.keys() == own.keys() and entry["mu_product"].dim() == 0
    assert all(torch.equal(entry[key], own[key]) for key in own)


@on_ranks(1)
def test_a_plain_model_gets_a_plain_state():
    model = layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model(torch.ones(2, 6, device=model[0].weight.device)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    own = optimizer.state_dict()
    given = {"state": dict(zip(names, own["state"].values(), strict=True)),
             "param_groups": [{"lr": 0.5, "params": names}]}  # fmt: skip
    found = local_state(model, optimizer.param_groups, given, from_first=True)
    assert found["param_groups"] == [{**own["param_groups"][0], "lr": 0.5}]
    for number, entry in own["state"].items():
        buffer = found["state"][number]["momentum_buffer"]
        assert torch.equal(buffer, entry["momentum_buffer"])
        assert buffer is not entry["momentum_buffer"]
    named = local_state(model, optimizer.param_groups, given, from_first=False, named=True)
    assert list(named["state"]) == names and named["param_groups"][0]["params"] == names
    strange = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match=r"a parameter of shape \[2, 2\] that is not one of"):
        local_state(model, [{"params": [strange.weight]}], given, from_first=False)
