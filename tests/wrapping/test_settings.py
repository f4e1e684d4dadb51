"""settings.py: what the arguments mean."""

import inspect
import re
from copy import deepcopy
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ShardingStrategy, always_wrap_policy
from minifsdp.wrapping.settings import Settings, as_device
from tests.ranks import device, on_ranks


def test_device_id_is_a_number_a_name_or_a_device():
    assert as_device(None) is None
    for given in ("cpu", "cpu:0", torch.device("cpu")):
        assert as_device(given) == torch.device("cpu")
    with (
        patch.object(torch.cuda, "device_count", lambda: 4),
        patch.object(torch.cuda, "current_device", lambda: 2),
    ):
        for given in (1, "cuda:1", torch.device("cuda", 1)):
            assert as_device(given) == torch.device("cuda", 1)
        for given in ("cuda", torch.device("cuda")):
            assert as_device(given) == torch.device("cuda", 2)


@pytest.mark.parametrize("given, match", [
    (torch.cuda.device_count(), f"torch sees {torch.cuda.device_count()} of them on this machine"),
    (f"cuda:{torch.cuda.device_count()}", "use device_id='cpu' or leave it out"),
    ("meta", "device_id='meta': minifsdp runs on cpu and cuda"),
    ("mps", "device_id='mps': minifsdp runs on cpu and cuda"),
])  # fmt: skip
def test_a_device_that_is_not_there_is_refused(given, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        as_device(given)


@pytest.mark.parametrize("argument, value, match", [
    ("mixed_precision", torch.distributed.fsdp.MixedPrecisionPolicy(), r"minifsdp\.MixedPrec"),
    ("mixed_precision", torch.bfloat16, r"minifsdp\.MixedPrecision, not torch\.dtype"),
    ("cpu_offload", True, r"minifsdp\.CPUOffload, not builtins.bool: True"),
    ("cpu_offload", False, r"minifsdp\.CPUOffload, not builtins.bool: False"),
    ("param_init_fn", True, "a function of a module, not True"),
    ("limit_all_gathers", None, "limit_all_gathers=None: expected True"),
    ("limit_all_gathers", "2", "limit_all_gathers='2': expected True"),
])  # fmt: skip
@pytest.mark.parametrize("policy", [None, always_wrap_policy])
@on_ranks(1)
def test_what_is_of_another_type_is_refused_before_anything_changes(argument, value, match, policy):
    model = nn.Sequential(nn.Linear(2, 2)).to(device())
    weight = model[0].weight
    with pytest.raises(TypeError, match=f"{argument} is {match}" if "a f" in match else match):
        FSDP(model, auto_wrap_policy=policy, **{argument: value})
    assert type(model[0]) is nn.Linear and model[0].weight is weight


@on_ranks(2)
def test_torchs_environment_variable_asks_for_full_precision_in_evaluation():
    x, layer = torch.randn(3, 4).to(device()), nn.Linear(4, 4).to(device())
    exact = layer(x).detach()
    for value, same in (("1", True), ("0", False)):
        with patch.dict("os.environ", {"FSDP_USE_FULL_PREC_IN_EVAL": value}):
            low = MixedPrecision(param_dtype=torch.bfloat16)
            model = FSDP(nn.Sequential(deepcopy(layer)), mixed_precision=low)
        with torch.no_grad():
            assert model(x).dtype is torch.bfloat16
            assert (model.eval()(x).dtype is torch.float32) is same
            assert torch.equal(model(x), exact) is same


def test_the_arguments_are_listed_as_the_wrapper_has_them():
    """One list is left beside the signature, and a wrapper passes it on by position."""
    names = [field.name for field in fields(Settings)]
    assert set(names) < set(inspect.signature(FSDP.__init__).parameters)


@on_ranks(2)
def test_inner_wrappers_get_the_arguments_as_they_were_given():
    mesh = init_device_mesh(device().type, (1, 2))
    given = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    settings = Settings(**given)
    assert settings.arguments.items() >= given.items()
    assert settings.arguments["process_group"] is settings.arguments["mixed_precision"] is None
    assert settings.placement == Settings(**settings.arguments).placement
