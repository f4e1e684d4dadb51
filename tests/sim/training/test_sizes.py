"""sim/training/sizes.py: as their sources have them."""

import pytest

from minifsdp.sim.training.presets import FAMILIES
from minifsdp.sim.training.sizes import SIZES


@pytest.mark.parametrize("name", SIZES)
def test_each_has_a_family_and_heads_that_share_its_width(name):
    family, (width, _, heads, *_) = SIZES[name]
    assert family in FAMILIES
    assert width % heads == 0 and width // heads in (64, 80, 96, 128)


def test_bigger_names_are_bigger_models():
    for family in ("gpt", "mpt", "llama2", "llama3"):
        its = [sizes for name, (_, sizes) in SIZES.items() if name.startswith(family)]
        products = [width * width * layers for width, layers, *_ in its]
        assert products == sorted(products) and len(its) > 1


def test_only_llamas_largest_and_its_third_version_share_keys():
    shared = {name for name, (family, s) in SIZES.items() if family == "llama" and s[3] < s[2]}
    assert shared == {"llama2-34b", "llama2-70b", "llama3-8b", "llama3-70b"}
