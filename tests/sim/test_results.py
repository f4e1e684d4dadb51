"""sim/results.py: what is remembered is what torch would say."""

import pytest
import torch

from minifsdp.core.outputs import tensors_in
from minifsdp.sim.calls import accesses
from minifsdp.sim.results import LARGE, Results

aten = torch.ops.aten


def on_meta(*shape, **settings):
    return torch.empty(*shape, device="meta", **settings)


def calls():
    """Operators, with what they are given; none is like another, though some look so."""
    x, y = on_meta(3, 4), on_meta(3, 4, dtype=torch.bfloat16)
    return {
        "plain": (aten.add.Tensor, (x, x), {}),
        "promoted": (aten.add.Tensor, (x, y), {}),
        "low": (aten.add.Tensor, (y, y), {}),
        "strided": (aten.add.Tensor, (x.t(), x.t()), {}),
        "scalar": (aten.add.Scalar, (on_meta(3, dtype=torch.long), 1), {}),
        "float": (aten.add.Scalar, (on_meta(3, dtype=torch.long), 1.0), {}),
        "keyword": (aten.sum.dim_IntList, (x, [0]), {}),
        "kept": (aten.sum.dim_IntList, (x, [0]), {"keepdim": True}),
        "cast": (aten._to_copy.default, (x,), {"dtype": torch.float64}),
        "several": (aten.native_layer_norm.default, (x, [4], None, None, 1e-5), {}),
        "list": (aten._foreach_add.Scalar, ([x, y], 1), {}),
        "new": (aten.empty.memory_format, ([5],), {"device": torch.device("meta")}),
    }


def ask(results, operation, args, kwargs):
    """As VirtualGpu does."""
    return results.of(operation, args, kwargs, *accesses(operation, args, kwargs))


def described(result):
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return type(result), [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def test_the_second_time_it_is_what_torch_says():
    results, expected = Results(), {name: op(*a, **k) for name, (op, a, k) in calls().items()}
    for _ in range(3):
        for name, (op, args, kwargs) in calls().items():
            assert described(ask(results, op, args, kwargs)) == described(expected[name]), name
    assert len(results._known) == len(expected)


@pytest.mark.parametrize("name", calls())
def test_torch_is_asked_once_and_each_time_there_is_new_memory(name):
    operation, args, kwargs = calls()[name]
    asked = []

    class Noted:
        _schema = operation._schema

        def __call__(self, *args, **kwargs):
            asked.append(name)
            return operation(*args, **kwargs)

    results, noted = Results(), Noted()
    made = [
        *tensors_in(
            [results.of(noted, args, kwargs, *accesses(operation, args, kwargs)) for _ in range(3)]
        )
    ]
    assert asked == [name]
    assert len({tensor.untyped_storage()._cdata for tensor in made}) == len(made)


def test_what_changes_or_shares_its_memory_is_not_remembered():
    results, x = Results(), on_meta(3, 4)
    for operation, args in [
        (aten.add_.Tensor, (x, x)),
        (aten.t.default, (x,)),
        (aten._unsafe_view.default, (x, [4, 3])),
        (aten.split.Tensor, (x, 2)),
    ]:
        for _ in range(2):
            first, *_ = tensors_in([ask(results, operation, args, {})])
            assert first.untyped_storage()._cdata == x.untyped_storage()._cdata
    for _ in range(2):
        assert ask(results, aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}).tolist() == [2, 2]
    assert not results._known


def test_what_the_host_has_much_of_is_not_computed():
    results, x = Results(), torch.ones(LARGE // 4)
    assert ask(results, aten.add_.Tensor, (x, x), {}) is x
    assert ask(results, aten._foreach_add_.Scalar, ([x, torch.ones(1)], 1), {}) is None
    assert x[0] == 1
    (root,) = ask(results, aten._foreach_sqrt.default, ([x],), {})
    assert root.shape == x.shape and root.device == x.device and root is not x
    assert ask(results, aten.sum.default, (x,), {}) == 1  # whatever it would be
    view = ask(results, aten.view.default, (x, [2, -1]), {})
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    to_the_device = ask(results, aten._to_copy.default, (x,), {"device": torch.device("meta")})
    assert to_the_device.is_meta and to_the_device.shape == x.shape
    to_bf16 = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    cast = ask(results, aten._to_copy.default, (x,), to_bf16)
    assert (cast.shape, cast.dtype, cast.device) == (x.shape, torch.bfloat16, x.device)
    steps = torch.ones(())
    assert ask(results, aten.add_.Tensor, (steps, 1), {}) == 2
