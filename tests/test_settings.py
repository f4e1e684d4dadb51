"""settings.py: what the arguments mean."""

import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.settings import as_device
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


@on_ranks(1)
def test_torchs_own_mixed_precision_is_refused_by_name():
    theirs = torch.distributed.fsdp.api.MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"is a minifsdp\.MixedPrecision, not torch\.distributed\."):
        FSDP(nn.Linear(2, 2).to(device()), mixed_precision=theirs)
