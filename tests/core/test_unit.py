"""unit.py: two tensors, and reasons to keep the second."""

import gc
import weakref

import pytest
import torch
from torch import nn

from minifsdp.core.shard import Chunks
from minifsdp.core.unit import ParamInfo, Unit


class Group:
    """Stands for the ranks that share a unit."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


def unit_of(module, rank=0, size=2, reshards=True):
    infos = [ParamInfo(n, p.shape, [(module, n)]) for n, p in module.named_parameters()]
    layout = Chunks([info.shape for info in infos], size)
    return Unit(module, infos, layout, Group(rank, size) if size > 1 else None, None, reshards)


def linear():
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(4.0).view(2, 2))
        module.bias.copy_(torch.tensor([4.0, 5.0]))
    return module


def test_each_rank_keeps_its_part():
    shards = [unit_of(linear(), rank, 4) for rank in range(4)]
    found = [unit.sharded_flat_param.tolist() for unit in shards]
    assert found == [[0, 1], [2, 3], [4, 5], []]  # padding is nobody's parameter
    assert [unit.padded_shard.tolist() for unit in shards] == [[0, 1], [2, 3], [4, 5], [0, 0]]
    assert shards[0].unsharded.data.shape == (8,) and shards[0].numel == 6


def test_the_unsharded_parameter_has_no_memory_until_it_is_needed():
    unit = unit_of(linear())
    assert unit.unsharded.needs_unshard and unit.unsharded.storage.size() == 0
    whole = unit_of(linear(), size=1)
    assert not whole.unsharded.needs_unshard
    assert whole.unsharded.data.data_ptr() == whole.padded_shard.data_ptr()


def test_it_is_freed_when_the_last_reason_is_gone():
    unit, freed = unit_of(linear()), []
    unit.free = freed.append
    unit.hold("a")
    unit.hold("b")
    unit.hold("b")  # a set, not a count
    unit.let_go("b", "c")
    assert freed == [] and unit.reasons == {"a"}
    unit.let_go("a")
    assert freed == [unit]
    unit.let_go("a")  # there was none
    assert freed == [unit]


def test_where_an_exception_ends_it_a_unit_is_freed_by_who_lets_go_next():
    def ends(unit):
        raise KeyboardInterrupt

    unit, freed = unit_of(linear()), []
    unit.hold("a")
    unit.free = ends
    with pytest.raises(KeyboardInterrupt):
        unit.let_go("a")
    unit.free = freed.append
    unit.let_go("b")
    assert freed == []
    unit.let_go("a")
    assert freed == [unit] and not unit.reasons


def test_a_gradient_is_announced_to_whoever_asks():
    unit, told = unit_of(linear(), size=1), []
    unit.on_gradient = lambda: told.append(unit.unsharded.flat_param.grad)
    unit.unsharded.flat_param.sum().backward()
    assert len(told) == 1
    frozen = unit_of(linear().requires_grad_(False))
    assert frozen.unsharded.grad_accumulator is None
    assert not frozen.sharded_flat_param.requires_grad


def test_autograd_does_not_keep_it():
    unit = unit_of(linear(), size=1)
    loss, weak = unit.unsharded.flat_param.sum(), weakref.ref(unit)
    del unit
    gc.collect()
    assert weak() is None
    loss.backward()  # and nobody is told


def test_names():
    unit = unit_of(linear())
    assert (unit.name, unit.label) == ("", "<root>")
    unit.rename("blocks.0")
    assert unit.label == "'blocks.0'"
    assert unit.describe() == "unit of 6 parameters, sharded over 2 ranks"
    assert unit_of(linear(), size=1).describe().endswith("over 1 rank")
    assert unit.is_limited and not unit_of(linear(), reshards=False).is_limited
