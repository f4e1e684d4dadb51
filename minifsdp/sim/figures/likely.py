"""In which range a speed probably is: the farther from published runs, the wider.

A GPU's ``error`` (hardware/gpus.py) is by how much predictions of published runs on it are off, in
three of four cases. Most of these runs are like each other: at most 16 nodes of 8 GPUs, networks of
50 to 400 Gbit/s for each GPU, texts of 512 to 8,192 tokens, products in 16 bits. For each doubling
beyond that the error counts once more, as a factor: with two of them a tenth becomes
1.1 x 1.1 x 1.1. ``make predictions`` counts, for each family of published runs, how many are in the
range that is printed with them.
"""

from math import log2

from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import Gpu

NODES, GPUS_PER_NODE = 16, 8
NETWORK = (50, 400)  # Gbit/s for each GPU
LENGTH = (512, 8192)  # tokens
FP32 = 2.0
"""No run in fp32 or TF32 was published. It counts as two doublings."""
COMPILED = 1.0
"""Published compiled runs are off by more than eager ones."""


def doublings(
    cluster: Cluster, length: int | None, precision: str, compiled: bool = False
) -> dict[str, float]:
    """How far a run is from those that were published: what differs, and by how many doublings.

    Args:
        length: tokens of a sample; None: it has none.
        precision: as of ``--precision``.
        compiled: as of ``--compile``.
    """
    gpus, nodes = cluster.gpus_per_node, cluster.nodes
    network = cluster.network * 8 / 1e9 / gpus
    found = {
        f"{nodes:,} nodes": max(log2(nodes / NODES), 0.0),
        f"{gpus} GPUs in a node": abs(log2(gpus / GPUS_PER_NODE)),
        f"{network:g} Gbit/s for each GPU": beyond(network, *NETWORK) if nodes > 1 else 0.0,
        f"texts of {length or 0:,} tokens": beyond(length, *LENGTH) if length else 0.0,
        precision: FP32 if precision in ("fp32", "tf32") else 0.0,
        "a compiled model": COMPILED * compiled,
    }
    return {what: far for what, far in found.items() if far}


def beyond(value: float, least: float, most: float) -> float:
    """How many doublings a value is outside of an interval."""
    return max(log2(least / value), log2(value / most), 0.0)


def likely(speed: float, gpu: Gpu, far: float = 0.0) -> tuple[float, float]:
    """The range in which three of four published runs on such a GPU would be.

    Args:
        speed: predicted tokens or samples per second.
        far: the sum of :func:`doublings`.
    """
    factor: float = (1 + gpu.error) ** (1 + far)
    return speed / factor, speed * factor
