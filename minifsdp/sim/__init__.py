"""The virtual GPU: the real engine on streams, an allocator and a network in virtual time."""

from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.virtual_cluster import cluster

__all__ = ["VirtualGpu", "cluster"]
