"""auto_wrap.py: which modules become units, and which parameters are whose."""

import pytest
from torch import nn

from minifsdp.core.auto_wrap import ModuleWrapPolicy, params_of_units, select, wrap_inside


class Block(nn.Sequential):
    pass


def nothing(item):
    return False


def model():
    return nn.Sequential(nn.Linear(2, 2), Block(nn.Linear(2, 2), Block(nn.Linear(2, 2))))


def test_inner_ones_come_first_and_the_root_is_not_asked_for():
    root = model()
    outer, inner = root[1], root[1][1]
    assert list(select(root, ModuleWrapPolicy({Block}), nothing)) == [inner, outer]
    assert list(select(outer, ModuleWrapPolicy({Block}), nothing)) == [inner]


def test_what_is_taken_is_not_asked_about():
    root, asked = model(), []
    assert not select(root, asked.append, {root[1]}.__contains__)
    assert asked == [root[0]]


def test_a_module_in_two_places_is_wrapped_before_both():
    inner = Block(nn.Linear(2, 2))
    first, second = Block(inner), Block(inner)
    root = nn.Sequential(first, second)
    assert list(select(root, ModuleWrapPolicy({Block}), nothing)) == [inner, first, second]


def test_each_parameter_is_in_the_innermost_unit_around_it():
    root = model()
    units = params_of_units(root, [root[1], root[1][1]], nothing)
    names = {module: [info.name for info in infos] for module, infos in units.items()}
    assert names == {
        root: ["0.weight", "0.bias"],
        root[1]: ["0.weight", "0.bias"],
        root[1][1]: ["0.weight", "0.bias"],
    }


def test_a_shared_parameter_has_one_place_in_its_unit_and_several_owners():
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    root[1].weight = root[0].weight
    infos = params_of_units(root, [], nothing)[root]
    assert [info.name for info in infos] == ["0.weight", "0.bias", "1.bias"]
    assert infos[0].owners == [(root[0], "weight"), (root[1], "weight")]


def test_a_module_in_two_places_is_one_owner():
    layer = nn.Linear(2, 2)
    (infos,) = params_of_units(nn.Sequential(layer, layer), [], nothing).values()
    assert [info.owners for info in infos] == [[(layer, "weight")], [(layer, "bias")]]


def test_a_parameter_of_two_units_is_refused():
    root = model()
    root[1][0].weight = root[0].weight
    with pytest.raises(ValueError, match=r"'0.weight' of 1 is in another unit as well.*smallest"):
        params_of_units(root, [root[1]], nothing)
    assert len(params_of_units(root, [], nothing)[root]) == 5


def test_a_unit_that_is_never_called_is_refused():
    class Pair(nn.ModuleList):
        pass

    root = nn.Sequential(Pair([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match=r"0 \(Pair\) has no forward"):
        params_of_units(root, [root[0]], nothing)
    with pytest.raises(ValueError, match=r"the root \(Pair\) has no forward"):
        params_of_units(root[0], [], nothing)


def test_a_module_that_was_taken_out_is_not_looked_into():
    root = model()
    root.head = nn.Linear(2, 2)
    root.head = None
    assert list(select(root, ModuleWrapPolicy({nn.Linear}), nothing)) == [
        root[0], root[1][0], root[1][1][0],
    ]  # fmt: skip
    assert len(params_of_units(root, [root[1]], nothing)[root]) == 2


def test_all_places_of_a_module_are_wrapped():
    layer = nn.Linear(2, 2)
    root = nn.Sequential(layer, nn.Sequential(layer), nn.ReLU())
    wrap_inside(root, {layer: {"inplace": True}}, lambda module, inplace: nn.ReLU(inplace))
    assert isinstance(root[0], nn.ReLU) and root[1][0] is root[0] and root[0].inplace
