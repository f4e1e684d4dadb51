"""Checks of precision.py: one unit without other ranks, a virtual GPU, and two ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most

LOW = torch.bfloat16


@dataclass
class Pair:
    """An input of a user's own making."""

    values: torch.Tensor
    index: torch.Tensor


def _inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, index = torch.rand(2, 3), torch.arange(3)
    return (x, [index, x.double()], Pair(x + 1, index)), {"mask": {"low": x.bfloat16()}, "n": 3}


def _said(value: Any) -> Any:
    """Dtype and device of each tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} on {value.device}"
    if isinstance(value, Pair):
        return [_said(value.values), _said(value.index)]
    if isinstance(value, dict):
        return {name: _said(item) for name, item in value.items()}
    return [_said(item) for item in value] if isinstance(value, (list, tuple)) else value


def _prepared(what: str, want: Any, got: Any) -> str | None:
    found = str(got)
    if "caller's" in what:
        return "the caller's own objects were changed: map_tensors() copies what it has to change"
    if "same tensor" in what:
        return "a tensor that has the dtype and the device already should not be copied"
    if "gradient" in what:
        return "the cast has to be part of the graph: do not detach, and do not use .data"
    if found.count("int64") < str(want).count("int64"):
        return "tensors of integers are indices, or labels: they keep their dtype"
    if found.count("meta") < str(want).count("meta"):
        return "all inputs of the root are moved to unit.device"
    if found.count("meta") > str(want).count("meta"):
        return "only inputs of the root are moved; inside of the model they are where they are"
    if "keywords" in what:
        return "keyword arguments are inputs, too"
    if found.count("bfloat16") < str(want).count("bfloat16"):
        return "floating-point inputs are cast where the precision says so, however deep they are"
    if found.count("float64") > str(want).count("float64"):
        return "cast_forward_inputs is for the root as well, with a param_dtype or without one"
    more = found.count("bfloat16") > str(want).count("bfloat16")
    if more or found.count("float64") < str(want).count("float64"):
        return (
            "cast_forward_inputs is for every unit; cast_root_forward_inputs is for the root, and "
            "only if there is a param_dtype"
        )
    if isinstance(got, dict) and "dtype" in str(got.get("message", "")):
        return "inputs have another dtype than the parameters: they were not cast"
    return None


@check("precision.1", because=_prepared)
def what_is_cast_and_moved() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from minifsdp.precision import prepare_inputs
    from tests.lone_unit import lone_unit

    cases = {
        "param_dtype=bf16": MixedPrecision(LOW),
        "param_dtype=bf16, cast_root_forward_inputs=False": MixedPrecision(
            LOW, cast_root_forward_inputs=False
        ),
        "param_dtype=bf16, cast_forward_inputs=True": MixedPrecision(LOW, cast_forward_inputs=True),
        "no precision": MixedPrecision(),
        "cast_forward_inputs=True": MixedPrecision(cast_forward_inputs=True),
    }
    for said, precision in cases.items():
        with lone_unit(precision=precision) as lone:
            lone.unit.offload_from = torch.device("meta")  # where the unit computes
            for is_root in (True, False):
                given, named = _inputs()
                args, kwargs = prepare_inputs(lone.unit, is_root, given, named)
                who = "the root" if is_root else "a unit inside"
                yield f"inputs of {who} on meta, {said}", _said(args)
                yield f"keywords of {who} on meta, {said}", _said(kwargs)
                yield "the caller's inputs after it", _said([given, named])


@check("precision.1", because=_prepared)
def copies_and_gradients() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from minifsdp.precision import prepare_inputs
    from tests.lone_unit import lone_unit

    with lone_unit(precision=MixedPrecision(LOW)) as lone:
        low, index = torch.rand(3).bfloat16(), torch.arange(3)
        (a, b), _ = prepare_inputs(lone.unit, True, (low, index), {})
        yield "the same tensor as before, if it is bf16 already", a is low
        yield "the same tensor as before, if it is of integers", b is index
        x = torch.rand(3, requires_grad=True)
        (cast,), _ = prepare_inputs(lone.unit, True, (x,), {})
        yield "values after the cast", cast
        yield "whether the cast has a gradient", cast.requires_grad
        (cast * 2).sum().backward()
        yield "the gradient of an input", x.grad


@check("precision.1", because=_prepared)
def half_of_the_bytes_on_a_gpu() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from tutorials.exercises.virtual import train

    figures = train(mixed_precision=MixedPrecision(LOW)).report()
    yield at_most("seconds of a step in bf16", figures["step"], slack=0.02)
    yield at_most("allocated bytes of a step in bf16", figures["peak allocated"], slack=0.05)


def _mixed(norm: Any = None) -> Any:
    """A model with an index as its input, in bf16 but for a norm."""
    from minifsdp import CustomPolicy, MixedPrecision
    from minifsdp import FullyShardedDataParallel as FSDP

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(300, 4)
            self.norm, self.out = norm or torch.nn.Identity(), torch.nn.Linear(8, 2)

        def forward(self, index: torch.Tensor, extra: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.out(torch.cat([self.norm(self.table(index)), extra["x"]], 1))

    own = {"mixed_precision": MixedPrecision(cast_forward_inputs=True)}
    policy = CustomPolicy(lambda m: own if m is norm else isinstance(m, torch.nn.Linear))
    return FSDP(Net(), auto_wrap_policy=policy, mixed_precision=MixedPrecision(LOW))


def _trained(model: Any) -> Iterator[Any]:
    import torch.distributed as dist

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(3):
        index = torch.tensor([1, 259, 298]) - dist.get_rank()
        out = model(index, extra={"x": torch.rand(2, 3, 4)[dist.get_rank()]})
        yield f"the dtype of the output, step {at + 1}", out.dtype
        loss = out.float().pow(2).sum()
        yield f"the loss of step {at + 1}", loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters after three steps", model.state_dict()


@check("precision.1", ranks=2, because=_prepared)
def a_table_of_300_rows_on_two_ranks() -> Iterator[Any]:
    """In bf16, 259 is 260: an index that is cast is another one."""
    yield from _trained(_mixed())


def _restored(what: str, want: Any, got: Any) -> str | None:
    if "other dtype" in what:
        return "only outputs of the dtype that the unit computes in are cast back"
    if "computes low" in what or "not asked" in what:
        return (
            "this is for a unit of full precision: one with cast_forward_inputs and without a "
            "param_dtype"
        )
    if "two low dtypes" in what:
        return "inputs of two other dtypes: none of them is the right one, so nothing is cast"
    if "keyword" in what:
        return "inputs are in args and in kwargs"
    if "beside" in what:
        return "inputs that have the unit's dtype already do not count; integers do not, either"
    if "exact" in what:
        return "inputs had the unit's dtype already, so nothing has to be cast"
    if isinstance(got, dict) and "dtype" in str(got.get("message", "")):
        return "the next unit gets full precision: the outputs were not cast back"
    if "bfloat16" in str(want):
        return "the outputs have to get the dtype that the inputs had before they were cast"
    return None


@check("precision.2", because=_restored)
def outputs_get_the_dtype_of_the_inputs() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from minifsdp.precision import output_cast
    from tests.lone_unit import lone_unit

    exact, index = torch.rand(3), torch.arange(3)
    low, half, double = exact.bfloat16(), exact.half(), exact.double()

    def cast(unit: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        function = output_cast(unit, args, kwargs)
        return _said(output if function is None else function(output))

    with lone_unit(precision=MixedPrecision(cast_forward_inputs=True)) as lone:
        unit = lone.unit
        yield "output of a bf16 input", cast(unit, exact, low)
        yield "outputs in a tuple and a dict", cast(unit, (exact, {"a": [exact]}, None), low)
        yield "output of a bf16 input in a dict in a keyword", cast(unit, exact, x={"a": low})
        yield "output of bf16 beside an index", cast(unit, exact, low, index)
        yield "output of bf16 beside fp32", cast(unit, exact, exact, low)
        yield "output of an exact input", cast(unit, exact, exact, index)
        yield "output of two low dtypes", cast(unit, exact, low, half)
        yield (
            "outputs of other dtypes, such as integers and fp64 (other dtype)",
            cast(unit, [index, double, half], low),
        )
        x = exact.clone().requires_grad_()
        function = output_cast(unit, (low,), {})
        out = x * 2 if function is None else function(x * 2)
        out.sum().backward()
        yield "the gradient through the cast", x.grad
    with lone_unit(precision=MixedPrecision(LOW, cast_forward_inputs=True)) as lone:
        yield "output of a unit that computes low", cast(lone.unit, low, exact)
    with lone_unit(precision=MixedPrecision()) as lone:
        yield "output of a unit that was not asked to", cast(lone.unit, exact, low)


@check("precision.2", because=_restored)
def an_exact_norm_on_a_gpu() -> Iterator[Any]:
    from torch import nn

    from minifsdp import CustomPolicy, MixedPrecision
    from minifsdp import FullyShardedDataParallel as FSDP
    from minifsdp.sim import cluster

    own = {"mixed_precision": MixedPrecision(cast_forward_inputs=True)}
    with cluster() as gpu:
        layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64)]
        policy = CustomPolicy(lambda m: own if isinstance(m, nn.LayerNorm) else False)
        model = FSDP(
            nn.Sequential(*layers), auto_wrap_policy=policy, mixed_precision=MixedPrecision(LOW)
        )
        out = model(torch.empty(32, 64))
        yield "the dtype of the output, bfloat16 between exact norms", out.dtype
        out.sum().backward()
        gpu.step()
    yield at_most("allocated bytes", gpu.report()["peak allocated"], slack=0.05)


@check("precision.2", ranks=2, because=_restored)
def an_exact_norm_on_two_ranks() -> Iterator[Any]:
    yield from _trained(_mixed(torch.nn.LayerNorm(4)))
