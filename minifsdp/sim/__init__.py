"""The virtual GPU: the real engine on streams, an allocator and a network in virtual time.

As in minifsdp itself, names are looked up when they are first used, because both need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifsdp.sim.device import VirtualGpu
    from minifsdp.sim.virtual_cluster import cluster

__all__ = ["VirtualGpu", "cluster"]

_HOMES = {"VirtualGpu": "minifsdp.sim.device", "cluster": "minifsdp.sim.virtual_cluster"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minifsdp.sim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
