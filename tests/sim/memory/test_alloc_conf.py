"""sim/memory/alloc_conf.py: the options are those of torch, and so are their limits."""

import pytest
import torch

from minifsdp.sim.__main__ import main
from minifsdp.sim.memory.alloc_conf import DEFAULTS, AllocConf, MiB, parse
from tests.sim.test_main import SMALL

GOOD = {
    "": DEFAULTS,
    "expandable_segments:True": AllocConf(expandable_segments=True),
    "expandable_segments:True,expandable_segments:False": DEFAULTS,
    "max_split_size_mb:20": AllocConf(max_split_size=20 * MiB),
    " max_split_size_mb : 512 ": AllocConf(max_split_size=512 * MiB),
    "garbage_collection_threshold:0.8": AllocConf(garbage_collection_threshold=0.8),
    "garbage_collection_threshold:.6,max_split_size_mb:128,expandable_segments:False": AllocConf(
        False, 128 * MiB, 0.6
    ),
}
BAD = {
    "expandable_segments:true": "option is expandable_segments:True or False, not",
    "expandable_segments:1": "option is expandable_segments:True or False, not",
    "max_split_size_mb:19": "option is max_split_size_mb:MiB, a whole number from 20 on, not",
    "max_split_size_mb:many": "option is max_split_size_mb:MiB, a whole number from 20 on, not",
    "max_split_size_mb:1.5": "option is max_split_size_mb:MiB, a whole number from 20 on, not",
    "max_split_size_mb": "option is max_split_size_mb:MiB",
    "garbage_collection_threshold:0": "option is garbage_collection_threshold:a share between",
    "garbage_collection_threshold:1.0": "option is garbage_collection_threshold:a share between",
    "max_split_size_mb;100": "has no option 'max_split_size_mb;100'. There are expandable_seg",
}
TORCH_FORGIVES = {
    "max_split_size_mb:100x": "not 'max_split_size_mb:100x'",
    "max_split_size_mb:-1": "not 'max_split_size_mb:-1'",
    "max_split_size_mb:100,": "has no option ''",
}


@pytest.fixture
def torchs():
    """torch's own parser. What it reads counts for GPUs alone, of which tests here use none."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("torch 2.11 has no such parser for other devices than GPUs")
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("text", GOOD)
def test_what_torch_takes(text, torchs):
    torchs(text)
    assert parse(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_what_torch_refuses_is_refused_in_words(text, torchs):
    with pytest.raises((ValueError, RuntimeError)):
        torchs(text)
    with pytest.raises(ValueError) as error:
        parse(text)
    assert BAD[text] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", TORCH_FORGIVES)
def test_what_torch_takes_for_something_else_is_refused(text, torchs):
    torchs(text)
    with pytest.raises(ValueError, match=TORCH_FORGIVES[text]):
        parse(text)


def test_an_unknown_option_is_refused():
    """torch refuses it where it was built for GPUs, and elsewhere takes it for another device's."""
    with pytest.raises(ValueError, match="has no option 'max_split:100'"):
        parse("max_split:100")


def test_from_the_shell(capsys):
    assert main([*SMALL, "--alloc", "expandable_segments:True"]) == 0
    assert main([*SMALL, "--alloc", "expandable:True"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the allocator has no option 'expandable:True'. There are expandable_segments:" in line
    assert "max_split_size_mb:MiB" in line and "garbage_collection_threshold:a share" in line
