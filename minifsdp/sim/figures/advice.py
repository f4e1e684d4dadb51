"""What would help most, by rules from the figures of one run.

A step is computation, communication that nothing hides, and time in which the device has nothing to
do. Each rule below names one setting that may make one of them shorter, and estimates by how much.
The one that saves the largest share of a sample's time is the advice. A rule whose setting needs
memory is left out where there is not enough. No other run is made; cli/plan.py makes many.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.memory_report import ACTIVATIONS, TAGS, TEMPORARY
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import COMPUTE, HOST, Buffer, Memory, Op, Phase

WORTH = 0.02
"""What saves less than this share of a sample's time is not advised."""
FULL = 0.9
"""Of the memory that is free, what may be used up by estimate."""


TIMES = ("step", "compute", "communication", "exposed communication", "overlap", "idle")


class Advice(NamedTuple):
    """One setting to change, as on the command line; ``name`` is "" if none helps."""

    why: str
    name: str = ""
    value: str = ""
    saves: float = 0.0  # share of a sample's time, estimated

    def __str__(self) -> str:
        words = self.why[:1].upper() + self.why[1:]
        if not self.name:
            return words
        return f"{words}: --{self.name} {self.value}, for about {self.saves:.0%} less time"


def advice(gpu: VirtualGpu, figures: dict[str, Any], options: argparse.Namespace) -> Advice:
    """What to change first.

    Args:
        figures: of this run: those of report.py, memory_report.py and throughput.py.
        options: its settings.
    """
    run = _Run(gpu, figures, options)
    best = max((*run.network(), *run.host(), *run.compute()), key=lambda one: one.saves)
    return best if best.saves > WORTH else run.nothing


class _Run:
    """The rules, by what they make shorter. Times are in seconds."""

    def __init__(
        self, gpu: VirtualGpu, figures: dict[str, Any], options: argparse.Namespace
    ) -> None:
        self._cluster, self._figures, self._options = gpu.cluster, figures, options
        self._needs, self._is = _needs(gpu), figures["peak allocated is"]
        self._ends = _ends(gpu)
        self._step, self._compute, self._sent, self._exposed, self._overlap, self._idle = (
            figures[name] for name in TIMES
        )
        self.nothing = Advice(
            f"it computes {self._compute / self._step:.0%} of the time, "
            f"and no one of these settings helps by much"
        )

    def network(self) -> Iterator[Advice]:
        """Communication: hide it, or have less of it."""
        o, exposed, sent = self._options, self._exposed, self._sent
        wait = f"communication keeps the GPU waiting for {self._of_step(exposed)}"
        beyond = max(sent - self._compute, 0.0)  # what could be hidden behind nothing
        could_be_hidden = max(exposed - beyond, 0.0)
        # The first gather and the last reduction, which are exposed if nothing else is, remain.
        less = exposed if beyond else exposed / 2
        gathers = o.strategy in ("full_shard", "shard_grad_op")
        if gathers and o.unit == "model":
            yield self._rule(f"{wait}, all at once", "unit", "block", could_be_hidden)
        elif gathers and o.limit == "1":
            why = f"{wait}, and no unit is gathered while another one computes"
            yield self._rule(why, "limit", "true", could_be_hidden)
        elif gathers and o.backward == "none":
            why = f"{wait}, and the backward does not gather ahead"
            yield self._rule(why, "backward", "pre", could_be_hidden / 2)
        if o.strategy == "full_shard" and self._room(self._needs["gathered"]):
            why = f"{wait}, and there is room to keep the parameters after the forward"
            yield self._rule(why, "strategy", "shard_grad_op", min(less, sent / 3))
        nodes = self._cluster.nodes
        if gathers and nodes > 1:
            # Of three passes of all parameters through a node's network (two gathers, a reduction)
            # an all-reduce of 2 (nodes - 1) / nodes is left. The gathers go over the node's links.
            passes = 3 if o.strategy == "full_shard" else 2
            left = (
                2 * (nodes - 1) / nodes / passes + self._cluster.network / self._cluster.gpu.links
            )
            state = sum(self._is.get(kind, 0) for kind in TAGS)
            if self._room((nodes - 1) * state):
                why = f"{wait}, and a node has room for all shards"
                saved = min(less, sent * (1 - left))
                yield self._rule(why, "strategy", _HYBRID[o.strategy], saved)

    def host(self) -> Iterator[Advice]:
        """Time without work: have the host launch it earlier, or less of it."""
        o, idle = self._options, self._idle
        wait = f"the GPU has nothing to do for {self._of_step(idle)}"
        chosen = o.limit != "none" and o.engine == "minifsdp"  # PyTorch's engines have no number
        if chosen and o.strategy != "no_shard":
            why = f"{wait}, and the limiter holds the host back"
            held = min(idle, self._figures["host stalls in the limiter"])
            yield self._rule(why, "limit", _MORE.get(o.limit) or str(int(o.limit) + 1), held)
        if o.unit == "part":
            yield self._rule(f"{wait}, with many units to launch", "unit", "block", idle / 2)
        if o.offload == "yes" and self._room(self._needs["on the host"]):
            yield self._rule(f"{wait}, and there is room for the shards", "offload", "no", idle)
        waiting = idle + self._exposed
        if self._room(sum(self._is.get(kind, 0) for kind in (ACTIVATIONS, TEMPORARY))):
            why = f"the GPU waits for {self._of_step(waiting)}, and more samples would share that"
            # Twice the computation also hides twice as much communication, as far as there is any
            # beside the first collective and the last one, which nothing hides.
            shown = max(self._exposed - self._overlap, min(self._exposed, self._ends))
            yield self._rule(why, "batch", str(2 * o.batch), waiting - (idle + shown) / 2)

    def compute(self) -> Iterator[Advice]:
        """Computation: not twice, and in 16 bits."""
        o, gpu = self._options, self._cluster.gpu
        yield self.nothing
        again = self._compute * (1 - self._figures["MFU"] / (self._figures["HFU"] or 1.0))
        kept = self._needs["forward"] - self._is.get(ACTIVATIONS, 0)
        if o.recompute != "none" and self._room(kept):
            why = f"activations are computed again for {self._of_step(again)}, and there is room"
            yield self._rule(why, "recompute", "none", again)
        slow = {
            "fp32": gpu.flops_fp32 * gpu.products_fp32,
            "tf32": gpu.flops_tf32 * gpu.products_tf32,
        }.get(o.precision)
        if slow is not None:
            fast = gpu.flops * gpu.products
            products = self._figures["flops"] / slow
            why = f"matrix products take {self._of_step(products)} or more in 32 bits"
            yield self._rule(why, "precision", "bf16", products * (1 - slow / fast))

    def _rule(self, why: str, name: str, value: str, seconds: float) -> Advice:
        return Advice(why, name, value, seconds / self._step)

    def _of_step(self, seconds: float) -> str:
        return f"{seconds * 1e3:,.1f} of {self._step * 1e3:,.1f} ms"

    def _room(self, more: float) -> bool:
        reserved: int = self._figures["peak reserved"]
        return more < FULL * (self._cluster.capacity - reserved)


_HYBRID = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}
_MORE = {"1": "true", "2": "true", "true": "4"}  # 3 is as true, where one unit is prefetched


def _needs(gpu: VirtualGpu) -> dict[str, int]:
    """Bytes that would be there with other settings: of all parameters gathered, of the shards that
    the host has, and of all that the forward makes."""
    phase, needs = "", {"gathered": 0, "forward": 0}
    host: set[Buffer] = set()
    for entry in last_step(gpu.tape)[0]:
        if isinstance(entry, Phase):
            phase = entry.name
        elif isinstance(entry, Op):
            host.update(b for b in (*entry.reads, *entry.writes) if b.owner == HOST and b.kind)
        elif isinstance(entry, Memory) and phase == "forward" and not entry.freed:
            needs["forward" if entry.buffer.owner == COMPUTE else "gathered"] += entry.buffer.nbytes
    return needs | {"on the host": sum(buffer.nbytes for buffer in host)}


def _ends(gpu: VirtualGpu) -> float:
    """Seconds of the first collective of the step and of the last one."""
    sent = [entry for entry in last_step(gpu.tape)[0] if isinstance(entry, Op) and entry.sent]
    return sum(op.end - op.start for op in (sent[0], sent[-1])) if sent else 0.0
