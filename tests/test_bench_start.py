"""bench/start.py: what it wraps, and what memory that takes."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench import start
from tests.patience import run_command


def test_the_model_has_seven_billion_parameters_and_no_memory():
    model = start.model()
    assert sum(param.numel() for param in model.parameters()) == 6_738_415_616  # as LLaMA's
    assert {param.device.type for param in model.parameters()} == {"meta"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory from /proc")
def test_memory_is_that_of_one_unit_in_chunks_and_none_in_rows():
    """Nobody writes to shards of rows, so their memory is not there yet. In chunks a shard is cut
    from a unit, which has memory meanwhile; the largest has 500 MiB."""
    assert measured("minifsdp, rows")["bytes"] < 2**26
    assert 400 * 2**20 < measured("minifsdp, chunks")["bytes"] < 600 * 2**20


def measured(contender: str) -> dict[str, float]:
    result = run_command([sys.executable, "-m", "tests.bench.start", contender, "1024"])
    assert result.returncode == 0, result.stderr
    found: dict[str, float] = json.loads(result.stdout)
    return found
