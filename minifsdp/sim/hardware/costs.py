"""What things take: kernels, collectives, copies, the host.

**Kernels** by the roofline: one takes as long as its arithmetic, or as long as its bytes, whichever
is longer, and never less than a few microseconds. How fast arithmetic goes depends on its kind and
shape. A product is cut into tiles of 128 x 128 results, shared out among the multiprocessors in
waves; the last wave may leave many idle, and each tile takes time to begin and to end. Beside a
collective a kernel is slower: NCCL computes and copies on some of the same multiprocessors.

**Collectives** on few nodes are rings, by alpha and beta: each step has a latency (alpha) and moves
a chunk at a bandwidth (1 / beta). Of ``n`` ranks each sends ``n - 1`` chunks; an all-reduce does so
twice. For the bandwidth the slowest link decides: within a node that of its GPUs, else the node's
network, which its GPUs share. For the latency it is the way of one chunk around the ring, on which
few steps leave a node. On many nodes NCCL chooses among rings and trees, and there is other
traffic: see collectives.py.

**The host** by constants: so much for each kernel, so much for each of the engine's moments.

Sources: Williams et al., "Roofline", CACM 2009; NVIDIA, "Matrix Multiplication Background User's
Guide" (tiles and waves); NCCL's performance notes (``doc/PERFORMANCE.md`` of nccl-tests) for the
rings. Kernels beside collectives: 18.9 % slower on average (a study of overlap on GPUs of two
makers, 2025). Figures of GPUs are in gpus.py.

**Memory** that is not PyTorch's: CUDA's context and NCCL take 0.5 and 1 to 1.5 GiB (Bekman,
"Machine Learning Engineering"). cuBLAS's workspace, of 8 MiB and on Hopper 32 (torch's
``CUDABlas.cpp``), is counted with them. A further group of NCCL has buffers of its own: for each of
24 channels one to send and one to receive, of 4 MiB for Simple (NCCL_BUFFSIZE) and about 5 MiB for
LL and LL128.

**Stragglers.** All GPUs wait for the slowest at each collective, and the more there are, the slower
it is. A GPU's time to compute the same is taken to be normal, with a spread of ``straggling``; the
maximum of N is about sqrt(2 ln N) spreads above the mean. The spread is *fitted*: published runs of
MPT-125M, 1B and 70B lose 0 to 3 % from 8 to 128 GPUs, and from 64 to 512.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import ceil, log, sqrt
from typing import NamedTuple

import torch
import torch.distributed as dist

from minifsdp.sim.calls import Call, nbytes
from minifsdp.sim.hardware.collectives import Group
from minifsdp.sim.hardware.gpus import GB, GiB, Gpu
from minifsdp.sim.hardware.kernels import (
    ATTENTION,
    ATTENTION_BACKWARD,
    PASS,
    PRODUCT,
    Kernel,
    kernel_of,
)

MICRO = 1e-6
SHORTEST = 256
"""Steps along the inner size of a product below which it is not cut."""
SMALL_HEADS = 0.85
"""Attention with heads below 128, to that with 128: softmax is a larger part of it."""
BACKWARD = 0.85
"""Attention's backward to its forward: 63 and 73 % of the peak, FlashAttention-2."""
TRITON = {ATTENTION: 1 / 1.4, ATTENTION_BACKWARD: 1 / 2}
"""Speed of the kernel in Triton, to FlashAttention-2's, which is 1.3 to 1.5 times as fast forward
and about twice as fast backward (arXiv:2307.08691, section 4.1). Measured there on an A100, and
taken for every GPU."""
PORT = 12.5 * GB
"""A message leaves a node through one port, and none is slower than this: 100 Gbit/s."""
CHOSEN_BY = 32
"""GPUs of a run by which shares were chosen; about the median."""


class Cost(NamedTuple):
    """What an operator takes."""

    seconds: float
    flops: float = 0.0  # as they are counted for publication
    sent: float = 0.0  # bytes, to other ranks
    group: str = ""  # of a collective: the name of its process group


@dataclass(frozen=True)
class Cluster:
    """Nodes with GPUs, and the constants of everything around them. Times are in seconds."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    network: float = 50 * GB  # of a node, bytes / s in one direction; 400 Gbit/s
    alpha_node: float = 3 * MICRO  # a step of a ring within a node
    alpha_network: float = 12 * MICRO  # one that leaves it
    links_reached: float = 0.8  # of what links and network could do
    queued: float = 0.5e6  # bytes of others before each message between nodes; see collectives.py
    quiet: int = 4  # nodes that share a switch, where there are none
    straggling: float = 0.02  # spread of GPUs' speeds, as a share of their mean
    beside_collectives: float = 0.84  # speed of a kernel while a collective runs
    host_memory: float = 300 * GB  # a node's, bytes / s, shared by its GPUs' processes
    taken: int = int(1.5 * GiB)  # of a GPU's memory, by CUDA, cuBLAS and NCCL's first group
    taken_by_group: int = int(0.42 * GiB)  # and by each further group that communicates
    kernel: float = 2 * MICRO  # the shortest
    launch: float = 6 * MICRO  # the host, for each kernel
    moment: float = 40 * MICRO  # the host, for each piece of work that the engine submits
    launch_queue: int = 1024
    triton: bool = False  # attention is the kernel in Triton, not FlashAttention-2
    host_computes: bool = False  # it does what it launches itself, and then goes on: a CPU
    cuda_malloc: float = 300 * MICRO
    cuda_free: float = 300 * MICRO
    alloc: str = ""  # as PYTORCH_ALLOC_CONF; see memory/alloc_conf.py

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def capacity(self) -> int:
        """Bytes that PyTorch can reserve."""
        return max(self.gpu.memory - self.taken, 0)

    def cost(self, call: Call, by_host: bool, crosses: bool) -> Cost:
        """Of an operator, if nothing runs beside it.

        Args:
            by_host: the host does it in its own memory.
            crosses: it copies between the GPU and the host's memory.
        """
        if by_host:
            return Cost(self.host_seconds(call.moved))
        if call.operation.namespace == "c10d":
            return self._collective(call)
        if crosses:
            return Cost(self.copy_seconds(call.moved // 2))  # read here, written there
        kernel = kernel_of(call)
        return Cost(self.kernel_seconds(kernel) * self.slowest(), kernel.flops)

    def _collective(self, call: Call) -> Cost:
        boxed = next(arg for arg in call.args if isinstance(arg, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        ranks = dist.get_process_group_ranks(group)
        sent = max(map(nbytes, call.used)) * (len(ranks) - 1) / len(ranks)
        rounds = 2 if "allreduce" in call.name else 1
        seconds = self.collective_seconds(sent, ranks, rounds)
        return Cost(seconds, sent=sent * rounds, group=group.group_name)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """A kernel that has the GPU to itself."""
        passes = kernel.moved / (self.gpu.bandwidth * self.gpu.passes)
        if kernel.kind == PASS:
            return max(passes, self.kernel)
        flops, large = self._peak(kernel)
        return max(kernel.done / (flops * self._share(kernel, large)), passes, self.kernel)

    def slowest(self) -> float:
        """How much longer the slowest GPU of all takes, for which the others wait, than that of a
        run by which the shares in gpus.py were chosen."""
        return 1 + self.straggling * max(maximum(self.world_size) - maximum(CHOSEN_BY), 0.0)

    def _peak(self, kernel: Kernel) -> tuple[float, float]:
        """The data sheet's flops for this kind of number, and the share that large ones reach."""
        gpu, product = self.gpu, kernel.kind == PRODUCT
        if kernel.low:
            return gpu.flops, gpu.products if product else gpu.attention
        if kernel.tf32 and product:  # attention does not ask for it
            return gpu.flops_tf32, gpu.products_tf32
        return gpu.flops_fp32, gpu.products_fp32 if product else gpu.attention_fp32

    def _share(self, kernel: Kernel, large: float) -> float:
        """Of the data sheet's flops, those that arithmetic of this shape reaches."""
        *_, keys, inner = kernel.shape
        if kernel.kind == PRODUCT:
            begun = inner / (inner + self.gpu.tile_overhead)
            return large * filled(kernel, self.gpu.tile, self.gpu.multiprocessors) * begun
        begun = keys / (keys + self.gpu.row_overhead)
        speed = relative_speed(kernel) * (TRITON[kernel.kind] if self.triton else 1.0)
        return large * speed * begun

    def collective_seconds(self, sent: float, ranks: list[int], rounds: int = 1) -> float:
        """A collective over ``ranks``: on few nodes a ring, on many what NCCL would pick.

        Args:
            sent: bytes that a rank sends in a round of a ring.
            rounds: 2 for an all-reduce, else 1.
        """
        nodes, together = spread(tuple(ranks), self.gpus_per_node)
        if nodes <= self.quiet:
            return self.ring_seconds(sent, ranks, rounds)
        rings = max(self.gpus_per_node // together, 1)
        bandwidth = min(self.gpu.links, self.network / rings) * self.links_reached
        port = min(max(self.network / self.gpus_per_node, PORT), self.network) * self.links_reached
        wait = (1 - self.quiet / nodes) * self.queued / port
        alphas = self.alpha_node, self.alpha_network
        group = Group(nodes, together, bandwidth, *alphas, wait)
        return group.seconds(sent, rounds)

    def ring_seconds(self, sent: float, ranks: list[int], rounds: int = 1) -> float:
        """A ring over ``ranks``, with NCCL's protocol for large messages and no other traffic: each
        sends ``sent`` bytes in a round."""
        if len(ranks) < 2:
            return self.kernel
        nodes, together = spread(tuple(ranks), self.gpus_per_node)
        steps, crossings, bandwidth = len(ranks) - 1, 0, self.gpu.links
        if nodes > 1:
            # A ring crosses into each node once. But if each node has k of the ranks that do the
            # same at once in other groups, they share its network.
            crossings = min(nodes, steps)
            rings = self.gpus_per_node // together
            bandwidth = min(bandwidth, self.network / max(rings, 1))
        # A piece goes once around the ring: over the network once for each node, else within them.
        latency = crossings * self.alpha_network + (steps - crossings) * self.alpha_node
        return rounds * (latency + sent / (bandwidth * self.links_reached))

    def copy_seconds(self, moved: int) -> float:
        """A copy between the GPU and the host's memory."""
        return max(moved / (self.gpu.pcie * self.links_reached), self.kernel)

    def host_seconds(self, moved: int) -> float:
        """Work of the host in its own memory, while the other processes of the node do the same."""
        return max(moved * self.gpus_per_node / self.host_memory, self.kernel)


def maximum(count: int) -> float:
    """Of so many normal figures, in standard deviations; about what it is for many of them."""
    return sqrt(2 * log(count))


@cache  # of thousands of ranks, for every collective of a run
def spread(ranks: tuple[int, ...], gpus_per_node: int) -> tuple[int, int]:
    """How many nodes some ranks are on, and how many of them are on the same one at most."""
    by_node = Counter(rank // gpus_per_node for rank in ranks)
    return len(by_node), max(by_node.values())


def filled(kernel: Kernel, tile: int, multiprocessors: int) -> float:
    """Of the multiprocessors' work for a product, the share that is in the area of whole tiles and
    in whole waves."""
    products, rows, columns, inner = kernel.shape
    tiles = products * ceil(rows / tile) * ceil(columns / tile)
    used = products * rows * columns / (tiles * tile**2)
    waves = tiles / multiprocessors
    if waves < 1:  # then each product is also cut along its inner size
        waves *= max(min(int(1 / waves), inner // SHORTEST), 1)
    return used * waves / ceil(waves)


def relative_speed(kernel: Kernel) -> float:
    """Of attention, to a forward with heads of 128."""
    heads = 1.0 if kernel.shape[3] >= 128 else SMALL_HEADS
    return heads * (BACKWARD if kernel.kind == ATTENTION_BACKWARD else 1.0)
