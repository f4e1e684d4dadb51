"""FSDP2's way: the host never waits. Memory is used again in the order of the streams.

::

    unshard   | gather 1 | gather 2 |            | gather 3 |           forward: after copy 1
    compute              | copy 1, forward 1     | copy 2, forward 2 |

An all-gather has memory of its own, of the unshard stream. Before a unit computes, the compute
stream copies the parameters from there into memory of its own, and that is what a reshard frees. So
each memory is written and freed in the order of one stream; there is no ``record_stream``, nothing
that the allocator has to wait for, and no limiter. What holds gathers back is a wait among streams:

- In the forward the next gather is asked for before a unit computes, and waits for the copy before
  the last. Two gathered units may be there, and the one that computes.
- In the backward the next unit is gathered when this one has been copied. One gathered unit is
  there, and the one that computes.

Here a unit is a flat chunk, so that one copy stands for FSDP2's one for each parameter; its copy of
the shard into what is sent has no stream of its own. Gradients are reduced as by our own engine,
where the compute stream waits for the last reduction before it begins the next, as FSDP2's does.

Source: torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` (``unshard``,
``wait_for_unshard``, ``pre_backward``) and its note "Overlapping all-gather copy-in and
all-gather".
"""

from typing import Any

import torch
from torch import Tensor

from minifsdp.core.parameters import Parameters
from minifsdp.core.streams import Event, Finish
from minifsdp.core.unit import Unit
from minifsdp.core.unit_state import TrainingState
from minifsdp.core.unshard import unshard


class StreamOrdered(Parameters):
    """Gathers into memory of the unshard stream, and copies from there on the compute stream."""

    _unit: Unit | None = None  # that is about to compute
    _copied: tuple[Tensor, Event] | None = None  # gathered memory, and when it has been read

    def unshard(self, unit: Unit, reason: str) -> None:
        self._unit = unit
        super().unshard(unit, reason)

    def prefetch(self, target: Any) -> None:
        pending = self._unit.unshard_event if self._unit is not None else None
        if isinstance(pending, CopyOut):
            pending.next = target  # FSDP2 asks for it when this unit has been copied
        else:
            super().prefetch(target)

    def gather(self, unit: Any) -> None:
        streams, source, dtype = self.streams, unit.source, unit.unsharded.dtype
        group = source.group
        if group is None:  # it is all here
            unshard(unit, streams)
            return
        unit.state.start_unshard()
        source.prepare(unit, streams)
        gathered: list[Tensor] = []

        def launch() -> Finish:
            gathered.append(torch.empty(unit.layout.padded_numel, dtype=dtype, device=unit.device))
            shard = source.tensor(unit, streams)
            finish: Finish = unit.comm.all_gather(unit, gathered[0], shard, group)
            return finish

        event = streams.unshard.submit(launch, f"all-gather {unit.label}")
        unit.unshard_event = CopyOut(self, unit, gathered.pop(), event)

    def copy_out(self, unit: Unit, gathered: Tensor, event: Event) -> None:
        """The unit is needed now: from the unshard stream's memory to the compute stream's."""
        backward = unit.state.training is TrainingState.PRE_BACKWARD
        if not backward:
            self.let_go()  # of the one before, so that the next gather can overlap this copy
        event.wait()
        unit.unsharded.allocate()
        unit.unsharded.data.copy_(gathered)
        self._copied = gathered, self.streams.compute.record_event()
        if backward:
            self.let_go()

    def let_go(self) -> None:
        """Free what has been copied. Gathers that come will wait for the copy: without that wait
        they could write to this memory before it has been read."""
        if self._copied is not None:
            self.streams.unshard.wait_event(self._copied[1])
            self._copied = None


class CopyOut:
    """The event that a unit's parameters are there. To wait for it is to copy them."""

    def __init__(self, parameters: StreamOrdered, unit: Unit, data: Tensor, event: Event) -> None:
        self._parameters, self._unit, self._event = parameters, unit, event
        self._gathered: Tensor | None = data
        self.next: Any = None  # to be gathered after that

    def wait(self) -> None:
        gathered, self._gathered = self._gathered, None
        assert gathered is not None
        self._parameters.copy_out(self._unit, gathered, self._event)
        del gathered
        Parameters.prefetch(self._parameters, self.next)

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return self._event.query()
