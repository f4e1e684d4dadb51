"""sim/training/sizes.py: as their sources have them."""

import pytest

from minifsdp.sim.training.presets import FAMILIES
from minifsdp.sim.training.sizes import FIELDS, NAMES, SIZES, sized


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


@pytest.mark.parametrize("name", SIZES)
def test_each_size_may_be_another_one(name):
    family, sizes = SIZES[name]
    assert len(sizes) == len(FIELDS[family]) and set(FIELDS[family]) <= set(NAMES)
    assert sized(name, {}) == SIZES[name]
    for at, field in enumerate(FIELDS[family]):
        other = sizes[at] // 2 if "heads" in field else 2 * sizes[at]
        keys = {"kv_heads": 4} if field == "heads" and family == "llama" else {}
        _, found = sized(name, {field: other, **keys})
        changed = [FIELDS[family][i] for i, size in enumerate(found) if size != sizes[i]]
        assert found[at] == other and set(changed) == {field, *keys}


def test_what_a_family_has_not_and_what_does_not_fit_together_is_refused():
    with pytest.raises(
        ValueError, match=r"^--kv-heads: gpt-7b has no such size; it has --width, --"
    ):
        sized("gpt-7b", {"kv_heads": 8})
    with pytest.raises(
        ValueError, match=r"^gpt-7b with heads 30: they have to divide its width, 40"
    ):
        sized("gpt-7b", {"heads": 30})
    with pytest.raises(
        ValueError, match=r"^llama2-7b with kv-heads 5: they have to divide its hea"
    ):
        sized("llama2-7b", {"kv_heads": 5})


def test_only_llamas_largest_and_its_third_version_share_keys():
    shared = {name for name, (family, s) in SIZES.items() if family == "llama" and s[3] < s[2]}
    assert shared == {"llama2-34b", "llama2-70b", "llama3-8b", "llama3-70b"}
