"""Checks of materialize.py: a unit that is on the meta device, and one that has a unit inside."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tutorials.exercises.catalog import check

CPU = torch.device("cpu")


def _memory(what: str, want: Any, got: Any) -> str | None:
    if "unit inside" in what:
        return (
            "a unit inside has its values already, and param_init_fn may fill all that is below a "
            "module: hide it (_hidden_units)"
        )
    if "new module" in what:
        return "param_init_fn may put new modules in place: ask own_modules(modules['']) at the end"
    if "stay on meta" in what:
        return "the device may be meta itself, on a virtual GPU: then there is nothing to do"
    if "refused" in what:
        return "in the end look what is still on the meta device, and name it in a ValueError"
    if "autograd" in what:
        return "values are set without autograd: torch.no_grad()"
    if "nothing to do" in what:
        return "what has memory already is left alone, and nobody is called for it"
    if "calls" in what:
        return "param_init_fn is called with each module, the outer ones before those inside"
    if "on the meta device during" in what:
        return "param_init_fn may ask what is on meta: with one, nothing has memory before it"
    if "same tensor" in what:
        return "what was one tensor on meta has to be one afterwards: remember the places first"
    if isinstance(got, dict) and "raised" in got:
        return "without an init_fn, _reset() gives memory, and has modules reset themselves"
    return None


class _Tied(nn.Module):
    """Three layers on meta, of which two share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.inside = nn.Sequential(nn.Linear(3, 2))
        self.last.weight = self.first.weight


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _Tied()


def _modules(root: nn.Module) -> dict[str, nn.Module]:
    return dict(root.named_modules())


def _ones(module: nn.Module) -> None:
    """Give memory and ones to what a module has, a new parameter in each place."""
    for name, param in [*module.named_parameters(recurse=False)]:
        setattr(module, name, nn.Parameter(torch.ones(param.shape)))


@check("materialize.1", because=_memory)
def a_function_gives_the_values() -> Iterator[Any]:
    from minifsdp.wrapping.materialize import materialize

    root, calls, autograd = _on_meta(), list[str](), list[bool]()
    on_meta: list[bool] = []
    names = {module: name or "the root" for name, module in root.named_modules()}

    def init_fn(module: nn.Module) -> None:
        calls.append(names[module])
        autograd.append(torch.is_grad_enabled())
        on_meta.append(all(param.is_meta for param in module.parameters(recurse=False)))
        _ones(module)

    # An inner one first: the order is for materialize() to see to.
    modules = _modules(root)
    materialize({"inside.0": modules["inside.0"], **modules}, CPU, init_fn)
    depths = [name.count(".") if name != "the root" else -1 for name in calls]
    yield "calls of the function, each with a module", sorted(calls)
    yield "calls in the order of depth", depths == sorted(depths)
    yield "whether autograd is on during a call", autograd
    yield "whether its own parameters are on the meta device during a call", on_meta
    tied = root.get_submodule("first").weight is root.get_submodule("last").weight
    yield "whether a shared weight is the same tensor in both places", tied
    for name, param in root.named_parameters():
        yield f"values of {name}", param.detach()


@check("materialize.1", because=_memory)
def without_a_function() -> Iterator[Any]:
    from minifsdp.wrapping.materialize import materialize

    root = _on_meta()
    materialize(_modules(root), CPU, None)
    yield "what is still without memory", [n for n, p in root.named_parameters() if p.is_meta]
    bound = max(float(p.detach().abs().max()) for p in root.parameters())
    yield "whether the values are those that Linear draws", 0 < bound < 1
    tied = root.get_submodule("first").weight is root.get_submodule("last").weight
    yield "whether a shared weight is the same tensor in both places, without a function", tied
    for there in (nn.Linear(2, 2), nn.GELU()):
        called: list[nn.Module] = []
        materialize(_modules(there), CPU, called.append)
        yield f"calls where there is nothing to do, {type(there).__name__}", len(called)


@check("materialize.1", because=_memory)
def what_stays_on_meta_is_refused() -> Iterator[Any]:
    from minifsdp.wrapping.materialize import materialize

    for name, init_fn in {
        "first.weight": lambda module: None,
        "first.bias": lambda module: _ones_of(module, "weight"),
    }.items():
        said = "nothing"
        try:
            materialize(_modules(_on_meta()), CPU, init_fn)
        except ValueError as error:
            said = f"ValueError, which names {name}" if name in str(error) else str(error)
        yield f"how a function that leaves {name} on meta is refused", said


@check("materialize.1", because=_memory)
def a_function_puts_a_new_module_in_place() -> Iterator[Any]:
    from minifsdp.wrapping.materialize import materialize

    for device in ("cpu", "meta"):

        def init_fn(module: nn.Module, device: str = device) -> None:
            if isinstance(module, nn.Sequential):
                module[0] = nn.Linear(3, 2, device=device)
            elif not isinstance(module, _Tied):
                _ones(module)

        said = "nothing"
        try:
            materialize(_modules(_on_meta()), CPU, init_fn)
        except ValueError:
            said = "ValueError"
        yield f"what is said of a new module on {device}", said


@check("materialize.1", because=_memory)
def a_device_without_values() -> Iterator[Any]:
    from minifsdp.wrapping.materialize import materialize

    root, called = _on_meta(), list[nn.Module]()
    materialize(_modules(root), torch.device("meta"), called.append)
    yield "calls where all should stay on meta", len(called)


def _ones_of(module: nn.Module, name: str) -> None:
    param = getattr(module, name, None)
    if isinstance(param, Tensor):
        setattr(module, name, nn.Parameter(torch.ones(param.shape)))


@check("materialize.1", because=_memory)
def a_unit_inside_keeps_its_values() -> Iterator[Any]:
    from minifsdp import FullyShardedDataParallel
    from minifsdp.wrapping.materialize import materialize
    from minifsdp.wrapping.module_tree import own_modules
    from tutorials.exercises.program import pretended_ranks

    def all_below(module: nn.Module) -> None:
        module.to_empty(device=CPU)
        for param in module.parameters():
            nn.init.ones_(param)

    with pretended_ranks(2):
        root: Any = _on_meta()
        inside = root.inside = FullyShardedDataParallel(nn.Linear(3, 2))
        (shard,) = inside.parameters()
        before = shard.detach().clone()
        materialize(own_modules(root), CPU, all_below)
        yield "values of a unit inside", next(inside.parameters()).detach()
        yield "whether they are those of before in a unit inside", bool((shard == before).all())
        yield "whether the unit inside is where it was", root.inside is inside
