"""Memory snapshots: what was in memory at the peak, and which lines of Python had asked for it.

``torch.cuda.memory._dump_snapshot(file)`` writes one on a GPU, ``--snapshot`` one of the virtual
GPU. Both have all blocks at the end and, after ``_record_memory_history()``, what has happened
before, with the lines that asked for it. So the past can be played back, up to the moment with most
memory.

A snapshot does not say what memory is for. It is told by who asked, the innermost line that says
something: these rules are the same for a real GPU and for the virtual one, for minifsdp and for
PyTorch's FSDP. Pickles of strangers may run code when they are loaded; these have only numbers,
texts and containers in them, and nothing else is loaded. No torch in here.
"""

import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Frames = list[dict[str, Any]]
Snapshot = dict[str, Any]

ROUND = 512  # of sizes; histories have them as they were asked for
NOT_RECORDED = "asked for before the recording"
WRAPPING, GATHERED = "parameters, by wrapping", "gathered parameters"
BACKWARD, OTHERS = "backward", "other lines"
RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # what it is, files (a part of the path), functions
    ("optimizer", ("torch/optim/", "/training/optimizers.py"), ()),
    (GATHERED, ("minifsdp/core/unshard.py", "minifsdp/core/storage.py"), ()),
    (GATHERED, (), ("foreach_all_gather", "_alloc_padded_unsharded_flat_param")),
    (GATHERED, (), ("alloc_all_gather_outputs", "_all_gather_flat_param")),
    (
        "reductions",
        ("minifsdp/core/reduce.py", "minifsdp/core/gradients.py", "minifsdp/no_sync.py"),
        (),
    ),
    ("reductions", (), ("foreach_reduce", "_reduce_grad", "_post_backward_hook")),
    (WRAPPING, ("minifsdp/wrapping/", "minifsdp/core/shard.py", "minifsdp/core/flatten.py"), ()),
    (WRAPPING, ("minifsdp/featured_unit.py", "fsdp/_init_utils.py", "_fsdp_param.py"), ()),
    ("forward", (), ("forward",)),
    (BACKWARD, (), ("backward", "_engine_run_backward")),
    ("parameters, by the model", (), ("__init__",)),
)
"""By file or by function, each for frames from the innermost outwards."""


class _Plain(pickle.Unpickler):
    """Containers, numbers and texts; no classes, no functions, so that nothing is run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module}.{name} in it")


class Peak(NamedTuple):
    """Memory in bytes, when most of it was allocated. ``asked`` adds up to ``allocated``."""

    reserved: int  # by the end of that moment; at another one it may have been more
    allocated: int
    asked: dict[str, int]


def read(path: str | Path) -> Snapshot:
    """A snapshot from a file.

    Raises:
        ValueError: there is none in it, or something else.
    """
    try:
        with Path(path).open("rb") as file:
            found: Snapshot = _Plain(file).load()
    except OSError as error:
        raise ValueError(f"--against: cannot read {str(path)!r}: {error.strerror}") from error
    except Exception as error:  # a pickle that is none may raise anything
        raise ValueError(f"--against: {str(path)!r} is no snapshot: {_line(error)}") from error
    try:
        peak(found)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise ValueError(
            f"--against: {str(path)!r} is no snapshot, as torch.cuda.memory._dump_snapshot writes "
            f"({_line(error)})"
        ) from error
    return found


def peak(snapshot: Snapshot) -> Peak:
    """The moment with most memory, of the device that has most of it at the end.

    Without a history that is the end, and nobody knows who has asked.
    """
    reserved = Counter[int]()
    for segment in snapshot["segments"]:
        reserved[segment["device"]] += segment["total_size"]
    device = max(reserved, key=lambda device: reserved[device], default=0)
    traces = snapshot["device_traces"]
    history = traces[device] if device < len(traces) else []
    alive = _at_the_beginning(snapshot, device, history)
    level = highest = sum(size for size, _ in alive.values())
    place = 0
    for number, event in enumerate(history):
        level += _change(event, "alloc", "free_requested")
        if level > highest:
            highest, place = level, number + 1
    for event in history[:place]:
        if event["action"] == "alloc":
            alive[event["addr"]] = _rounded(event["size"]), event.get("frames")
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    later = sum(_change(event, *what) for event in history[place:] for what in SEGMENTS)
    asked = Counter[str]()
    for size, frames in alive.values():
        asked[_asked_by(frames)] += size
    return Peak(reserved[device] - later, highest, dict(asked))


SEGMENTS = (("segment_alloc", "segment_free"), ("segment_map", "segment_unmap"))
Alive = dict[int, tuple[int, Frames | None]]


def _at_the_beginning(snapshot: Snapshot, device: int, history: list[dict[str, Any]]) -> Alive:
    """What was allocated before the history: what is there in the end, played backwards."""
    alive: Alive = dict(_at_the_end(snapshot["segments"], device))
    for event in reversed(history):
        if event["action"] == "alloc":
            alive.pop(event["addr"], None)
        elif event["action"] == "free_requested":
            alive[event["addr"]] = _rounded(event["size"]), None
    return alive


def _at_the_end(
    segments: Iterable[dict[str, Any]], device: int
) -> Iterator[tuple[int, tuple[int, Frames | None]]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and segment["device"] == device:
                size = block.get("requested_size", block["size"])
                yield address, (_rounded(size), block.get("frames"))
            address += block["size"]


def _change(event: dict[str, Any], more: str, less: str) -> int:
    size: int = event["size"] if event["action"] in (more, less) else 0
    return _rounded(size) if event["action"] == more else -_rounded(size)


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def _asked_by(frames: Frames | None) -> str:
    """What memory is, by the lines that have asked for it, the innermost first."""
    if frames is None:
        return NOT_RECORDED
    for frame in frames:
        file = str(frame["filename"]).replace("\\", "/")
        name = str(frame["name"])
        for what, files, functions in RULES:
            if name in functions or any(part in file for part in files):
                return what
        if "torch::autograd::Engine" in name:
            return BACKWARD
    # Autograd runs a backward in a thread of its own, without any line of Python.
    return OTHERS if frames else BACKWARD


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
