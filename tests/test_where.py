"""where.py and gpus.py: what would run where on a machine with GPUs, without one."""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests import gpus, ranks
from tests.gpus import Place
from tests.torchrun import torchrun
from tutorials.exercises.catalog import ROOT


@ranks.on_ranks(2)
def test_of_two_ranks():
    """Is there for the dry run of this file, as the next two are."""


def test_of_ranks_that_it_starts_itself():
    ranks.run(len, 3, "")


@pytest.mark.gpus(8)
def test_of_eight_gpus():
    pass


def test_one_gpu_is_enough_for_all_ranks_if_they_are_to_share_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ranks, "on_cpu", False)
    monkeypatch.setattr(ranks, "PRETENDED_GPU", False)
    assert ranks.place_of(3) is Place.CPU
    monkeypatch.setattr(ranks, "SHARED", True)
    monkeypatch.setattr(gpus, "SHARED", True)
    assert ranks.place_of(3) is Place.GPU and gpus.gpus_of(3) == [0, 0, 0]
    assert gpus.workers_that_fit(80 << 30) == 6


@pytest.mark.parametrize(
    "count, expected",
    [
        (1, ["2 ranks on the CPU, gloo: there are too few GPUs",
             "3 ranks on the CPU, gloo: there are too few GPUs",
             "not: needs 8 GPUs, this machine has 1"]),
        (2, ["2 ranks on a GPU each, NCCL",
             "3 ranks on the CPU, gloo: there are too few GPUs",
             "not: needs 8 GPUs, this machine has 2"]),
        (8, ["2 ranks on a GPU each, NCCL", "3 ranks on a GPU each, NCCL", "without ranks"]),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_would_run_where(count, expected):
    program = Path(__file__).with_name("where.py")  # forked: a new Python would import torch
    printed = torchrun(program, 1, str(count), __file__, "-k", "test_of", path=ROOT).stdout
    assert printed.splitlines()[-4:] == [
        f"with {count} GPUs: 3 tests", *(f"  {1:6} {line}" for line in expected)
    ]  # fmt: skip


def test_the_ranks_of_a_world_have_different_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    for worker, world_size in product(range(8), range(1, 7)):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        assert len(set(gpus.gpus_of(world_size))) == world_size
    assert gpus.gpus_of(4) != [0, 1, 2, 3], "workers begin with different ones"


def test_what_stays_on_the_cpu_is_there_and_says_why():
    for name, why in gpus.ON_CPU.items():
        path, _, test = name.partition("[")[0].partition("::")
        assert why, name
        assert f"def {test}" in (ROOT / path).read_text(), name


def test_what_stays_on_the_cpu_does_so_on_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(ranks, "PRETENDED_GPU", False)
    assert ranks.place_of(2) is Place.GPU and ranks.place_of(9) is Place.CPU
    monkeypatch.setattr(ranks, "on_cpu", True)
    assert ranks.place_of(2) is Place.CPU
