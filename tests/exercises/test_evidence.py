"""tutorials/exercises/evidence.py: what is counted as hidden communication."""

import pytest

from tutorials.exercises.evidence import hidden_part


def kernel(name, start, end):
    return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}


@pytest.mark.parametrize(
    "hidden, events",
    [
        (None, [kernel("gemm", 0, 4)]),
        (0.0, [kernel("gemm", 0, 4), kernel("ncclDevKernel_AllGather", 4, 8)]),
        (0.5, [kernel("gemm", 0, 4), kernel("ncclDevKernel_AllGather", 2, 6)]),
        # Two kernels that compute at the same time hide what they cover once.
        (0.5, [kernel("gemm", 0, 4), kernel("add", 0, 4), kernel("ncclKernel", 2, 6)]),
        (1.0, [kernel("gemm", 0, 4), kernel("ncclKernel", 1, 2), kernel("ncclKernel", 1, 3)]),
        (None, [{"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 4}]),
    ],
)
def test_the_hidden_part(hidden, events):
    assert hidden_part(events) == hidden
