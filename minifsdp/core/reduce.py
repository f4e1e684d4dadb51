"""Reduce: from each rank's gradient of a unit to this rank's shard of their mean.

Every rank has computed with other data, so each has a different gradient of the unsharded flat
parameter. The optimizer of a rank needs their mean, and of that only its own shard::

    rank 0   [a0 b0]                      rank 0   mean(a0, a1)
    rank 1   [a1 b1]   reduce-scatter ->  rank 1   mean(b0, b1)

A reduction goes through *stages*, one after the other. Which ones, whoever makes the unit chooses::

    FULL_SHARD      reduce-scatter
    NO_SHARD        all-reduce: a rank that has all parameters needs all of the mean
    HYBRID_SHARD    reduce-scatter in the group that shares the parameters, and then all-reduce of a
                    shard over the ranks that have the same shard
    the longest     cast, reduce-scatter, all-reduce, download to the host

A stage that *travels* takes time, in which the backward goes on. The stage after it is started when
the gradient of the next unit is complete, so that the computation hides all of them (gradients.py).

Until the first of these stages is complete a reduction needs memory for the gradient that is sent,
and for what other ranks send, where the result will be. The computation waits for this stage before
the next reduction starts. So there is at most one such set of memory, and the gradient that is
being computed. It does not wait for the later stages, which wait for each other on their streams.

Source: Rajbhandari et al., "ZeRO", arXiv:1910.02054.
"""

from functools import partial
from typing import Any, Protocol

from torch import Tensor

from .streams import Finish, Stream, Streams
from .unit import Unit


class Stage(Protocol):
    """One stage of a reduction.

    Attributes:
        stream: the name of the one that it runs on; see :class:`~minifsdp.core.streams.Streams`.
        travels: the backward goes on meanwhile. What does not travel is done in one piece with the
            stage after it, on the stream of that one.
        on_host: its result is in the host's memory, and not on the unit's device.
    """

    stream: str
    travels: bool
    on_host: bool

    def launch(self, unit: Any, value: Any) -> tuple[Any, Finish]:
        """Start, on the stream.

        Args:
            unit: whose gradient it is.
            value: the result of the stage before; of the first one the gradient, as
                :class:`Reduction` gets it. It may be overwritten.

        Returns:
            The result, which has its values after ``finish``; and ``finish``. What the last stage
            returns is shaped as ``unit.padded_shard``, in the dtype of the reduction, on the unit's
            device or on the host.
        """


NAMES = {"reduce": "reduce", "replicate": "all-reduce", "download": "download"}
"""What profiles call a stage, by its stream."""


class ReduceScatter:
    """The mean over the ranks that share the unit, of which this rank keeps its shard."""

    stream, travels, on_host = "reduce", True, False

    def launch(self, unit: Unit, value: Any) -> tuple[Tensor, Finish]:
        """``value``: ``[padded_numel]``, on the unit's device. See :class:`Stage`."""
        total, finish = unit.comm.reduce_scatter(unit, value, 1 / unit.shard_world_size)
        return total, finish


class AllReduce:
    """The mean over the ranks that have the same shard, in place, as one collective.

    Args:
        stream: the one that it runs on.
    """

    travels, on_host = True, False

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def launch(self, unit: Unit, value: Tensor) -> tuple[Tensor, Finish]:
        """``value``: shaped as ``unit.padded_shard``, on the unit's device; written. See
        :class:`Stage`."""
        replicas = unit.replicate_group
        assert replicas is not None
        return value, unit.comm.all_reduce(unit, value, 1 / replicas.size(), replicas)


class Reduction:
    """One gradient on its way through the stages of its unit.

    Args:
        unit: whose gradient it is.
        grad: the gradient of ``unit.unsharded.flat_param``, ``[padded_numel]``, in its dtype, as
            the unit's views give it (views.py). A tensor may be overwritten.
        streams: of the unit's device. The compute stream writes ``grad``.

    Attributes:
        value: what the last stage has returned, of those that were launched; at first ``grad``.
        event: when it is passed, all stages that were started are complete.
        sent: what the first stage that travels, and those before it, read; then None.
    """

    def __init__(self, unit: Unit, grad: Any, streams: Streams) -> None:
        self.unit: Any = unit
        self._streams = streams
        self.value: Any = grad
        self.event = streams.compute.record_event()  # passed when grad is written
        self.sent: list[Any] | None = []
        self._left: list[Stage] = [*unit.stages]

    def start(self) -> None:
        """Start the stages that are left, up to the next one that travels, as one piece of work on
        the stream of that one."""
        stages = [self._left.pop(0)]
        while self._left and not stages[-1].travels:
            stages.append(self._left.pop(0))
        name = stages[-1].stream
        stream: Stream = getattr(self._streams, name)
        # Without this wait a stage would read what the backward, or the stage before, has yet to
        # write.
        stream.wait_event(self.event)
        label = f"{NAMES[name]} {self.unit.label}"
        self.event = stream.submit(partial(self._launch, stages), label)

    def _launch(self, stages: list[Stage]) -> Finish:
        for stage in stages:
            if self.sent is not None:
                # Referred to until it is sent: otherwise the memory could be given to another
                # tensor while the stream, or another rank, still reads it.
                self.sent.append(self.value)
            self.value, finish = stage.launch(self.unit, self.value)
        return finish

    def advance(self) -> bool:
        """Go one stage further. After the first stage this lets the compute stream wait for it, and
        lets go of what was sent.

        Returns:
            Whether stages are left.
        """
        if self.sent is not None:
            # Without this wait the next reduction would start before this one is sent, and they
            # would pile up behind a slow network.
            self.event.wait()
            self.sent = None
        if self._left:
            self.start()
        return self._left != []

    def wait_for_result(self) -> None:
        """Wait for the last stage: the compute stream waits or, if the result is on the host, which
        adds it to others itself, the host."""
        if self.unit.stages[-1].on_host:
            # Without this wait the host would read a gradient that has not arrived.
            self.event.synchronize()
        else:
            self.event.wait()


def store_gradient(reduction: Reduction) -> None:
    """Add the result of a reduction to the gradient of the sharded flat parameter, in place: a
    program may hold that tensor.

    This is done for all units at the end of a backward, so that a backward that failed changes no
    gradient.
    """
    shard = reduction.unit.sharded_flat_param
    # ``grad_dtype`` is that of the shard or, with keep_low_precision_grads, ``param_dtype``.
    grad, before = reduction.value[: shard.numel()].to(shard.grad_dtype), shard.grad
    # Assigned in both cases: in rows this shows it in each DTensor, also where one was cleared.
    shard.grad = grad if before is None else before.add_(grad)
