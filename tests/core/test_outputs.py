"""outputs.py: the tensors in whatever a module returns."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from minifsdp.core.outputs import tensors_in


@dataclass
class Record:
    value: object
    more: object = None


@dataclass(slots=True)
class Compact:
    value: object


class Plain:
    def __init__(self, value):
        self.value = value


Pair = namedtuple("Pair", "first second")
T = torch.zeros(1)


@pytest.mark.parametrize("nest", [
    T, (1, T), [[T]], {"a": {"b": T}}, OrderedDict(x=(T,)), UserDict(x=T), Pair(None, [T]), {T},
    Record([T], "text"), Compact({"k": T}), Plain(Plain([T])), ((), {}, 0, None, "x", (T,)),
])  # fmt: skip
def test_a_tensor_is_found_wherever_it_is(nest):
    assert [id(tensor) for tensor in tensors_in(nest)] == [id(T)]


@pytest.mark.parametrize("nest", [None, 3, "text", b"x", [], {}, nn.Linear(1, 1), Plain, object()])
def test_where_there_is_none_none_is_found(nest):
    assert list(tensors_in(nest)) == []


def test_all_are_found_and_circles_end():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    circle = Plain([a])
    circle.value.append(circle)
    found = list(tensors_in(((circle, {"b": b}), {"k": Record(c)})))
    assert sorted(map(id, found)) == sorted(map(id, (a, b, c)))
