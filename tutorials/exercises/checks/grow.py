"""Checks of fsdp.py as it grows: the whole program, beside that of the reference for each step.

A program of a later step is right here as well.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import equal, of_training
from tutorials.exercises.observe import at_most, close


def _local(tensor: Any) -> Any:
    """What this rank has of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _of_gpu(gpu: Any, about: str = "") -> Iterator[Any]:
    """Races, seconds and memory of a step."""
    from tutorials.exercises.program import races

    report = gpu.report()
    yield f"races{about}", races(gpu)
    yield at_most(f"seconds of a step{about}", report["step"], slack=0.04)
    yield at_most(f"bytes of memory that are in use{about}", report["peak active"], slack=0.03)
    yield at_most(f"bytes of memory reserved{about}", report["peak reserved"], slack=0.25)


def _raised(got: Any) -> bool:
    return isinstance(got, dict) and "raised" in got


# ----------------------------------------------------------------------------------- 1: overlap

OVERLAP = "4_overlap"


def _overlap(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "races" in what and "given out again" in str(got):
        return (
            "the next gather gets memory that a layer still reads: tell the allocator before you "
            "free it (record_stream of the compute stream)"
        )
    if "races" in what and "what was there before" in str(got):
        return (
            "its memory comes from the compute stream, which may still read what was there: "
            "resize it inside of what is launched, so that it is the unshard stream's"
        )
    who = str(got).partition(" uses ")[0]
    if "races" in what and "allgather" in who:
        return (
            "a gather does not wait for what it sends: when a forward begins, the unshard stream "
            "waits for an event of the compute stream, after the optimizer"
        )
    if "races" in what:
        return "the event of the gather is waited for before the unit computes"
    if "seconds" in what:
        return (
            "nothing is gathered while a unit computes: gathers run on streams.unshard, and wait "
            "for the optimizer only, once in each forward"
        )
    if "memory" in what:
        return "resize the memory inside of what is launched, so that it is the unshard stream's"
    return of_training(what, want, got)


@check("grow.1", because=_overlap)
def gathers_run_beside_the_computation() -> Iterator[Any]:
    from tutorials.exercises.program import on_gpu, stack

    yield from _of_gpu(on_gpu(OVERLAP))
    yield from _of_gpu(on_gpu(OVERLAP, partial(stack, root=True)), ", with a layer of the root's")


@check("grow.1", ranks=2, seconds=20, because=_overlap)
def it_trains_with_overlap() -> Iterator[Any]:
    from tutorials.exercises.program import train

    yield from train(OVERLAP)


# -------------------------------------------------------------------- 2: the end of the backward

END = "5_end_of_backward"


def _end(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "has not ended" in what:
        return "a shard gets its gradient when the backward has ended: keep them till the end"
    if "step is over" in what:
        return (
            "a unit whose output gets a gradient, and its parameters none, stays gathered: free it "
            "at the end of the backward"
        )
    if "second backward" in what:
        return "gradients of a second backward are added to those of the first"
    if what.startswith(("loss of step", "parameter")) and "step 1" not in what:
        return (
            "at the end of a backward hand over all gradients, empty the list, and take the note "
            "back that one runs, so that the next backward has an end as well"
        )
    return of_training(what, want, got)


@check("grow.2", ranks=2, seconds=20, because=_end)
def gradients_come_at_the_end() -> Iterator[Any]:
    from tutorials.exercises.program import KINDS, Model, one_backward, program, train

    model, seen = Model(), list[str]()
    program(END).fsdp(model, *KINDS)

    def look(grad: Any) -> None:
        there = [name for name, param in model.named_parameters() if param.grad is not None]
        seen.extend(there)

    def look_later(module: Any, args: Any, output: Any) -> None:
        output.register_hook(look)

    model.first.norm.register_forward_hook(look_later)  # nearly the last one in the backward
    one_backward(model, 0)
    yield "parameters that have a gradient already while the backward has not ended", seen
    yield from train(END)
    twice = {"backward": _two_backwards, "with_ddp": False}  # DDP rounds in another order
    yield from train(END, ", with a second backward", **twice)
    twice["backward"] = _two_forwards
    yield from train(END, ", with two forwards, and then two backwards", **twice)


@check("grow.2", because=_end)
def a_unit_whose_parameters_get_no_gradient_is_freed() -> Iterator[Any]:
    from tutorials.exercises.program import on_gpu, with_aside

    gpu = on_gpu(END, with_aside)
    # A unit that stays would be six times as much; some programs keep their gradients a little.
    in_use = gpu.allocator.allocated.now
    yield at_most("bytes of memory in use when a step is over", in_use, slack=1)


def _two_backwards(model: Any, step: int) -> Any:
    from tutorials.exercises.program import one_backward

    return one_backward(model, step) + one_backward(model, step + 100)


def _two_forwards(model: Any, step: int) -> float:
    """No forward begins between the two backwards."""
    from tutorials.exercises.program import batch

    losses = [model(batch(number)).pow(2).mean() for number in (step, step + 100)]
    for loss in losses:
        loss.backward()
    return float(sum(losses))


# ------------------------------------------------------------------------------------ 3: reduce

REDUCE = "6_reduce"


def _reduce(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "races" in what:
        return (
            "the reduce stream waits until the gradient is computed, and whoever reads the mean "
            "waits for its event"
        )
    if "compute stream sends" in what:
        return "the reduction runs on the compute stream: submit it to streams.reduce"
    if "seconds" in what:
        return "the backward waits for each reduction: wait for it when the next one is taken"
    if "memory" in what:
        return "gradients pile up: wait for the reduction before, and let go of what it has sent"
    if "second backward" in what:
        return "gradients of a second backward are added to those of the first"
    return of_training(what, want, got)


@check("grow.3", because=_reduce)
def reductions_run_beside_the_backward() -> Iterator[Any]:
    from tutorials.exercises.program import on_gpu, seconds_of_messages, stack

    gpu = on_gpu(REDUCE, partial(stack, work=True), rows=1024)
    yield at_most("seconds in which the compute stream sends", seconds_of_messages(gpu))
    yield from _of_gpu(gpu)
    gpu = on_gpu(REDUCE, partial(stack, (512,) * 16), rows=64)
    yield from _of_gpu(gpu, ", little to compute")
    # A host that is not ahead gathers no unit before its turn, whose memory would hide a pile. It
    # may be twice as much: views that are slices take more memory in a backward.
    hardware = {"host_computes": True}
    gpu = on_gpu(REDUCE, partial(stack, (512,) * 16), rows=64, hardware=hardware)
    figure = gpu.report()["peak active"]
    yield at_most("bytes of memory that are in use, on a host that computes", figure, slack=1)


@check("grow.3", ranks=2, seconds=20, because=_reduce)
def it_trains_with_reductions() -> Iterator[Any]:
    from tutorials.exercises.program import train

    yield from train(REDUCE)
    twice = {"backward": _two_backwards, "with_ddp": False}  # DDP rounds in another order
    yield from train(REDUCE, ", with a second backward", **twice)


# ------------------------------------------------------------------------------- 4: all or none

ALL_OR_NONE = "7_all_or_none"


def _all_or_none(what: str, want: Any, got: Any) -> str | None:
    if "races" in what:
        return (
            "what a failed backward still sends must keep its memory: wait for its reductions "
            "before you let go of them"
        )
    if "gradients" in what and not _raised(got):
        return (
            "hand gradients over at the end of the backward only; what is left of one that has "
            "failed is dropped when the next forward begins"
        )
    if "after an exception" in what and _raised(got):
        return "the next forward begins with what the exception has left: forget it first (reset)"
    if "after an exception" in what:
        return (
            "something is left of the step that failed: views, units that are gathered already, "
            "reductions on their way, or the note that a backward runs"
        )
    return of_training(what, want, got)


class _Error(Exception):
    pass


def _gradients(model: Any) -> dict[str, Any]:
    """A copy of each, or None."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad if grad is None else _local(grad).clone() for name, grad in grads.items()}


def _fail(model: Any, step: int, moment: str, at: str) -> None:
    """A step that an exception ends, in the forward or in the backward of a module."""
    from tutorials.exercises.program import one_backward

    def fail(*_: object) -> None:
        raise _Error

    def fail_later(module: Any, args: Any, output: Any) -> None:
        output.register_hook(fail)

    module = model.get_submodule(at)
    hook = fail if moment == "forward" else fail_later
    handle = module.register_forward_hook(hook)
    with suppress(_Error):
        one_backward(model, step)
    handle.remove()


PLACES = "stage.blocks.0.norm", "twice.norm"
FAILURES = [(moment, at) for moment in ("forward", "backward") for at in PLACES]


def _after_failures(model: Any, step: int) -> Any:
    from tutorials.exercises import observe
    from tutorials.exercises.program import one_backward

    if observe.reference:  # DDP, which says what is expected, need not live through them
        return one_backward(model, step)
    for moment, at in FAILURES if not step else ():
        _fail(model, 50, moment, at)
    loss = one_backward(model, step)
    _fail(model, 50 + step, *FAILURES[2 * step % len(FAILURES)])  # before the optimizer's step
    return loss


@check("grow.4", ranks=2, seconds=20, because=_all_or_none)
def an_exception_changes_nothing() -> Iterator[Any]:
    from tutorials.exercises.program import KINDS, Model, one_backward, program, train

    yield from train(ALL_OR_NONE)
    model = Model()
    program(ALL_OR_NONE).fsdp(model, *KINDS)
    for number in range(2):
        for moment, at in FAILURES:
            before = _gradients(model)
            _fail(model, number, moment, at)
            after = _gradients(model)
            changed = [name for name in before if not equal(before[name], after[name])]
            left = "none yet" if not number else "those of the backward before"
            about = f"an exception in the {moment} of {at} (it had {left})"
            yield f"gradients that are changed by {about}", changed
        one_backward(model, 0)
    yield from train(ALL_OR_NONE, ", after an exception", backward=_after_failures)


@check("grow.4", because=_all_or_none)
def what_is_still_being_sent_keeps_its_memory() -> Iterator[Any]:
    import torch

    from tutorials.exercises.program import Layer, races, stack, virtual_gpu

    fails = True

    def fail(grad: Any) -> None:
        if fails:
            raise _Error

    def fail_later(module: Any, args: Any, output: Any) -> None:
        output.register_hook(fail)

    with virtual_gpu(ALL_OR_NONE) as (gpu, fsdp):
        model = stack()
        fsdp(model, Layer)
        model[0].up.register_forward_hook(fail_later)  # all others have their gradients by then
        for fails in (True, False, True, False):  # noqa: B007  # fail() looks at it
            with suppress(_Error):
                model(torch.empty(1024, 1024)).mean().backward()
            gpu.step()
    yield "races after an exception", races(gpu)


# ----------------------------------------------------------------------------------- 5: limiter

LIMITER = "8_limiter"


def _limiter(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "units alive" in what or "memory" in what:
        return (
            "more units are alive than the limit allows: on a GPU a unit is alive until its event "
            "has passed, which the host waits for before the gather. (If that is right: is memory "
            "allocated in the launch of a reduction that could be the computation's?)"
        )
    if "seconds" in what and "units in a unit" in what:
        return "units of the modules around a unit cannot be freed before it: do not count them"
    if "seconds" in what:
        return (
            "the host waits more than it must: for the oldest event only, and only if there are "
            "as many units as the limit"
        )
    if "races" in what:
        return _overlap(what, want, got)
    return of_training(what, want, got)


@check("grow.5", because=_limiter)
def few_units_are_alive() -> Iterator[Any]:
    from tutorials.exercises.program import nested, on_gpu

    for limit in (1, 2, 3, math.inf):
        about = f", limit {limit}"
        gpu = on_gpu(LIMITER, limit=limit)
        alive = gpu.report()["peak unsharded units"]
        yield at_most(f"units alive{about}", alive)
        yield from _of_gpu(gpu, about)
    gpu = on_gpu(LIMITER, nested, limit=2)
    yield from _of_gpu(gpu, ", limit 2, units in a unit")


@check("grow.5", ranks=2, seconds=20, because=_limiter)
def it_trains_with_a_limit() -> Iterator[Any]:
    from tutorials.exercises.program import train

    yield from train(LIMITER, ", limit 1", limit=1)


# ----------------------------------------------------------------- 6: prefetching in the forward

FORWARD = "10_order"


def _forward(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "order" in what and "False" in what:
        return "then nothing is gathered ahead: each unit is gathered just before it computes"
    if "order" in what:
        return (
            "before a unit computes, the unit is gathered that came after it in the last forward: "
            "and not the one before it, nor one that has been"
        )
    if "units alive" in what:
        return "a prefetch is declined if as many units are alive already as the limit allows"
    if "seconds" in what:
        return "a prefetch is launched, and the host goes on"
    if "races" in what:
        return _overlap(what, want, got)
    return of_training(what, want, got)


@check("grow.6", because=_forward)
def the_next_unit_is_gathered() -> Iterator[Any]:
    from tutorials.exercises.program import Backwards, on_gpu, races, schedule

    for ahead in (True, False):
        about = f", forward_prefetch={ahead}"
        order = schedule(FORWARD, limit=math.inf, forward_prefetch=ahead)
        yield f"the order in a forward{about}", order[: order.index("forward 3") + 1]
        order = schedule(FORWARD, Backwards, limit=math.inf, forward_prefetch=ahead)
        said = f"{about}, the last module first"
        yield f"the order in a forward{said}", order[: order.index("forward 0") + 1]
        for limit in (1, 2):
            gpu = on_gpu(FORWARD, limit=limit, forward_prefetch=ahead)
            said = f"{about}, limit {limit}"
            yield f"races{said}", races(gpu)
            yield at_most(f"units alive{said}", gpu.report()["peak unsharded units"])
            yield at_most(f"seconds of a step{said}", gpu.report()["step"], slack=0.04)


@check("grow.6", ranks=2, seconds=30, because=_forward)
def it_trains_with_prefetching() -> Iterator[Any]:
    from tutorials.exercises.program import train

    for settings in ({"forward_prefetch": True}, {"forward_prefetch": False}, {"limit": 1}):
        yield from train(FORWARD, _said(settings), **settings)


# ---------------------------------------------------------------- 7: prefetching in the backward

PREFETCH = "11_backward_prefetch"
SETTINGS = (
    {"forward_prefetch": True, "backward_prefetch": "pre"},
    {"forward_prefetch": False, "backward_prefetch": "pre"},
    {"forward_prefetch": True, "backward_prefetch": "post"},
    {"forward_prefetch": False, "backward_prefetch": None},
)


def _said(settings: dict[str, Any]) -> str:
    return ", " + ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _prefetch(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "order" in what and "backward_prefetch='post'" in what:
        return "in the forward before a unit computes, and in the backward after it has been freed"
    if "order" in what and "backward_prefetch=None" in what:
        return "without prefetching each unit is gathered just before it computes"
    if "order" in what:
        return (
            "before a unit computes, the unit is gathered that came after it in the last forward, "
            "or in the last backward: and not the one before it, nor one that has been"
        )
    if "units alive" in what or "memory" in what:
        return "a prefetch is declined if as many units are alive already as the limit allows"
    if "seconds" in what and "'post'" in what:
        return "with 'post' the next gather starts when a unit is freed, before its reduction"
    if "seconds" in what:
        return "a prefetch is launched before the computation waits for the unit's own gather"
    if "races" in what:
        return _overlap(what, want, got)
    return of_training(what, want, got)


@check("grow.7", because=_prefetch)
def the_next_unit_of_a_backward_is_gathered() -> Iterator[Any]:
    from tutorials.exercises.program import on_gpu, schedule

    for settings in SETTINGS:
        order = schedule(PREFETCH, limit=math.inf, **settings)
        yield f"the order in a step{_said(settings)}", order
    for settings in (*SETTINGS, {"limit": 1}):
        about = _said(settings)
        gpu = on_gpu(PREFETCH, **settings)
        yield at_most(f"units alive{about}", gpu.report()["peak unsharded units"])
        yield from _of_gpu(gpu, about)


@check("grow.7", ranks=2, seconds=30, because=_prefetch)
def it_trains_with_prefetching_in_the_backward() -> Iterator[Any]:
    from tutorials.exercises.program import train

    for settings in SETTINGS[::2]:
        yield from train(PREFETCH, _said(settings), **settings)


# -------------------------------------------------------------------------------- 8: checkpoints

CHECKPOINTS = "12_checkpoints"


def _checkpoints(what: str, want: Any, got: Any) -> str | None:
    if "run again" in what and not _raised(got) and "races" not in what:
        return (
            "when the gradient is complete no reason is left: a checkpoint stops the forward that "
            "runs again as soon as it has what it needs, and then no hook ends that"
        )
    if "checkpoint" in what:
        return (
            "a checkpoint runs a forward again in the backward: it may not free what the backward "
            "needs, nor hide views, nor begin a new step; and autograd has to know the views"
        )
    if _raised(got):
        return None
    if "races" in what:
        return _overlap(what, want, got)
    if "memory" in what or "units alive" in what:
        return "a unit is freed when the last reason to keep it is taken away"
    return of_training(what, want, got)


@check("grow.8", because=_checkpoints)
def units_are_still_freed() -> Iterator[Any]:
    from tutorials.exercises.program import RunAgain, on_gpu, stack

    for settings in SETTINGS:
        gpu, about = on_gpu(CHECKPOINTS, **settings), _said(settings)
        yield at_most(f"units alive{about}", gpu.report()["peak unsharded units"])
        yield from _of_gpu(gpu, about)
    for settings in SETTINGS:
        about = ", each unit run again" + _said(settings)
        gpu = on_gpu(CHECKPOINTS, lambda: RunAgain(*stack()), **settings)
        yield at_most(f"units alive{about}", gpu.report()["peak unsharded units"])
        yield from _of_gpu(gpu, about)


@check("grow.8", ranks=2, seconds=30, because=_checkpoints)
def it_trains_with_checkpoints() -> Iterator[Any]:
    from torch.utils.checkpoint import set_checkpoint_early_stop

    from tutorials.exercises.program import Around, Checkpointed, Inside, train

    yield from train(CHECKPOINTS)
    for stop in (True, False):
        about = "" if stop else ", each of whose forwards runs to its end"
        with set_checkpoint_early_stop(stop):
            made = {"make": Checkpointed, "steps": 2}
            yield from train(CHECKPOINTS, f", with checkpoints around units{about}", **made)
            made["make"] = Inside
            yield from train(CHECKPOINTS, f", with a checkpoint inside of units{about}", **made)
            made["make"] = Around
            yield from train(CHECKPOINTS, f", with a checkpoint around the model{about}", **made)


# --------------------------------------------------------------------------------- 9: strategies

STRATEGIES = "13_strategies"


def _strategies(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "bytes of each gather" in what and "False" in what:
        return "a unit stays from its forward to its backward, and is gathered once in a step"
    if "bytes of each gather" in what:
        return (
            "the root stays, for its backward comes next: and no unit but the root. Or is it freed "
            "after all, by a reset, before its backward comes"
        )
    if "order" in what:
        return (
            "a unit that stays till its backward cannot be freed before: the limit does not count "
            "it, or it would decline every prefetch"
        )
    if "under no_grad" in what:
        return (
            "no backward comes without gradients: then every unit is freed after its forward. (Or "
            "are the parameters from before still there? EX=build.8 looks at that)"
        )
    if "memory" in what:
        return "a unit that stays till its backward is freed when its gradient is complete"
    if "races" in what:
        return _overlap(what, want, got)
    return of_training(what, want, got)


@check("grow.9", because=_strategies)
def how_often_units_are_gathered() -> Iterator[Any]:
    from tutorials.exercises.program import gathers, on_gpu, schedule, stack, virtual_gpu

    for stays in (True, False):
        about = f", reshard_after_forward={stays}"
        gpu = on_gpu(STRATEGIES, partial(stack, root=True), reshard_after_forward=stays)
        yield f"bytes of each gather in a step{about}", gathers(gpu)
        yield from _of_gpu(gpu, about)
    order = schedule(STRATEGIES, reshard_after_forward=False)
    words = "the order in a forward, reshard_after_forward=False"
    yield words, order[: order.index("forward 3") + 1]
    # The first unit is so large that the most memory is in use in its backward, which comes last.
    # As a ratio: views that are slices take more memory, whether units stay or not.
    make = partial(stack, (8192, *(2048,) * 8))
    taken = [
        on_gpu(STRATEGIES, make, rows=256, reshard_after_forward=frees).report()["peak allocated"]
        for frees in (False, True)
    ]
    words = "memory that the host has taken at most, reshard_after_forward=False, to that with True"
    yield at_most(words, taken[0] / taken[1], slack=0.1)
    yield from _without_gradients(virtual_gpu, stack)


def _without_gradients(virtual_gpu: Any, stack: Any) -> Iterator[Any]:
    import torch

    from tutorials.exercises.program import Layer

    with virtual_gpu(STRATEGIES) as (gpu, fsdp):
        model = stack()
        fsdp(model, Layer, reshard_after_forward=False)
        with torch.no_grad():
            for _ in range(2):
                model(torch.empty(1024, 1024))
                gpu.step()
    figure = gpu.report()["peak active"]
    yield at_most("bytes of memory that are in use under no_grad()", figure, slack=0.03)


@check("grow.9", ranks=2, seconds=30, because=_strategies)
def it_trains_with_strategies() -> Iterator[Any]:
    from tutorials.exercises.program import Checkpointed, train

    for stays in (True, False):
        about = f", reshard_after_forward={stays}"
        yield from train(STRATEGIES, about, reshard_after_forward=stays)
        again = f"{about}, with checkpoints around units"
        yield from train(STRATEGIES, again, make=Checkpointed, reshard_after_forward=stays)


# -------------------------------------------------------------------------------- 10: precision

PRECISION = "14_precision"


def _precision(what: str, want: Any, got: Any) -> str | None:
    if "inputs" in what and "gets" in what and not _raised(got):
        return (
            "inputs of floating point are cast to param_dtype, a scalar as well; indices stay as "
            "they are, and so does what is no tensor"
        )
    if "dtype of the output" in what:
        return "inputs are cast, and outputs are not: the next unit computes in the same dtype"
    if _raised(got) and "grad_dtype" in got["message"]:
        return "the mean is cast back to the dtype of the shard before it is its gradient"
    if _raised(got):
        return "inputs of floating point are cast to param_dtype, and indices stay as they are"
    if what.startswith("parameter") and got.dtype != want.dtype:
        return "full_params() gathers the shards as they are kept, and not in param_dtype"
    if "dtypes" in what:
        return "what is kept stays in fp32: the shard, its gradient, and so the optimizer's state"
    if "bytes of each gather" in what:
        return "the shard is cast before it is sent, so that a gather has half of the bytes"
    if "bytes sent" in what:
        return "a gradient is sent in reduce_dtype; without one, in that of the parameters"
    if "reduce_dtype" in what and "loss of step 1" not in what:
        return "the gradient is cast to reduce_dtype before it is divided, added up, and cast back"
    if "races" in what:
        return _overlap(what, want, got)
    return of_training(what, want, got)


@check("grow.10", because=_precision)
def half_of_the_bytes() -> Iterator[Any]:
    import torch

    from tutorials.exercises.program import gathers, on_gpu, races

    for reduce_dtype in (None, torch.float32):
        about = f", param_dtype=bf16, reduce_dtype={reduce_dtype}"
        gpu = on_gpu(PRECISION, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        yield f"races{about}", races(gpu)
        yield f"bytes of each gather in a step{about}", gathers(gpu)
        yield at_most(f"bytes sent in a step{about}", gpu.report()["bytes sent"])


def _module_that_looks() -> Any:
    """A unit that notes what kinds of inputs it gets."""
    import torch
    from torch import nn

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.got = nn.Linear(3, 2), list[str]()

        def forward(self, x: Any, factor: Any, index: Any, number: float) -> Any:
            every = (x, factor, index, number)
            self.got = [str(getattr(one, "dtype", type(one).__name__)) for one in every]
            return self.linear(x.to(self.linear.weight.dtype))

    inputs = torch.ones(1, 3), torch.tensor(2.0), torch.tensor([2]), 2.0
    return Looks(), inputs


def _of_numbers(model: Any, step: int) -> float:
    """A backward of a model that gets numbers, and not tokens."""
    from tutorials.exercises.program import batch

    loss = model(batch(step).float()).sum()
    loss.backward()
    return float(loss)


@check("grow.10", ranks=2, seconds=20, because=_precision)
def it_trains_in_low_precision() -> Iterator[Any]:
    import torch
    from torch import nn

    from tutorials.exercises.program import KINDS, Model, one_backward, program, train

    for reduce_dtype in (None, torch.float32):
        settings = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
        about = f", param_dtype=bf16, reduce_dtype={reduce_dtype}"
        looks, inputs = _module_that_looks()
        program(PRECISION).fsdp(looks, **settings)
        output = looks(*inputs)
        kinds = "a tensor, a scalar, an index, and a number"
        yield f"inputs that a unit gets: {kinds}{about}", looks.got
        yield f"dtype of the output of a unit{about}", str(output.dtype)
        model = Model()
        program(PRECISION).fsdp(model, *KINDS, **settings)
        one_backward(model, 0)
        kept = [*model.parameters()]
        kept += [param.grad for param in kept if param.grad is not None]
        dtypes = sorted({str(tensor.dtype) for tensor in kept})
        yield f"dtypes of shards and of their gradients{about}", dtypes
        yield from train(PRECISION, about, with_ddp=False, **settings)
        numbers = {"make": partial(nn.Linear, 3, 2), "backward": _of_numbers, "with_ddp": False}
        yield from train(PRECISION, f"{about}, inputs of floating point", **numbers, **settings)
    yield from train(PRECISION, ", without dtypes")


@check("grow.10", ranks=3, because=_precision)
def three_ranks_divide_in_the_dtype_of_the_reduction() -> Iterator[Any]:
    import torch
    from torch import nn

    from tutorials.exercises.program import program

    model, settings = nn.Linear(2, 1), {"param_dtype": torch.bfloat16}
    engine = program(PRECISION).fsdp(model, reduce_dtype=torch.float32, **settings)
    before = engine.full_params()["weight"].clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()  # each gradient is 1, of which bf16 has no third
    optimizer.step()
    change = (engine.full_params()["weight"] - before).double()
    words = "the step of a weight whose gradient is 1 on each of three ranks"
    yield close(f"{words}, reduce_dtype=torch.float32", change, slack=1e-4)


# ----------------------------------------------------------------------------------- 11: hybrid

HYBRID = "15_hybrid"


def _hybrid(what: str, want: Any, got: Any) -> str | None:
    if _raised(got) and "size" in got["message"]:
        return "a unit's number of ranks, and its rank, are those of the group of shards"
    if _raised(got):
        return None
    if "keeps" in what or "each gather" in what:
        return "parameters are sharded in the last dimension of the mesh only"
    if "bytes" in what:
        return "gather and reduce in the group of shards; then an all-reduce, of the shard only"
    if "(2, 1)" in what or "replicas" in what:
        return (
            "after the reduce-scatter comes an all-reduce between replicas: a sum, of means, so "
            "divide by their number"
        )
    if "races" in what:
        return _overlap(what, want, got)
    return of_training(what, want, got)


@check("grow.11", because=_hybrid)
def sixteen_ranks_in_two_groups() -> Iterator[Any]:
    from tutorials.exercises.program import gathers, on_gpu, races

    gpu = on_gpu(HYBRID, mesh=(2, 8))
    yield "races on a mesh (2, 8)", races(gpu)
    yield "bytes of each gather in a step on a mesh (2, 8)", gathers(gpu)
    yield at_most("bytes sent in a step on a mesh (2, 8)", gpu.report()["bytes sent"])
    yield at_most("seconds of a step on a mesh (2, 8)", gpu.report()["step"], slack=0.1)


@check("grow.11", ranks=2, seconds=30, because=_hybrid)
def it_trains_on_a_mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from tutorials.exercises.program import KINDS, Model, program, train

    for shape in ((2, 1), (1, 2), (2,)):
        mesh = init_device_mesh("cpu", shape)
        yield from train(HYBRID, f", mesh {shape}", mesh=mesh)
        model = Model()
        program(HYBRID).fsdp(model, *KINDS, mesh=mesh)
        kept = sum(_local(param).numel() for param in model.parameters())
        yield at_most(f"elements that a rank keeps, mesh {shape}", kept, slack=0.1)


# -------------------------------------------------------------------------------------- 12: rows

ROWS = "17_names"


def _rows(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "names of" in what:
        return "each parameter keeps its name, and is registered with all of its owners"
    if "requires a gradient" in what or "is frozen" in what:
        return "a parameter that needs no gradient gets none, and what is kept does not require one"
    if "rows of" in what and getattr(want, "shape", 0) != getattr(got, "shape", 0):
        return "each rank has the same number of rows, rounded up; the last ones may have fewer"
    if "second backward" in what:
        return "the first backward gives a parameter its gradient, and the next one adds to it"
    if "optimizer has written" in what:
        return (
            "parameters share the memory of the shard, in which an optimizer writes; and what "
            "full_params() gathers is put in order, as for a layer"
        )
    if "seconds" in what:
        return "a copy takes the host time: put rows in order with one for a parameter, or in all"
    if "bytes of memory" in what:
        return "beside the shard nothing stays: no table of places, nothing of what was gathered"
    if "scalar" in what:
        return "its row is what an optimizer sees: layers compute with a view of shape []"
    if "gradient" in what:
        return "the mean is laid out as the shard: cut it into rows in the same way"
    return of_training(what, want, got)


def _look_at_scale(block: Any, seen: list[list[int]], *_: object) -> None:
    seen.append(list(block.scale.shape))


@check("grow.12", ranks=2, seconds=30, because=_rows)
def parameters_are_rows() -> Iterator[Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from tutorials.exercises.program import KINDS, Frozen, Model, one_backward, program, train

    for shape in ((2,), (2, 1)):
        model, about = Frozen(), f", mesh {shape}"
        mesh = init_device_mesh("cpu", shape)
        engine = program(ROWS).fsdp(model, *KINDS, mesh=mesh)
        seen: list[list[int]] = []
        look = partial(_look_at_scale, model.first, seen)
        model.first.norm.register_forward_hook(look)
        yield f"names of parameters(){about}", [name for name, _ in model.named_parameters()]
        yield f"names of state_dict(){about}", sorted(model.state_dict())
        one_backward(model, 0)
        yield f"shape of a scalar while its layer computes{about}", seen
        for name, param in model.named_parameters():
            yield f"whether {name} requires a gradient{about}", param.requires_grad
            yield f"rows of {name}{about}", _local(param.detach())
            if not param.requires_grad:
                yield (
                    f"whether {name}, which is frozen, has a gradient{about}",
                    (param.grad is not None),
                )
            elif param.grad is not None:
                yield f"rows of the gradient of {name}{about}", _local(param.grad)
        one_backward(model, 1)
        for name, grad in _gradients(model).items():
            after = "after a second backward"
            yield f"rows of the gradient of {name}, {after}{about}", grad
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
        doubled = engine.full_params()
        for name, value in Model().named_parameters():
            half = torch.equal(doubled.get(name, value), 2 * value)
            yield f"whether full_params()[{name!r}] is what an optimizer has written{about}", half
    yield from train(ROWS, ", some parameters frozen", make=Frozen)


@check("grow.12", ranks=4, seconds=30, because=_rows)
def rows_of_four_ranks() -> Iterator[Any]:
    from tutorials.exercises.program import KINDS, Frozen, program

    model = Frozen()
    engine = program(ROWS).fsdp(model, *KINDS)
    for name, param in model.named_parameters():
        yield f"rows of {name}, of four ranks", _local(param.detach())
    yield "full_params(), of four ranks", engine.full_params()


@check("grow.12", because=_rows)
def rows_on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.program import on_gpu

    yield from _of_gpu(on_gpu(ROWS))
    yield from _of_gpu(on_gpu(ROWS, mesh=(2, 8)), ", mesh (2, 8)")


# ---------------------------------------------------------------------------------- 13: DTensors

DTENSORS = "18_dtensors"


def _dtensors(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "kind of" in what:
        return (
            "parameters and their gradients are DTensors with the shape of the whole, Shard(0), "
            "and Replicate() in the dimension of replicas; a scalar has the shape (1,)"
        )
    if "whole of" in what or "norm" in what:
        return "a DTensor has this rank's rows, and knows the shape of the whole"
    return of_training(what, want, got)


def _kind(tensor: Any) -> list[Any]:
    placements = [str(p) for p in getattr(tensor, "placements", ())]
    return [type(tensor).__name__, list(tensor.shape), placements]


@check("grow.13", ranks=2, seconds=30, because=_dtensors)
def parameters_are_dtensors() -> Iterator[Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from tutorials.exercises.program import KINDS, Frozen, one_backward, program, train

    for shape in ((2,), (2, 1)):
        model, about = Frozen(), f", mesh {shape}"
        program(DTENSORS).fsdp(model, *KINDS, mesh=init_device_mesh("cpu", shape))
        one_backward(model, 0)
        for name, param in model.named_parameters():
            yield f"kind of {name}{about}", _kind(param.data)
            if param.grad is not None:
                yield f"kind of the gradient of {name}{about}", _kind(param.grad)
            yield f"the whole of {name}{about}", param.detach().full_tensor()
        trained = [param for param in model.parameters() if param.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.1)
        yield f"the norm of all gradients{about}", norm.full_tensor()
    yield from train(DTENSORS, ", some parameters frozen", make=Frozen)
