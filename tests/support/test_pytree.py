"""pytree.py: whatever a module takes or returns, with other tensors."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from minifsdp.core.outputs import tensors_in
from minifsdp.support.pytree import map_tensors
from tests.core.test_outputs import Compact, Pair, Plain, Record, T


@dataclass(frozen=True)
class Frozen:
    value: object
    name: str = "frozen"


class Output(OrderedDict):
    """As in transformers: a dict that is set item by item and no other way."""

    def update(self, *args, **kwargs):
        raise TypeError("no update here")


def plus_one(tensor):
    return tensor + 1


@pytest.mark.parametrize("nest", [
    T, (1, T), [[T], "x"], {"a": {"b": T}, "c": 3}, OrderedDict(x=(T,)), defaultdict(list, x=T),
    Pair(None, [T]), Record([T], "text"), Compact({"k": T}), Frozen(T), Output(x=T),
], ids=lambda nest: type(nest).__name__)  # fmt: skip
def test_a_tensor_is_replaced_and_all_around_it_is_of_its_kind(nest):
    result = map_tensors(plus_one, nest)
    assert type(result) is type(nest)
    assert [int(tensor) for tensor in tensors_in(result)] == [1]
    assert [id(tensor) for tensor in tensors_in(nest)] == [id(T)]  # as it was
    assert str(result) == str(nest).replace("tensor([0.])", "tensor([1.])")


@pytest.mark.parametrize("nest", [
    None, 3, "text", [], {}, (1, [2]), Pair(1, 2), Record(3), Frozen(()), Record, nn.Linear(1, 1),
    torch.Size([1]), Plain(T), {T}, UserDict(x=T),
], ids=lambda nest: type(nest).__name__)  # fmt: skip
def test_what_has_nothing_to_replace_is_the_same_object(nest):
    assert map_tensors(plus_one, nest) is nest


@pytest.mark.parametrize("nest", [T, (1, T), [[T]], {"a": T}, Pair(None, [T]), Record([T])])
def test_what_stays_as_it_is_is_not_copied(nest):
    assert map_tensors(lambda tensor: tensor, nest) is nest


def test_what_is_inside_of_itself_is_replaced_once():
    record = Record(T)
    record.more = [record, T]
    result = map_tensors(plus_one, record)
    assert int(result.value) == int(result.more[1]) == 1
    assert result.more[0] is record and record.value is T


def test_one_object_in_two_places_is_replaced_in_both():
    part = [T]
    assert map_tensors(plus_one, (part, part)) == ([T + 1], [T + 1])


def test_the_batch_sizes_of_a_packed_sequence_stay_where_an_rnn_wants_them():
    packed = pack_sequence([torch.zeros(2, 4), torch.zeros(3, 4)], enforce_sorted=False)
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert type(moved) is type(packed) and moved.batch_sizes is packed.batch_sizes
    assert moved.data.is_meta and moved.sorted_indices.is_meta and moved.unsorted_indices.is_meta
