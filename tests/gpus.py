"""What is different for the tests on a machine with GPUs. What would run where: where.py.

A world of ranks has a GPU for each rank, and NCCL, where there are enough. Where there are not, and
for the tests listed here, it has gloo and runs on the CPU. Workers of pytest-xdist share the GPUs:
NCCL refuses two ranks of *one* world on the same GPU, but ranks of different worlds may be on one
together. So a machine with GPUs has as many workers as the same machine without.

Nothing has to agree to the bit that does not on a CPU. Two ranks agree to the bit, because the sum
of two numbers does not depend on their order, and kernels are told to give the same result each
time. With more ranks results are within a bound of DDP's (parity.py), on either device.
"""

import os
from enum import Enum

import torch

WORLDS_OF_A_WORKER = 4 << 30  # bytes on each GPU: a context, for a rank of each of four worlds

ON_CPU: dict[str, str] = {}
"""Why the ranks of these tests have no GPU, by the beginning of their node id."""


class Place(Enum):
    """What the ranks of a world compute on, and what carries their messages."""

    CPU = "the CPU, gloo"
    GPU = "a GPU each, NCCL"
    PRETENDED_GPU = "a pretended GPU each (pretended_gpu.py), gloo that behaves as NCCL"


def why_on_cpu(test: str) -> str | None:
    """Why the ranks of a test have no GPU; None: they have one where there are enough.

    Args:
        test: its node id.
    """
    return next((why for name, why in ON_CPU.items() if test.startswith(name)), None)


def workers_that_fit(memory: int) -> int:
    """How many workers of pytest-xdist a GPU with so many bytes of memory has room for."""
    return max(1, memory // WORLDS_OF_A_WORKER)


def gpus_of(world_size: int) -> list[int]:
    """The GPU of each rank of a world that this worker of pytest-xdist starts. Different workers
    begin with different ones."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], torch.cuda.device_count()
    return [(int(worker) * world_size + rank) % gpus for rank in range(world_size)]


def compute_on(gpu: int) -> None:
    """In a rank, before it does anything: compute on this GPU, and give the same bits each time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else a result depends on its stream
    torch.cuda.set_device(gpu)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each torch.empty
    torch.backends.cudnn.benchmark = False  # else the first call chooses an algorithm by its time
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
