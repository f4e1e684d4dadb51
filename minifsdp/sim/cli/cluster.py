"""``minifsdp cluster``: a preset and what is around it as a file, to be edited."""

import argparse

from minifsdp.sim.cli.machine import machine
from minifsdp.sim.hardware.cluster_file import BETWEEN, CLUSTER, content
from minifsdp.sim.hardware.costs import Cluster


def cluster(options: argparse.Namespace) -> int:
    """Print a file for ``--cluster``.

    Args:
        options: as of :func:`minifsdp.sim.cli.options.add_machine`.
    """
    gpu, around = machine(options)
    all_of_it = Cluster(gpu, **around)
    constants = {name: getattr(all_of_it, name) for name in (*CLUSTER, *BETWEEN)}
    about = f"{gpu.name} as minifsdp has it: nothing was measured. Seconds, bytes, bytes a second"
    print(content(gpu, constants, about), end="")
    return 0
