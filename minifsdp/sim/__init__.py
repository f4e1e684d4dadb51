"""The virtual GPU: the real engine on streams, an allocator and a network in virtual time."""

from minifsdp.sim.cluster import cluster
from minifsdp.sim.device import VirtualGpu

__all__ = ["VirtualGpu", "cluster"]
