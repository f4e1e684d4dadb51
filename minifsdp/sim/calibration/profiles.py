"""Samples from a profile: a trace that ``torch.profiler`` has exported on a machine with GPUs.

::

    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    profile.export_chrome_trace("trace.json")

Each kernel in it has the id of the operator that launched it, and ``record_shapes`` gives the
operator's shapes and dtypes. NCCL's kernels have the sizes of their messages (torch 2.3 and later).
What a profile does not show: how fast kernels are beside collectives, and what the host takes
without a profiler that slows it down.

Sources: ``torch/csrc/profiler/util.cpp`` and ``autograd/profiler_kineto.cpp`` (names of fields).
"""

import gzip
import json
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.kernels import product_sample
from minifsdp.sim.calibration.machine import Device, Samples
from minifsdp.sim.hardware.costs import relative_speed
from minifsdp.sim.hardware.gpus import like, preset
from minifsdp.sim.hardware.kernels import ATTENTION, ATTENTION_BACKWARD, PRODUCT, Kernel

BYTES = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "int": 4, "long int": 8, "bool": 1,
    "BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Long": 8, "Byte": 1,
}  # fmt: skip
"""By dtype, as operators name them and as collectives do."""
LOW = ("c10::BFloat16", "c10::Half")
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1}
"""Products, and which argument is their first factor."""
FLASH = {"aten::_flash_attention_forward": (0, 8), "aten::_flash_attention_backward": (1, 11)}
"""Attention: which arguments are its queries, and whether it is causal."""
PASSES = ("add", "mul", "div", "gelu", "silu", "copy_", "add_", "mul_", "div_")
ROUNDS = {"allgather": 1, "reduce_scatter": 1, "allreduce": 2}

Event = dict[str, Any]


def read(path: str, gpu: str = "") -> tuple[Samples, Device]:
    """What there is in a profile, and the GPU that it is of.

    Args:
        gpu: the preset that has what is not in there; "": the one of the GPU's name.

    Raises:
        ValueError: it is no such file, there is nothing in it, or no preset is like the GPU.
    """
    trace = _trace(path)
    events = [e for e in trace["traceEvents"] if isinstance(e, dict) and e.get("ph") == "X"]
    kernels = [e for e in events if e.get("cat") == "kernel" and e.get("dur", 0) > 0]
    if not kernels:
        raise ValueError(
            f"--profile: {path!r} has no kernels of a GPU in it; profile a step on one"
        )
    device = _device(path, trace, gpu, [e for e in kernels if "Group size" in _args(e)])
    found = Samples(*([] for _ in range(10)))
    by_operator: dict[Any, float] = defaultdict(float)  # seconds; several kernels may be one's
    for kernel in kernels:
        by_operator[_args(kernel).get("External id")] += kernel["dur"] / 1e6
    for event in events:
        args = _args(event)
        took = by_operator.get(args.get("External id"))
        if event.get("cat") == "cpu_op" and took and "Input Dims" in args:
            _add(found, device, event["name"], args, took)
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and args.get("bytes"):
            found.copies.append(args["bytes"] / event["dur"] * 1e6)
    found.collectives.extend(_collectives(kernels))
    if found.copies:
        found.copies[:] = [max(found.copies)]  # small ones, and of pageable memory, are slower
    return found, device


def _trace(path: str) -> dict[str, Any]:
    try:
        raw = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except OSError as error:
        raise ValueError(f"--profile: cannot read {path!r}: {error.strerror}") from error
    except (ValueError, RecursionError, EOFError) as error:
        raise ValueError(
            f"--profile: {path!r} is no JSON, as export_chrome_trace writes"
        ) from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"--profile: {path!r} is no trace, as torch's export_chrome_trace writes")
    return trace


def _args(event: Event) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _device(path: str, trace: dict[str, Any], gpu: str, collectives: list[Event]) -> Device:
    facts = (trace.get("deviceProperties") or [{}])[0]
    name, memory = facts.get("name", "unknown"), int(facts.get("totalGlobalMem", 0))
    known = preset(gpu) if gpu else like(name, memory)
    if known is None:
        raise ValueError(
            f"--profile: {path!r} is of a GPU {name!r}, which is not known; --gpu says whose "
            f"constants are to be taken for what is not in there"
        )
    multiprocessors = int(facts.get("numSms", known.multiprocessors))
    ranks = max((int(_args(event)["Group size"]) for event in collectives), default=1)
    return Device(name, memory or known.memory, ranks, multiprocessors, known, cpu=False)


def _add(found: Samples, device: Device, name: str, args: dict[str, Any], took: float) -> None:
    """A sample of an operator, if it is one from which something can be told."""
    dims, types = args["Input Dims"], args.get("Input type", [])
    low = any(kind in LOW for kind in types)
    if name in FACTORS:
        first, second = dims[FACTORS[name] :][:2]
        (*batch, rows, inner), columns = first, second[-1]
        shape = prod(batch), rows, columns, inner
        kernel = Kernel(PRODUCT, 0, low, done=2.0 * prod(shape), shape=shape)
        (found.products if low else found.products_fp32).append(
            product_sample(kernel, device, took)
        )
    elif name in FLASH:
        place, causal = FLASH[name]
        (batch_size, queries, heads, width), keys = dims[place], dims[place + 1][1]
        products = 5 if place else 2
        done = 2.0 * products * batch_size * heads * queries * keys * width
        if args.get("Concrete Inputs", [])[causal : causal + 1] == ["True"]:
            done /= 2
        kind = ATTENTION_BACKWARD if place else ATTENTION
        done /= relative_speed(Kernel(kind, 0, True, shape=(0, 0, 0, width)))
        found.attention.append(Sample(done, done / keys, took))
    elif name.removeprefix("aten::") in PASSES:
        sizes = [prod(d) * BYTES.get(kind, 0) for d, kind in zip(dims, types, strict=False) if d]
        if sizes:
            moved = sum(sizes) + (0 if name.endswith("_") else max(sizes))  # what it makes
            found.passes.append(Sample(1.0, moved, took))


def _collectives(kernels: list[Event]) -> list[Sample]:
    """The fastest of each size: in the others a rank may have waited for one that was late."""
    fastest: dict[tuple[float, float], float] = {}
    for event in kernels:
        args, took = _args(event), event["dur"] / 1e6
        name = str(args.get("Collective name", "")).strip("_")
        rounds = next((n for what, n in ROUNDS.items() if name.startswith(what)), 0)
        ranks, size = int(args.get("Group size", 1)), BYTES.get(args.get("dtype", ""), 0)
        whole = max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0)) * size
        if rounds and ranks > 1 and whole:
            key = float(rounds * (ranks - 1)), rounds * whole * (ranks - 1) / ranks
            fastest[key] = min(took, fastest.get(key, took))
    return [Sample(*key, took) for key, took in fastest.items()]
