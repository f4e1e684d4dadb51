"""unsupported.py: what torch has and minifsdp has not says so."""

import inspect

import pytest
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.algorithms.join import Join

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import fully_shard
from minifsdp.checks.unsupported import MISSING
from tests.ranks import device, on_ranks
from tests.small import (
    stack,
)

NEW_IN_FSDP2 = {"get_cls_to_fsdp_cls", "disable_fsdp_module_new_init"}


METHODS = [name for name in vars(theirs.FullyShardedDataParallel) if not name.startswith("_")]


@pytest.mark.parametrize("name", theirs.__all__)
def test_every_name_of_torchs_can_be_imported(name):
    if name not in NEW_IN_FSDP2 or name in MISSING:
        exec(f"from minifsdp import {name}")


USES = {
    "call": lambda name: name(offload_to_cpu=True),
    "a member": lambda name: name.FULL_STATE_DICT,
    "an item": lambda name: name["PARAM_NAME"],
    "all members": list,
    "contains": lambda name: 1 in name,
    "a subclass": lambda name: type("Mine", (name,), {}),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MISSING)
def test_a_name_that_is_not_there_yet_says_so_when_it_is_used(name, use):
    with pytest.raises(NotImplementedError, match=rf"minifsdp\.{name}.* is not there yet"):
        USES[use](getattr(minifsdp, name))


def test_a_name_that_is_not_there_yet_may_be_named():
    kind = minifsdp.LocalStateDictConfig
    assert (
        kind is minifsdp.LocalStateDictConfig and kind
    )  # the same in every module that imports it
    assert not isinstance(3, kind) and repr(kind | None).startswith("minifsdp.LocalStateDictConfig")
    assert inspect.isclass(kind) and not hasattr(kind, "offload_to_cpu")


def test_other_names_are_just_not_there():
    assert not hasattr(minifsdp, "Nonsense")
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = minifsdp.Nonsense


@pytest.mark.parametrize("value", [print, [nn.Linear(2, 2)], {"dp": 0}, True, 3, iter([])])
@on_ranks(1)
def test_what_is_not_there_yet_says_so(value):
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=r"(?s)stream.* is not there yet"):
        model.set_all_reduce_hook(print, stream=value)


@pytest.mark.parametrize("value", [None, False, (), [], {}, set()])
@on_ranks(1)
def test_what_asks_for_nothing_is_taken(value):
    fully_shard(nn.Linear(2, 2), shard_placement_fn=value, dp_mesh_dims=value)


@pytest.mark.parametrize("place", [theirs.fully_sharded_data_parallel, theirs.api, theirs.wrap])
def test_every_name_of_torchs_modules_can_be_imported(place):
    """As from_torch.md's sed changes the imports of a script."""
    names = [*place.__all__, "_or_policy"] if place is theirs.wrap else place.__all__
    exec(f"from minifsdp import {', '.join(names)}")
    from minifsdp import wrap

    assert wrap is minifsdp.wrapping.policies.wrap  # and not a module of torch's


@pytest.mark.parametrize("name", METHODS)
@on_ranks(1)
def test_every_method_of_torchs_is_there(name):
    assert hasattr(FSDP, name) and callable(getattr(stack(), name))


@pytest.mark.parametrize("wrap", [FSDP, fully_shard])
@on_ranks(2)
def test_join_is_refused_and_says_what_to_do(wrap):
    model = wrap(nn.Linear(2, 2).to(device()))
    with pytest.raises(NotImplementedError, match=r"Join .* same number of steps.*drop_last=True"):
        Join([model])
