"""What things take: the only place with numbers about hardware.

**Operators** by the roofline: a kernel takes as long as its arithmetic, or as long as its bytes,
whichever is longer, and never less than a few microseconds. The arithmetic is counted by torch's
own flop counter (matrix products, convolutions, attention); for all else bytes decide.

**Collectives** by alpha and beta: each step of a ring has a latency (alpha) and moves a chunk at a
bandwidth (1 / beta). Of ``n`` ranks each sends ``n - 1`` chunks; an all-reduce does so twice. For
the bandwidth the slowest link decides: within a node that of its GPUs, else the node's network,
which its GPUs share. For the latency it is the way of one chunk around the ring, on which few steps
leave a node (as in NCCL's own estimate, ``src/graph/tuning.cc``).

**The host** by constants: so much for each kernel, so much for each of the engine's moments.

Sources: data sheets of NVIDIA's A100 (40 and 80 GB), H100 and H200 SXM (dense rates); Williams et
al., "Roofline", CACM 2009; NCCL's performance notes (``doc/PERFORMANCE.md`` of nccl-tests) for the
rings. What a real kernel reaches of a data sheet (``efficiency``), and the host's constants, are
round numbers, the same for every model: nothing is fitted to a result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

GB, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory: int  # bytes that a process may reserve
    bandwidth: float  # of its memory, bytes / s
    flops: float  # of matrix products in 16 bits, per second
    flops_fp32: float  # and in 32, with TF32 as torch has it by default: off
    links: float  # to the other GPUs of its node, bytes / s in one direction
    pcie: float = 25 * GB  # to the host's memory, bytes / s in one direction


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 40 * 1024**3, 1555 * GB, 312 * TERA, 19.5 * TERA, 300 * GB),
        Gpu("a100-80", 80 * 1024**3, 2039 * GB, 312 * TERA, 19.5 * TERA, 300 * GB),
        Gpu("h100", 80 * 1024**3, 3350 * GB, 989 * TERA, 67 * TERA, 450 * GB, 50 * GB),
        Gpu("h200", 141 * 10**9, 4800 * GB, 989 * TERA, 67 * TERA, 450 * GB, 50 * GB),
    )
}


@dataclass(frozen=True)
class Cluster:
    """Nodes with GPUs, and the constants of everything around them. Times are in seconds."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    network: float = 50 * GB  # of a node, bytes / s in one direction; 400 Gbit/s
    alpha_node: float = 3 * MICRO  # a step of a ring within a node
    alpha_network: float = 12 * MICRO  # one that leaves it
    efficiency: float = 0.6  # of matrix products, against the data sheet
    efficiency_bytes: float = 0.8  # of memory and links
    kernel: float = 2 * MICRO  # the shortest
    launch: float = 6 * MICRO  # the host, for each kernel
    moment: float = 40 * MICRO  # the host, for each piece of work that the engine submits
    launch_queue: int = 1024
    cuda_malloc: float = 300 * MICRO
    cuda_free: float = 300 * MICRO
    alloc: str = ""  # as PYTORCH_CUDA_ALLOC_CONF; see alloc_conf.py

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    def kernel_seconds(self, flops: float, moved: int, low: bool) -> float:
        """An operator.

        Args:
            flops: additions and multiplications.
            moved: bytes read and written.
            low: it computes in 16 bits.
        """
        rate = self.gpu.flops if low else self.gpu.flops_fp32
        arithmetic = flops / (rate * self.efficiency)
        return max(arithmetic, moved / (self.gpu.bandwidth * self.efficiency_bytes), self.kernel)

    def ring_seconds(self, sent: float, ranks: list[int], rounds: int = 1) -> float:
        """A collective over ``ranks``: each sends ``sent`` bytes in a round."""
        if len(ranks) < 2:
            return self.kernel
        by_node: dict[int, int] = {}
        for rank in ranks:
            node = rank // self.gpus_per_node
            by_node[node] = by_node.get(node, 0) + 1
        steps, crossings, bandwidth = len(ranks) - 1, 0, self.gpu.links
        if len(by_node) > 1:
            # A ring crosses into each node once. But if each node has k of the ranks that do the
            # same at once in other groups, they share its network.
            crossings = min(len(by_node), steps)
            rings = self.gpus_per_node // max(by_node.values())
            bandwidth = min(bandwidth, self.network / max(rings, 1))
        # A piece goes once around the ring: over the network once for each node, else within them.
        latency = crossings * self.alpha_network + (steps - crossings) * self.alpha_node
        return rounds * (latency + sent / (bandwidth * self.efficiency_bytes))

    def copy_seconds(self, moved: int) -> float:
        """A copy from or to the host's memory."""
        return max(moved / (self.gpu.pcie * self.efficiency_bytes), self.kernel)


def preset(name: str) -> Gpu:
    """A GPU by its name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in GPUS:
        raise ValueError(f"gpu={name!r} is not known. There are: {', '.join(GPUS)}.")
    return GPUS[name]


def count_flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Of one operator, by torch's counter; 0 where it does not count."""
    formula: Callable[..., int] | None = flop_registry.get(operation.overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def nbytes(tensor: Tensor) -> int:
    """That a kernel reads or writes of it. What is expanded is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize if tensor.numel() else 0


def is_low(tensors: list[Tensor]) -> bool:
    """Whether a kernel computes in 16 bits."""
    return any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
