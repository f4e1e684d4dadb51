"""tutorials/exercises/evidence.py: what is counted as hidden communication."""

import json
import os
import sys

import pytest

from tests.patience import run_command
from tutorials.exercises.catalog import ROOT
from tutorials.exercises.evidence import hidden_part
from tutorials.exercises.student import make


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


@pytest.mark.slow
def test_the_profile_is_of_the_sharded_model_alone(tmp_path):
    """With DDP's kernels in it, hidden communication would be DDP's as well."""
    make(tmp_path / "student")
    command = [sys.executable, "-m", "tutorials.exercises.evidence", str(tmp_path / "student")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = ["--layers", "1", "--width", "32"]
    result = run_command([*command, *options], cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "evidence.json").read_text())
    assert found["ranks"] == 2 and "bit-equal" in found["compared with DDP"][0]
    trace = (tmp_path / "evidence-trace.json").read_text()
    assert "aten::cross_entropy_loss" in trace and "DistributedDataParallel." not in trace
