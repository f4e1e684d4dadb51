"""tensor_attribute.py: where a module has a parameter or a buffer."""

import torch
from torch import nn

from minifsdp.support.tensor_attribute import TensorAttribute


def test_a_parameter_and_a_buffer_are_read_and_replaced_where_the_module_has_them():
    norm = nn.BatchNorm1d(2)
    for name, kind in (("weight", norm._parameters), ("running_mean", norm._buffers)):
        attribute = TensorAttribute(norm, name)
        assert attribute.get() is getattr(norm, name)
        view = torch.zeros(2)  # no nn.Parameter, which torch would refuse to assign
        attribute.set(view)
        assert getattr(norm, name) is kind[name] is attribute.get() is view
    assert list(norm._parameters) == ["weight", "bias"]
    assert "running_mean" in norm.state_dict() and "weight" not in norm._buffers


def test_what_a_module_does_not_have_is_none():
    linear = nn.Linear(2, 2, bias=False)
    assert TensorAttribute(linear, "bias").get() is TensorAttribute(linear, "table").get() is None
    del linear.weight
    attribute = TensorAttribute(linear, "weight")
    assert attribute.get() is None
    attribute.set(nn.Parameter(torch.ones(2, 2)))
    assert [name for name, _ in linear.named_parameters()] == ["weight"]


def test_two_of_the_same_module_and_name_are_equal():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert TensorAttribute(first, "weight") in [TensorAttribute(first, "weight")]
    assert TensorAttribute(first, "weight") != TensorAttribute(second, "weight")
