"""What is different for the tests on a machine with GPUs. What would run where: where.py.

A world of ranks has a GPU for each rank, and NCCL, where there are enough. Where there are not, and
for the tests listed here, it has gloo and runs on the CPU. Workers of pytest-xdist share the GPUs:
NCCL refuses two ranks of *one* world on the same GPU, but ranks of different worlds may be on one
together. So a machine with GPUs has as many workers as the same machine without.

With `SHARE_GPUS=1` all ranks have a GPU, however few there are. Each rank tells NCCL that it is a
machine of its own, and NCCL sends by a socket what else it would send through the GPU's memory.
That is slow, but it is NCCL, and its order of work on real streams: one GPU is enough for it.

Nothing has to agree to the bit that does not on a CPU. Two ranks agree to the bit, because the sum
of two numbers does not depend on their order, and kernels are told to give the same result each
time. With more ranks results are within a bound of DDP's (parity.py), on either device.
"""

import os
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

BYTES_OF_A_WORKER = 4 << 30  # bytes on each GPU: a context, for a rank of each of four worlds
BYTES_OF_ALL_RANKS = 12 << 30  # if all ranks of these worlds share a GPU; 14 workers did not fit

SHARED = "SHARE_GPUS" in os.environ
ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
"""Of a rank that is a machine of its own for NCCL, and finds the others by this interface."""

MESSAGES = "messages between CPUs: tags, gloo's order of sums, the memory of one machine"
PARTING = "ranks that part ways wait for each other, with NCCL until its timeout"
OFFLOADED = "torch sends what is offloaded from the host, for which it wants gloo"
PRETENDED = "a GPU that the test pretends itself: NCCL does not carry its tensors"
STAND_INS = "streams that stand in for those of the CPU (lagging.py)"
ON_CPU = {
    "tests/between_steps/test_unit_params.py::test_values_are_written_back_from_one": PRETENDED,
    "tests/checks/test_first_step.py::test_a_model_from_meta_trains_like_torchs_that_was_there"
    "[broadcast_into_memory": OFFLOADED,
    "tests/checks/test_rank_agreement.py": PARTING,
    "tests/chunks/test_flat_parameter.py::test_on_gpus": PRETENDED,
    "tests/chunks/test_flat_parameter.py::test_these_kernels_compute_the_same": PRETENDED,
    "tests/checks/test_same_launches.py::test_messages_with_tags": MESSAGES,
    "tests/comm/test_blocks.py": MESSAGES,
    "tests/comm/test_boards.py": MESSAGES,
    "tests/comm/test_collectives.py": MESSAGES,
    "tests/comm/test_deadlock_watch.py": PARTING,
    "tests/comm/test_redistribute.py": MESSAGES,
    "tests/comm/test_message_tags.py": MESSAGES,
    "tests/comm/test_neighbors.py": MESSAGES,
    "tests/comm/test_process_memory.py": MESSAGES,
    "tests/comm/test_same_machine.py": MESSAGES,
    "tests/comm/test_transport.py": MESSAGES,
    "tests/comm/test_unit_messages.py": PARTING,
    "tests/comm/test_wait_reports.py": PARTING,
    "tests/promises/test_threads.py": "collectives of two threads, with which NCCL may deadlock",
    "tests/scripts/test_scripts.py::test_a_script_for_fsdp2[--cpu-offload": OFFLOADED,
    "tests/support/test_shard_changes.py::test_a_device_that_the_group_does_not_carry": (
        "a model on the CPU, whose group is said not to carry that"
    ),
    "tests/support/test_shard_changes.py::test_so_it_is_if_a_model_is_moved_there": PRETENDED,
    "tests/test_lagging.py": STAND_INS,
    "tests/test_limiter.py": STAND_INS,
    "tests/test_no_sync.py::test_the_host_waits_for_a_gpu": PRETENDED,
    "tests/test_post_forward.py::test_only_the_forward_sends": "counts what gloo sends",
    "tests/test_random_models.py": PARTING,
    "tests/test_reduce.py::test_however_late": STAND_INS,
    "tests/test_reduce.py::test_so_do_its_later_stages": STAND_INS,
    "tests/test_reshard.py": STAND_INS,
    "tests/test_strategies.py::test_in_any_order": STAND_INS,
    "tests/test_streams.py::test_the_cuda_path_trains": "streams that stand in for those of CUDA",
    "tests/test_unshard.py": STAND_INS,
    "tests/wrapping/test_fsdp2_settings.py::test_a_model_is_moved": PRETENDED,
    "tests/wrapping/test_fsdp2_settings.py::test_what_is_on_meta_stays_there": PRETENDED,
}
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
    return max(1, memory // (BYTES_OF_ALL_RANKS if SHARED else BYTES_OF_A_WORKER))


def _by_gpu(full_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`DTensor.full_tensor` for those on the host, too, for which torch wants gloo."""

    def gather(tensor: DTensor, **options: Any) -> Tensor:
        if tensor.device.type == "cpu":
            return full_tensor(tensor.cuda(), **options).cpu()
        return full_tensor(tensor, **options)

    return gather


def gpus_of(world_size: int) -> list[int]:
    """The GPU of each rank of a world that this worker of pytest-xdist starts. Different workers
    begin with different ones."""
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:], torch.cuda.device_count()
    return [(int(worker) * world_size + rank) % gpus for rank in range(world_size)]


def compute_on(gpu: int, rank: int) -> None:
    """In a rank, before it does anything: compute on this GPU, and give the same bits each time."""
    if SHARED:
        os.environ.update(ONE_GPU, NCCL_HOSTID=f"rank {rank}")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else a result depends on its stream
    torch.cuda.set_device(gpu)
    DTensor.full_tensor = _by_gpu(DTensor.full_tensor)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel for each torch.empty
    torch.backends.cudnn.benchmark = False  # else the first call chooses an algorithm by its time
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
