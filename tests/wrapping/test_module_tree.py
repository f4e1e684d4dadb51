"""module_tree.py: wrappers in the tree of modules, and names."""

from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.wrapping.module_tree import own_modules
from tests.ranks import device, on_ranks


@on_ranks(2)
def test_names_are_as_before_wrapping():
    inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(device())
    model = FSDP(nn.Sequential(FSDP(inner)))
    assert [name for name, _ in model.named_parameters()] == ["0._flat_param"]
    assert [name for name, _ in model.named_buffers()] == [
        "0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked",
    ]  # fmt: skip


@on_ranks(2)
def test_units_know_their_names_and_those_around_them():
    inner = FSDP(nn.Linear(2, 2).to(device()))
    assert inner._unit.label == "<root>"
    middle = FSDP(nn.Sequential(inner, nn.Linear(2, 2).to(device())))
    outer = FSDP(nn.Sequential(middle))
    assert [unit.name for unit in outer.engine.units] == ["", "0", "0.0"]
    assert inner._unit.ancestors == [outer._unit, middle._unit]


@on_ranks(1)
def test_what_is_inside_of_a_wrapper_is_not_its_surroundings():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, FSDP(nn.Linear(2, 2).to(device()))), shared)
    assert own_modules(model) == {"": model, "0": model[0], "0.0": shared}
