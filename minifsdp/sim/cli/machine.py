"""Which GPU, and what is around it: by its name, or from a file; with what is said otherwise.

No torch in here, since options are looked at before it is imported.
"""

import argparse
from dataclasses import replace
from typing import Any

from minifsdp.sim.hardware.cluster_file import read
from minifsdp.sim.hardware.gpus import GB, GiB, Gpu, preset

GPU, NODES, GPUS_PER_NODE, NETWORK = "a100-40", 1, 8, 400
"""What there is where nobody says anything; the network in Gbit/s."""


def machine(options: argparse.Namespace) -> tuple[Gpu, dict[str, Any]]:
    """A GPU, and constants of :class:`minifsdp.sim.hardware.costs.Cluster`, with ``nodes`` and
    ``gpus_per_node``. Times are in seconds.

    Raises:
        ValueError: there are two answers, or the file is none.
    """
    if options.cluster and options.gpu is not None:
        raise ValueError(
            f"--cluster {options.cluster} says which GPU there is, and so does --gpu "
            f"{options.gpu}; give one of them"
        )
    gpu = preset(options.gpu or GPU)
    around: dict[str, Any] = {
        "nodes": NODES,
        "gpus_per_node": GPUS_PER_NODE,
        "network": NETWORK * GB / 8,
    }
    if options.cluster:
        gpu, its = read(options.cluster)
        around |= its
    if options.nodes is not None:
        around["nodes"] = options.nodes
    if options.network is not None:
        around["network"] = options.network * GB / 8
    if options.gpus is not None:
        around["gpus_per_node"] = options.gpus
    if options.latency is not None:
        around["alpha_network"] = options.latency / 1e6
    if options.launch is not None:
        around["launch"] = options.launch / 1e6
    if options.products is not None:
        shares = ("products", "products_tf32", "products_fp32")
        gpu = replace(gpu, **dict.fromkeys(shares, options.products))
    if options.memory is not None:
        around["taken"] = gpu.memory - int(options.memory * GiB)
    return gpu, around
