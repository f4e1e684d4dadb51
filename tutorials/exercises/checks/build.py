"""Checks of fsdp.py as it begins: one function or two of it at a time, and then all."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import is_rounded, of_training, ratio
from tutorials.exercises.observe import at_most

STEP = "2_cuda"


def _memory(unit: Any) -> int:
    """The bytes that a unit's whole parameters have now."""
    return int(unit.flat_param.untyped_storage().nbytes())


def _sharded(hooks: bool = True, double: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its engine, and the units by the names of their modules.

    Args:
        hooks: False: the engine does nothing.
        double: parameters of 8 bytes, which are not what torch.empty() makes.
    """
    from types import SimpleNamespace

    from tutorials.exercises.program import KINDS, Model, program

    model, file = Model().double() if double else Model(), program(STEP)
    names = {module: name or "the model" for name, module in model.named_modules()}
    if not hooks:
        file.Engine = lambda model, units: SimpleNamespace(model=model, units=units)
    engine = file.fsdp(model, *KINDS)
    return model, engine, {names[unit.module]: unit for unit in engine.units}


def _units(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "raised" in got:
        return (
            "a module's own parameters are those of named_parameters(recurse=False); there may be "
            "none, and no children either; a module without parameters is no unit"
        )
    if "still in memory" in what:
        return (
            "something still refers to them: a list of yours, the modules, or a cycle, such as an "
            "inner function that calls itself, which stays until Python collects its garbage"
        )
    if "type of" in what:
        return "fsdp returns what Engine(model, units) gives"
    if "modules" in what and set(want) - set(got):
        return (
            "what is in no unit of these kinds belongs to the model; units may be in units; and a "
            "module of a subclass is of that kind as well, as isinstance() says"
        )
    if "modules" in what:
        return "only modules of these kinds, and the model, are units, if they have parameters"
    if any("sharded_flat_param" in owner for owners in got for owner in owners):
        return (
            "that is what Unit() has made of a unit inside of this one: find the parameters of all "
            "units before the first Unit() changes its module"
        )
    if len(got) > len(want) or sum(map(len, got)) > sum(map(len, want)):
        return "parameters of a unit inside of this one are not its own: only the innermost unit's"
    return (
        "one parameter may have several owners, and each of them has to get the view; also in one "
        "module, under two names: named_parameters(recurse=False, remove_duplicate=False)"
    )


@check("build.1", because=_units)
def which_parameters_belong_to_which_unit() -> Iterator[Any]:
    from torch import nn

    from tutorials.exercises.program import KINDS, Block, Model, pretended_ranks, program

    class Special(Block):
        """A kind of Block."""

    with pretended_ranks(2):
        special = nn.Sequential(nn.Tanh(), Block(), Special())
        special[1].again = special[1].scale  # two names in one module
        untied = Model()  # a weight may not be in two units
        untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
        for model, kinds in (
            (Model(), KINDS),
            (special, (Block, nn.Tanh)),
            (untied, (nn.Linear, nn.Embedding)),
            (Model(), ()),
        ):
            names = {module: name or "the model" for name, module in model.named_modules()}
            engine = program(STEP).fsdp(model, *kinds)
            about = f"fsdp(model, {', '.join(kind.__name__ for kind in kinds)})"
            yield f"type of {about}", type(engine).__name__
            found = {names[unit.module]: unit for unit in engine.units}
            yield f"modules that {about} makes units of", sorted(found)
            for name, unit in sorted(found.items()):
                owners = [sorted(f"{names[o]}.{n}" for o, n in each) for each in unit.owners]
                yield f"owners of the parameters of {name} in {about}", sorted(owners)


@check("build.8", because=_units)
@check("build.1", because=_units)
def nothing_keeps_the_parameters_from_before() -> Iterator[Any]:
    import gc
    from weakref import ref

    from tutorials.exercises.program import KINDS, Model, pretended_ranks, program

    with pretended_ranks(2):
        model = Model()
        originals = [ref(param) for param in model.parameters()]
        gc.collect()
        gc.disable()  # it would break a cycle, at some later time
        engine = program(STEP).fsdp(model, *KINDS)
        alive = sum(original() is not None for original in originals)
        yield "parameters from before that are still in memory after fsdp()", alive
        assert engine is not None


def _is_gone(got: Any) -> bool:
    """Whether a student's line takes an attribute from a module that does not have it."""
    if not isinstance(got, dict) or got.get("raised") != "AttributeError" or not got["at"]:
        return False
    return "has no attribute" in got["message"] and not got["message"].startswith("'Unit'")


def _shard(what: str, want: Any, got: Any) -> str | None:
    if _is_gone(got):
        return (
            "hide_views() takes the parameters away, and they are gone already: delattr() removes "
            "a parameter as well as a view, so once for each owner is enough"
        )
    if "still in memory" in what:
        return (
            "the unit keeps them, or what refers to them: a list of yours, or params.values(), "
            "which is a view of the dict"
        )
    if "dtype of flat_param" in what:
        return "parameters keep their dtype, in the shard and in flat_param"
    if what.startswith("sharded_flat_param") and (got.shape, got.dtype) == (want.shape, want.dtype):
        return "rank r keeps the r-th of equal pieces, one after the other; the padding is zeros"
    if "bytes that the shard" in what:
        return "the shard is a view, which keeps all of the flat tensor in memory: clone it"
    if "bytes of flat_param" in what:
        return "whole parameters have memory only while they are needed: reshard()"
    if "elements of flat_param" in what or "shape should be" in what:
        return (
            "it is padded with zeros, so that all ranks get the same number of elements; where "
            "nothing is left over, there is no padding"
        )
    if "module.parameters()" in what:
        return "the module has to lose its parameters (hide_views), and get the shard by its name"
    if "an optimizer" in what:
        return "the shard is an nn.Parameter, and no part of another tensor's graph"
    if "leaf" in what:
        return "flat_param is a tensor that autograd accumulates a gradient in (requires_grad)"
    return None


@check("build.2", because=_shard)
def a_unit_is_flattened_and_sharded() -> Iterator[Any]:
    from weakref import ref

    import torch
    from torch import nn

    from tutorials.exercises.program import pretended_ranks, program

    for number, rank in ((2, 0), (2, 1), (3, 2), (4, 3), (13, 12)):
        with pretended_ranks(number, rank):
            module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(3, 1, bias=False))
            module[2].weight = module[1].weight
            if number == 13:  # as many ranks as elements: no padding
                module.double()
            params: dict[Any, Any] = {}
            for owner in module:
                for name, param in owner.named_parameters():
                    params.setdefault(param, set()).add((owner, name))
            before = [ref(param) for param in params]
            unit = program(STEP).Unit(module, params)
            del params, param
            shard, about = unit.sharded_flat_param, f", rank {rank} of {number}"
            yield f"elements of flat_param{about}; the parameters have 13", unit.flat_param.numel()
            yield f"dtype of flat_param{about}", str(unit.flat_param.dtype)
            yield f"sharded_flat_param{about}", shard
            yield f"bytes that the shard keeps in memory{about}", shard.untyped_storage().nbytes()
            kind = [type(shard).__name__, shard.requires_grad, shard.is_leaf]
            yield f"what an optimizer would get{about}", kind
            flat = unit.flat_param
            yield (
                f"whether flat_param is a leaf that gets a gradient{about}",
                (flat.is_leaf and flat.requires_grad),
            )
            yield f"bytes of flat_param's memory{about}", _memory(unit)
            names = [name for name, _ in module.named_parameters()]
            yield f"names of module.parameters(){about}", names
            yield f"unit.shapes{about}", [list(shape) for shape in unit.shapes]
            yield f"number of owners of each parameter{about}", [len(o) for o in unit.owners]
            yield f"unit.world{about}", unit.world
            alive = sum(param() is not None for param in before)
            yield f"parameters from before that are still in memory{about}", alive
            with torch.no_grad():
                shard.zero_()  # of a parameter that is somebody's, nothing may change


def _is_of_another_dtype(got: Any) -> bool:
    """Whether a collective was given tensors of two dtypes."""
    return isinstance(got, dict) and "invalid tensor type" in got.get("message", "")


_LIKE = "what is gathered has the dtype of the shards: torch.empty() alone makes float32"


def _gathered(what: str, want: Any, got: Any) -> str | None:
    if _is_of_another_dtype(got):
        return _LIKE
    if isinstance(got, dict) and "out of bounds for storage" in got.get("message", ""):
        return "resize_() is told bytes, not elements: as many as the whole tensor has (nbytes)"
    if isinstance(got, dict) and "raised" in got:
        return (
            "to autograd a gather is no change: write to flat_param.data, or else it refuses what "
            "it has saved"
        )
    if "called again before the backward" in what:
        return (
            "views that autograd holds show the storage of the forward: a new tensor in .data has "
            "another one, so gather into the same storage again"
        )
    if "after reshard" in what:
        return "autograd holds views, so del frees nothing: resize the storage to 0"
    if "after unshard" in what:
        return "the storage gets as many bytes as the whole tensor has (nbytes)"
    if "the same tensor" in what:
        return "modules have views of flat_param: it stays, and only its memory comes and goes"
    if "changed" in what:
        return "what was gathered before is not valid any more: send the shard as it is now"
    return None


@check("build.3", ranks=2, because=_gathered)
def memory_comes_and_goes() -> Iterator[Any]:
    import torch
    import torch.distributed as dist

    _, _, units = _sharded(hooks=False)
    unit, root = units["first"], units["the model"]
    flat = unit.flat_param
    for moment in ("once", "again"):
        unit.unshard()
        yield f"bytes of memory after unshard(), {moment}", _memory(unit)
        yield f"flat_param after unshard(), {moment}", unit.flat_param
        unit.reshard()
        yield f"bytes of memory after reshard(), {moment}", _memory(unit)
        yield f"whether flat_param is the same tensor, {moment}", unit.flat_param is flat
        yield "elements of flat_param after reshard()", unit.flat_param.numel()
    with torch.no_grad():
        unit.sharded_flat_param.add_(1 + dist.get_rank())
    unit.unshard()
    yield "flat_param after the shards have changed", unit.flat_param
    root.unshard()
    yield "flat_param of the model's own unit", root.flat_param
    unit.show_views()
    loss = unit.module.linear.weight.pow(3).sum()
    unit.hide_views()
    unit.reshard()
    yield "bytes of memory after reshard(), with views that autograd holds", _memory(unit)
    unit.unshard()
    loss.backward()
    yield "flat_param.grad, when unshard() was called again before the backward", flat.grad
    unit = _sharded(hooks=False, double=True)[2]["first"]
    unit.unshard()
    yield "bytes of memory after unshard(), in float64", _memory(unit)
    yield "flat_param after unshard(), in float64", unit.flat_param


def _views(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "does not require grad" in got.get("message", ""):
        return "views are made of flat_param itself, with autograd: without .data or detach()"
    if isinstance(got, dict) and "cannot assign" in got.get("message", ""):
        return (
            "hide_views() takes the attribute away from all owners of a parameter, with delattr(): "
            "None would leave the name to a parameter"
        )
    if _is_gone(got):
        return (
            "hide_views() takes an attribute away that is not there: show_views() sets it in each "
            "owner, and delattr() removes it, so a second time there is nothing left to remove"
        )
    if isinstance(got, dict) and "sum exactly" in got.get("message", ""):
        return "flat is longer than the shapes: its last piece, the zeros, has no shape"
    if isinstance(got, dict) and "raised" in got:
        return (
            "hide_views() takes away what show_views() has set, in each owner; the last piece of "
            "the flat tensor, its zeros, has no shape"
        )
    if "share" in what:
        return "a copy is no view: a layer would not see what is gathered later"
    if "gradient" in what:
        return "views are made of flat_param itself, with autograd: without .data or detach()"
    if "second forward" in what:
        return (
            "make new views in each forward: autograd visits old ones last, so that no unit would "
            "be freed before all are there"
        )
    if "is a parameter" in what:
        return (
            "a layer computes with any tensor: give it the view itself. A new nn.Parameter would "
            "get the gradient, and flat_param would get none"
        )
    if "has a weight" in what:
        return (
            "hide_views() takes away the attribute of all owners, also where it is the parameter "
            "itself, as in the constructor: somebody might read freed memory"
        )
    if "every owner" in what:
        return "all owners of a parameter get the view, not one of them"
    return None


@check("build.4", because=_views)
def modules_compute_with_views() -> Iterator[Any]:
    import torch

    from tutorials.exercises.program import pretended_ranks

    with pretended_ranks(2):
        model, _, units = _sharded(hooks=False)
        unit, root = units["first"], units["the model"]
        numbers = torch.arange(float(unit.flat_param.numel()))
        views = list(unit.unflatten(numbers))
        yield "shapes of unflatten(flat)", [list(view.shape) for view in views]
        yield "values of unflatten(flat)", views
        same = numbers.untyped_storage().data_ptr()
        yield (
            "whether they share flat's memory",
            [view.untyped_storage().data_ptr() == same for view in views],
        )
        for one in (unit, root):
            one.flat_param.untyped_storage().resize_(one.flat_param.nbytes)
            one.flat_param.data.copy_(torch.rand(one.flat_param.shape))
            one.show_views()
        weight = unit.module.linear.weight
        yield "the weight of a module after show_views()", weight
        yield "whether it is a parameter", isinstance(weight, torch.nn.Parameter)
        (weight * torch.rand(weight.shape)).sum().backward()
        yield "the gradient of a view, as it has arrived in flat_param.grad", unit.flat_param.grad
        yield "whether every owner has the same view", model.head.weight is model.token.weight
        unit.hide_views()
        root.hide_views()
        modules = {"a layer": unit.module.linear, "the embedding": model.token, "head": model.head}
        for name, module in modules.items():
            yield f"whether {name} has a weight after hide_views()", hasattr(module, "weight")
        yield "names of parameters() after hide_views()", [n for n, _ in model.named_parameters()]
        unit.show_views()
        again = unit.module.linear.weight
        yield (
            "whether the views of a second forward are new",
            (again is not weight and again.grad_fn is not weight.grad_fn),
        )


def _forward(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "raised" in got:
        if "require grad" in got["message"]:
            return "an output may need no gradient, as under no_grad(): then it gets no hook"
        if "before_backward" in what:
            return (
                "the output of a unit's forward gets a hook, which calls before_backward: without "
                "it nothing is gathered again"
            )
        return (
            "before its forward a unit is unsharded, and its modules get the views. Does each hook "
            "have its own unit? A lambda in a loop uses the loop's last one, partial() does not"
        )
    if "while" in what:
        return "each unit is gathered before its own forward, and freed after it"
    if "after the forward" in what:
        return "after its forward a unit is freed, and its modules lose the views"
    if "gradient" in what or "before_backward" in what:
        return (
            "three hooks belong to each unit, one of them to flat_param; and the output of its "
            "forward gets one, which calls before_backward"
        )
    return None


@check("build.5", ranks=2, because=_forward)
def a_forward() -> Iterator[Any]:
    import torch

    from tutorials.exercises.program import batch

    model, engine, units = _sharded()
    yield "engine.model and engine.units", [engine.model is model, len(engine.units)]
    log: list[list[str]] = []

    def look(*_: object) -> None:
        log.append(sorted(name for name, unit in units.items() if _memory(unit)))

    for unit in units.values():
        child = getattr(unit.module, "norm", None) or getattr(unit.module, "linear", None)
        if child is not None:
            child.register_forward_pre_hook(look)
    with torch.no_grad():
        yield "output under no_grad()", model(batch(0))
    yield "units that have memory while a layer of the next unit computes", log
    look()
    yield "units that have memory after the forward", log[-1]
    yield "whether a layer has a weight after the forward", hasattr(model.head, "weight")
    called = []
    original = type(engine).before_backward

    def before_backward(self: Any, unit: Any, grad: Any) -> None:
        called.append(next(name for name, one in units.items() if one is unit))
        original(self, unit, grad)

    type(engine).before_backward = before_backward
    output = model(batch(1))
    yield "output", output
    output.pow(2).mean().backward()
    yield "units for which before_backward was called, in order", called
    yield (
        "units of which the shard has a gradient",
        sorted(name for name, unit in units.items() if unit.sharded_flat_param.grad is not None),
    )


def _backward(what: str, want: Any, got: Any) -> str | None:
    if "ranks" in what:
        return (
            "unit.world says how many ranks there are; what is received is like the shard, in its "
            "length and dtype"
        )
    if isinstance(got, dict) and "raised" in got:
        return "the backward needs the whole parameters: before_backward gathers them again"
    if "second backward" in what:
        return "a second backward adds up in the shard's gradient, and not in flat_param.grad"
    if "gradient of" in what and (factor := ratio(want, got)) is not None:
        return (
            f"the gradient is exactly {factor:g} x too large: DDP averages over the ranks, and a "
            "reduce-scatter sums"
        )
    if "gradient of" in what and is_rounded(want, got):
        return "it is rounded: what is sent and added up has the dtype of the shard"
    if "bytes" in what:
        return "it is a view, which keeps the gradient of all shards in memory: clone it"
    if "flat_param.grad" in what:
        return "take flat_param.grad away when it is reduced: it is as large as all parameters"
    if "units that have memory" in what:
        return "a unit is freed as soon as its own gradient is complete"
    if "gradient" in what:
        return "reduce the gradient over all ranks, and keep the part of this one"
    return None


@check("build.6", ranks=2, because=_backward)
def a_backward() -> Iterator[Any]:
    from tutorials.exercises.program import one_backward

    model, _, units = _sharded()
    log: list[list[str]] = []

    def look(*_: object) -> None:
        log.append(sorted(name for name, unit in units.items() if _memory(unit)))

    for unit in units.values():
        unit.flat_param.register_hook(look)
    one_backward(model, 0)
    for name, unit in units.items():
        grad = unit.sharded_flat_param.grad
        yield f"gradient of the shard of {name}", grad
        kept = 0 if grad is None else grad.untyped_storage().nbytes()
        yield f"bytes that the gradient of {name} keeps in memory", kept
    yield "whether flat_param.grad is left", [u.flat_param.grad is not None for u in units.values()]
    yield "units that have memory while each gradient is complete", log
    look()
    yield "units that have memory after the backward", log[-1]
    one_backward(model, 1)
    for name, unit in units.items():
        yield f"{name}: gradient of the shard after a second backward", unit.sharded_flat_param.grad


@check("build.6", ranks=3, because=_backward)
def a_backward_of_three() -> Iterator[Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from tutorials.exercises.program import program

    # In these numbers sums and means are exact, in any order.
    model = nn.Linear(3, 1).double()
    program(STEP).fsdp(model)
    (3 * model(torch.tensor([1.0, 2, 4 << dist.get_rank()]).double())).sum().backward()
    (shard,) = model.parameters()
    yield "gradient of the shard of a Linear(3, 1) in float64, on three ranks", shard.grad


def _names(what: str, want: Any, got: Any) -> str | None:
    if _is_of_another_dtype(got) or "dtypes" in what:
        return _LIKE
    if isinstance(got, list) and any(name.startswith(".") for name in got):
        return "the model's own path is empty: before the names there comes no dot"
    if "names" in what:
        return "a name is the path of the owner, a dot, and its name there: one of each owner"
    if "memory" in what:
        return "gather into a tensor of its own: units stay freed"
    if "gradient" in what:
        return "they are values: no_grad(), and the shard's .data"
    return None


@check("build.7", ranks=2, because=_names)
def the_whole_parameters() -> Iterator[Any]:
    import torch
    import torch.distributed as dist

    from tutorials.exercises.program import Model

    model, engine, units = _sharded()
    names = dict(Model().named_parameters(remove_duplicate=False))
    found = engine.full_params()
    yield "names of full_params()", sorted(found)
    for name in names:
        yield f"full_params()[{name!r}]", found.get(name)
    yield "whether one needs a gradient", any(value.requires_grad for value in found.values())
    yield "units that have memory afterwards", [n for n, unit in units.items() if _memory(unit)]
    with torch.no_grad():
        for shard in model.parameters():
            shard.mul_(2 + dist.get_rank())
    found = engine.full_params()
    for name in names:
        yield f"full_params()[{name!r}] when the shards have changed", found.get(name)
    found = _sharded(double=True)[1].full_params()
    yield "dtypes of full_params() in float64", sorted({str(v.dtype) for v in found.values()})


@check("build.8", ranks=2, seconds=20, because=of_training)
def the_file_trains_as_ddp() -> Iterator[Any]:
    from tutorials.exercises.program import Block, train

    yield from train(STEP)
    yield from train(STEP, ", each block a unit", kinds=(Block,))


def _of_three(what: str, want: Any, got: Any) -> str | None:
    raised = got.get("message", "") if isinstance(got, dict) else None
    if "dtype" in (what if raised is None else raised):
        return _LIKE
    if raised is not None:
        return (
            "each rank has the same number of elements, however many ranks there are: with zeros "
            "at the end, if the number of ranks does not divide that of the elements"
        )
    return "divide by the number of ranks, which is three here; and cut off the padding, two zeros"


@check("build.8", ranks=3, because=_of_three)
def the_file_trains_on_three_ranks() -> Iterator[Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from tutorials.exercises.program import program

    # In these numbers sums and means are exact, in any order.
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 4.0]]))
        model.bias.fill_(8.0)
    engine = program(STEP).fsdp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        (3 * model(torch.tensor([1.0, 2, 4 << dist.get_rank()]).double())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.full_params()
    yield "dtypes of full_params() in float64", sorted({str(v.dtype) for v in found.values()})
    for name in ("weight", "bias"):
        yield f"{name} of a Linear(3, 1) after two steps, in float64 on three ranks", found[name]


def _gpu(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and got.get("raised") == "NoStreams":
        return "the head of make student's fsdp.py says which names of the file are fixed"
    if isinstance(got, dict) and "raised" in got:
        return None
    return "units are not freed after their forward, or not before the unit before them is needed"


@check("build.8", because=_gpu)
def the_files_memory() -> Iterator[Any]:
    from tutorials.exercises.program import on_gpu, stack

    hardware = {"host_computes": True}  # it never is ahead: so there is no need of a limiter yet
    gpu = on_gpu(STEP, partial(stack, (512,) * 16), rows=64, hardware=hardware)
    report = gpu.report()
    # It may be twice as much: a program that gathers the next unit has two of them.
    yield at_most("bytes of memory that are in use at most", report["peak active"], slack=1)
    yield at_most("bytes sent in a step", report["bytes sent"])
