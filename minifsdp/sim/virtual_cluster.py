"""``with cluster(...) as gpu``: run a training step on a virtual GPU.

::

    with minifsdp.sim.cluster("a100-40", nodes=2, gpus_per_node=8) as gpu:
        model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
    print(gpu.report())

One process stands for rank 0 of the whole cluster: the others would do the same at the same times.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.device_mesh import _mesh_resources

import minifsdp.comm.collectives
import minifsdp.comm.groups
import minifsdp.offload
from minifsdp.core.streams import BACKENDS
from minifsdp.core.unit import Unit
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.hardware.attention import attention
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import Gpu, preset
from minifsdp.sim.streams import make_streams
from minifsdp.sim.tape import Mistarget
from minifsdp.support.prefetch_stats import PrefetchStats


@contextmanager
def cluster(
    gpu: str | Gpu = "a100-40",
    nodes: int = 1,
    gpus_per_node: int = 8,
    kind: str = "meta",
    **constants: Any,
) -> Iterator[VirtualGpu]:
    """Inside, new tensors are on a virtual GPU, and minifsdp trains there.

    Args:
        gpu: one of :data:`minifsdp.sim.hardware.gpus.GPUS`, by its name; or another one.
        kind: ``"meta"``: tensors have no values, and models may have any size. ``"cpu"``: they are
            real, for models that look at them.
        constants: others of :class:`minifsdp.sim.hardware.costs.Cluster`.

    Raises:
        ValueError: the GPU is not known.
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a virtual cluster has a process group of its own, and there is one already. Call "
            "torch.distributed.destroy_process_group() first, or use another process."
        )
    kind_of_gpu = preset(gpu) if isinstance(gpu, str) else gpu
    virtual = VirtualGpu(Cluster(kind_of_gpu, nodes, gpus_per_node, **constants), kind)
    hook = sys.excepthook
    with ExitStack() as stack:
        dist.init_process_group(
            "fake",
            store=torch._C._distributed_c10d.HashStore(),
            rank=0,
            world_size=virtual.cluster.world_size,
        )
        stack.callback(dist.destroy_process_group)
        stack.callback(setattr, sys, "excepthook", hook)  # torch's would say which rank has failed
        if find_spec("numpy") is None:
            # torch looks for it at every second operator, which is most of what a run takes. This
            # entry tells it at once that there is none.
            sys.modules["numpy"] = None  # type: ignore[assignment]
            stack.callback(sys.modules.pop, "numpy")
        for replacement in _replacements(virtual):
            stack.enter_context(replacement)
        stack.enter_context(torch.device(kind))
        stack.enter_context(virtual)
        yield virtual


def _replacements(gpu: VirtualGpu) -> Iterator[Any]:
    yield attention(gpu.cluster.gpu.prefers_cudnn)
    yield patch.dict(BACKENDS, {gpu.kind: partial(make_streams, gpu)})
    # Rank to rank, as on a CPU, would be another traffic than a GPU's.
    yield patch.object(minifsdp.comm.collectives, "NATIVE", True)
    per_node = gpu.cluster.gpus_per_node
    yield patch.object(
        minifsdp.comm.groups,
        "hosts_of",
        lambda group: [f"node {r // per_node}" for r in dist.get_process_group_ranks(group)],
    )
    # DTensor weighs placements by what is between ranks, and finds no such devices in torch.
    yield patch.object(_mesh_resources, "num_devices_per_host", lambda kind: per_node)
    # torch asks which devices have fused optimizers before it lets one be made.
    yield patch.object(
        import_module("torch.optim.optimizer"),
        "_get_fused_kernels_supported_devices",
        lambda: [gpu.kind, "cpu"],
    )
    resize, mistarget = torch.UntypedStorage.resize_, PrefetchStats.mistarget

    def seen_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        gpu.resized(storage)
        return result

    yield patch.object(torch.UntypedStorage, "resize_", seen_resize)

    def seen_mistarget(stats: PrefetchStats, kind: str, target: Unit) -> None:
        mistarget(stats, kind, target)
        gpu.tape.append(Mistarget(kind, target.name, gpu.clock.now))

    yield patch.object(PrefetchStats, "mistarget", seen_mistarget)
    if gpu.kind == "cpu":
        host = minifsdp.offload._host_memory
        yield patch.object(
            minifsdp.offload, "_host_memory", lambda *args: gpu.host_memory(host(*args))
        )
