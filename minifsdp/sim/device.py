"""The virtual GPU: real code above it, virtual time below.

torch lets a *dispatch mode* see every operator just before it runs. This one lets it run, on
tensors without memory (``meta``) or on small real ones, and then asks what it would have cost:

- its seconds (hardware/costs.py) on the stream that is current (hardware/clock.py),
- memory for what it made (memory/allocator.py), until Python lets go of that,
- a line on the tape (tape.py): which memory was read and written, on which stream.

The engine finds streams here as it finds them on any device. It cannot tell the difference, so what
is seen here is what the engine does, and not what somebody believes that it does.
"""

import json
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp.core.outputs import tensors_in
from minifsdp.sim.calls import NO_WORK, Call, accesses, nbytes
from minifsdp.sim.figures.memory_report import peak_report
from minifsdp.sim.figures.report import report
from minifsdp.sim.hardware.clock import Clock
from minifsdp.sim.hardware.costs import Cluster, Cost
from minifsdp.sim.hardware.fusion import Fusion
from minifsdp.sim.memory.alloc_conf import parse
from minifsdp.sim.memory.allocator import Allocator
from minifsdp.sim.races import Race, find_races
from minifsdp.sim.results import ITEM, Results
from minifsdp.sim.storages import Storages
from minifsdp.sim.tape import COMPUTE, HOST, Buffer, Entry, Note, Op, Phase, Use, Wait, caller
from minifsdp.sim.views.html import html
from minifsdp.sim.views.timeline import svg
from minifsdp.sim.views.trace import chrome_trace, memory_snapshot


class VirtualGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One GPU of a cluster; all others do the same. Active inside of a ``with`` block.

    Args:
        cluster: what it is and what is around it.
        kind: tensors on this device are in its memory: ``"meta"``, or ``"cpu"`` for small real
            ones. With ``"meta"`` what is on the CPU is in the host's memory.
    """

    sees_engine = True  # see dispatch_modes.py

    def __init__(self, cluster: Cluster, kind: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cluster, self.kind = cluster, kind
        self.clock = Clock(cluster.launch_queue, cluster.beside_collectives)
        costs = cluster.cuda_malloc, cluster.cuda_free
        self.allocator = Allocator(self.clock, cluster.capacity, *costs, parse(cluster.alloc))
        self.tape: list[Entry] = []
        self.storages = Storages(self.allocator, self.tape, kind)
        self._results = Results()
        self._current, self._label, self._running = COMPUTE, "", ""
        self._fusion: Fusion | None = None

    def step(self) -> None:
        """A training step ends here: reports are of the last one."""
        self.tape.append(Note(max(self.clock.now, self.clock.idle_at())))

    def phase(self, name: str) -> None:
        """What follows is the forward, the backward or the optimizer, for reports and pictures."""
        now = self.clock.now
        self.tape.append(Phase(name, now, max(now, self.clock.lane(COMPUTE).idle_at)))

    def tag(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Say what tensors are, for reports: "parameters", "gradients" or "optimizer"."""
        self.storages.tag(kind, tensors)

    def report(self) -> dict[str, Any]:
        """Figures of the last step; see figures/report.py and memory_report.py there. And how often
        the allocator has asked for memory since the beginning, and had to wait and give back first.
        """
        counts = {"cudaMallocs": self.allocator.mallocs, "retries": self.allocator.retries}
        return {**report(self.tape), **peak_report(self.tape), **counts}

    def races(self) -> list[Race]:
        """Waits that are missing; see races.py."""
        return find_races(self.tape)

    def timeline(self, path: str | Path, title: str = "") -> None:
        """Draw the last step, as an SVG; see views/timeline.py."""
        Path(path).write_text(svg({title: self.tape}))

    def html(
        self, path: str | Path, title: str = "", figures: dict[str, Any] | None = None
    ) -> None:
        """Write the last step as a page to look around in; see views/html.py."""
        Path(path).write_text(html(self.tape, figures or self.report(), title))

    def trace(self, path: str | Path) -> None:
        """Write everything since the beginning for Perfetto; see views/trace.py."""
        Path(path).write_text(json.dumps(chrome_trace(self.tape)))

    def snapshot(self, path: str | Path) -> None:
        """Write the memory and its history for torch's viewer; see views/trace.py."""
        history = memory_snapshot(self.allocator, self.storages.frames or {})
        Path(path).write_bytes(pickle.dumps(history))

    def record_memory_history(self) -> None:
        """From now on note which lines of Python ask for memory, for :meth:`snapshot`. Takes time;
        as ``torch.cuda.memory._record_memory_history()``."""
        self.storages.frames = {}

    def synchronize(self) -> None:
        """As ``torch.cuda.synchronize()``."""
        launched = self.clock.now
        self.clock.block(self.clock.idle_at())
        self.tape.append(Wait(HOST, None, launched, self.clock.now, caller()))

    @contextmanager
    def on(self, stream: str, label: str = "") -> Iterator[None]:
        """Inside, work is launched on this stream."""
        before = self._current, self._label
        self._current, self._label = stream, label
        try:
            yield
        finally:
            self._current, self._label = before

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Inside, what a model does is charged as the kernels that ``torch.compile`` makes of it;
        see hardware/fusion.py. For the forward, and once more for the backward."""
        self._fusion = Fusion(self.cluster)
        try:
            yield
        finally:
            self._fusion = None

    def buffer(self, tensor: Tensor) -> Buffer:
        """The memory that a tensor is in; it is allocated, if that has not happened yet."""
        return self.storages.buffer(tensor, self._current, self._label or self._running)

    def in_host_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is not on the device."""
        return self.buffer(tensor).owner == HOST

    def host_memory(self, tensor: Tensor) -> Tensor:
        """Have ``tensor`` count as memory of the host."""
        self.storages.replace(tensor.untyped_storage(), HOST, self._label or self._running)
        return tensor

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has been grown, or shrunk to nothing."""
        self.storages.replace(storage, self._current, self._label)

    def record_stream(self, tensor: Tensor, stream: str) -> None:
        """As ``tensor.record_stream(stream)``."""
        self.tape.append(Use(self.storages.record_stream(tensor, stream), stream, caller()))

    # ------------------------------------------------------------------------------- operators

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again, with what this rank has of each
        kwargs = kwargs or {}
        if operation.namespace == "profiler" or active_fake_mode() is not None:
            # In a fake mode DTensor only asks what a result would look like.
            return operation(*args, **kwargs)
        read, written = accesses(operation, args, kwargs)
        if self.kind == "meta":
            result = self._results.of(operation, args, kwargs, read, written)
        else:
            result = operation(*args, **kwargs)
        made = [tensor for tensor in tensors_in(result) if not self.storages.knows(tensor)]
        if operation is ITEM:
            if not all(self.in_host_memory(tensor) for tensor in read):
                self.synchronize()
        elif made or written:  # else all that it returns are views
            self._charge(Call(operation, args, kwargs, read, written, made, result))
        return result

    def _charge(self, call: Call) -> None:
        """Time for an operator, memory for what it made."""
        by_host, self._running = self._is_the_hosts(call), call.name
        for tensor in call.made:
            if by_host:
                self.host_memory(tensor)
            else:
                self.buffer(tensor)
        if call.name in NO_WORK:
            return
        crosses = any(self.in_host_memory(tensor) for tensor in call.used)
        cost, launches = self._cost(call, by_host, crosses)
        if by_host:
            stream, launched = HOST, self.clock.now
            self.clock.work(cost.seconds)
            times = launched, launched, self.clock.now
        else:
            self.clock.work(self.cluster.launch * launches)
            stream, launched = self._current, self.clock.now
            times = launched, *self._launch(cost)
            if self.cluster.host_computes and stream == COMPUTE:
                self.clock.block(times[-1])
        # A tensor without elements may be in memory that was freed, and is not read.
        reads = [self.buffer(tensor) for tensor in call.read if tensor.numel()]
        writes = [self.buffer(t) for t in (*call.written, *call.made) if t.numel()]
        what = call.name, self._label, stream
        self.tape.append(Op(*what, *times, reads, writes, cost.flops, cost.sent))
        if stream == COMPUTE and crosses and call.blocks:
            self.synchronize()

    def _cost(self, call: Call, by_host: bool, crosses: bool) -> tuple[Cost, bool]:
        """What it takes, and whether the host has to launch it."""
        if self._fusion is None:
            return self.cluster.cost(call, by_host, crosses), True
        if by_host or crosses or self._label or self._current != COMPUTE:  # not the model's
            self._fusion.end()
            return self.cluster.cost(call, by_host, crosses), True
        reads, writes = (
            [(self.buffer(tensor), nbytes(tensor)) for tensor in tensors if tensor.numel()]
            for tensors in (call.read, [*call.written, *call.made])
        )
        return self._fusion.cost(call, reads, writes)

    def _is_the_hosts(self, call: Call) -> bool:
        """Whether it works on the host's memory alone and was not submitted to a stream."""
        given = [*call.read, *call.written]
        leaves = any(tensor.is_meta for tensor in call.made)  # a copy to the device
        here = bool(given) and all(self.in_host_memory(tensor) for tensor in given)
        return self._current == HOST or (here and not leaves and self._current == COMPUTE)

    def _launch(self, cost: Cost) -> tuple[float, float]:
        """On the stream that is current. NCCL does one thing at a time for each group, whatever
        streams it was asked on."""
        if not cost.group:
            return self.clock.launch(self._current, cost.seconds)
        name = f"NCCL, group {cost.group}"
        if name not in self.clock.lanes:  # it takes its buffers when it is first used
            first = not any(other.startswith("NCCL") for other in self.clock.lanes)
            self.allocator.capacity -= 0 if first else self.cluster.taken_by_group
        nccl = self.clock.lane(name)
        self.clock.wait(self._current, nccl.idle_at)
        start, nccl.idle_at = self.clock.launch_collective(self._current, cost.seconds)
        return start, nccl.idle_at
