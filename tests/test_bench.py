"""bench/: what can be tried of it without a quiet machine or a GPU."""

import shutil
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import collectives
from minifsdp.sim.calibration.machine import around
from minifsdp.sim.hardware.cluster_file import content
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import preset
from minifsdp.sim.training.presets import find
from tests.bench import cpu, gpu, one_gpu
from tests.bench.contenders import Setting
from tests.sim.calibration.test_machine import CPU, NOTHING


@pytest.mark.parametrize(
    "device, gib, name",
    [
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
    ],
)
def test_a_gpu_is_known_by_its_name_and_its_memory(device, gib, name):
    assert gpu.name_of(device, int(gib * 2**30)) == name
    with pytest.raises(ValueError, match="is a 'GeForce'"):
        gpu.name_of("GeForce", int(gib * 2**30))


def test_figures_are_held_against_their_aims():
    measured = {"step": 0.1, "peak allocated": 2**30, "peak reserved": 2**30}
    lines = gpu.compared(measured, {"step": 0.11, "peak allocated": 2**30, "peak reserved": 2**31})
    assert [line.split()[-1] for line in lines] == ["10%", "ok", "ok"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="make validate")
def test_without_a_gpu_it_is_the_cpus(capsys, monkeypatch, tmp_path):
    """A step that takes as long as is predicted, then one that takes twice as long."""
    (tmp_path / "cpus").write_text(content(preset("a100-40"), around(NOTHING, CPU), ""))
    monkeypatch.setattr(
        cpu, "command", lambda words: shutil.copy(tmp_path / "cpus", words[-1]) and 0
    )
    expected = {name: cpu.predicted(name, str(tmp_path / "cpus")) for name in cpu.SIZES}
    assert 0 < expected["demo"] < expected["wide"]
    monkeypatch.setattr(cpu, "measured", lambda name: expected[name] * 1.1)
    assert gpu.main() == 0
    assert "median ratio: demo 0.91, wide 0.91" in capsys.readouterr().out
    monkeypatch.setattr(cpu, "measured", lambda name: expected[name] * 2)
    assert gpu.main() == 1


@pytest.mark.slow
def test_the_demos_step_is_measured(monkeypatch):
    monkeypatch.setitem(cpu.SIZES, "demo", (1, 32))  # with a smaller model
    assert 0 < cpu.measured("demo") < 100


def test_on_one_gpu_all_contenders_wait_for_the_same_collectives(monkeypatch):
    """A gather of three units for the forward, of two blocks again for the backward, and three
    reductions. On a CPU, FSDP1 is not among them."""
    monkeypatch.setattr(collectives, "NATIVE", True)  # as on a GPU
    monkeypatch.setattr(gpu, "_cycles_per_second", lambda: 1e9)
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    job = find("gpt-125m", changes={"layers": 2, "width": 32, "heads": 2, "vocab": 64})
    found = []
    for name in ("FSDP2", "mini", "mini rows"):
        with gpu.modelled_network(Cluster(preset("h100"), 1)):
            setting = Setting(torch.device("cpu"), bf16=True, blocks=job.blocks)
            model = one_gpu.CONTENDERS[name](job.build(), setting)
            for _ in range(3):
                slept.clear()
                job.loss(model, 1, 8).backward()
        found.append(sorted(slept))
    assert found[0] == found[1] and len(found[0]) == 3 + 2 + 3
    assert len(found[2]) == len(found[0])  # in rows there are marks as well


def test_collectives_sleep_as_long_as_they_would_take_one_at_a_time(monkeypatch):
    slept, waited = [], []

    class Stream:
        def wait_event(self, event):
            waited.append(event)

        def record_event(self):
            return len(slept)

    monkeypatch.setattr(gpu, "_cycles_per_second", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    dist.init_process_group(
        "fake", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=16
    )
    try:
        cluster = Cluster(preset("a100-40"), 2)
        sleep = gpu.Sleeping(cluster).instead_of(dist.all_reduce, rounds=2)
        for _ in range(2):
            sleep(torch.empty(1_000_000), group=dist.group.WORLD)
        expected = cluster.collective_seconds(4e6 * 15 / 16, list(range(16)), 2) * 1e9
        assert slept == [int(expected)] * 2 and waited == [1]
    finally:
        dist.destroy_process_group()
