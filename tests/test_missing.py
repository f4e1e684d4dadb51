"""missing.py: what torch has and minifsdp has not says so."""

import pytest
import torch.distributed.fsdp as theirs
from torch import nn

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import on_ranks
from tests.small import (
    stack,
)

NEW_IN_FSDP2 = {
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPMeshInfo", "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy", "UnshardHandle", "fully_shard", "register_fsdp_forward_method",
    "get_cls_to_fsdp_cls", "disable_fsdp_module_new_init", "share_comm_ctx", "ShardPlacementResult",
}  # fmt: skip


METHODS = [name for name in vars(theirs.FullyShardedDataParallel) if not name.startswith("_")]


@pytest.mark.parametrize("name", theirs.__all__)
def test_every_name_of_torchs_is_there_or_says_that_it_is_not(name):
    try:
        getattr(minifsdp, name)
    except NotImplementedError as error:
        assert f"minifsdp.{name} is not there yet" in str(error)
    except AttributeError:
        assert name in NEW_IN_FSDP2, name


def test_other_names_are_just_not_there():
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = minifsdp.Nonsense


@pytest.mark.parametrize(
    "argument, value", [("ignored_modules", []), ("use_orig_params", True), ("ignored_states", [])]
)
@on_ranks(1)
def test_what_is_not_there_yet_says_so(argument, value):
    with pytest.raises(NotImplementedError, match=f"{argument}.* is not there yet"):
        FSDP(nn.Linear(2, 2), **{argument: value})


@pytest.mark.parametrize("name", METHODS)
@on_ranks(1)
def test_every_method_of_torchs_is_there_or_says_that_it_is_not(name):
    model = stack()
    assert name in vars(FSDP), name
    if getattr(vars(FSDP)[name], "__qualname__", "").startswith("_not_there"):
        for owner in (model, FSDP):
            with pytest.raises(NotImplementedError, match=f"{name} is not there yet"):
                getattr(owner, name)()
