"""sim/cli/calibrate.py: the constants of one's own machine, in a file."""

import json

import pytest

from minifsdp.sim.__main__ import main
from minifsdp.sim.calibration.machine import Device, Samples
from minifsdp.sim.cli import calibrate
from minifsdp.sim.hardware.cluster_file import read
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS
from tests.sim.calibration.test_machine import samples_of
from tests.sim.calibration.test_profiles import A100, kernel, operator
from tests.sim.test_main import SMALL

CPU = Device("cpu", 2**33, 2)
TRUE = Cluster(GPUS["a100-40"], gpus_per_node=2, launch=3e-5)


@pytest.fixture
def measured(monkeypatch):
    """No processes: what they would have measured."""
    asked: list[Device] = []

    def samples(device: Device) -> Samples:
        asked.append(device)
        return samples_of(TRUE, CPU)

    monkeypatch.setattr(calibrate, "samples", samples)
    monkeypatch.setattr(calibrate.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(calibrate, "this_machine", lambda ranks: Device("cpu", 2**33, ranks))
    return asked


def test_a_file_is_written_that_runs_take(measured, tmp_path, capsys):
    file = str(tmp_path / "c.json")
    assert main(["calibrate", "-o", file]) == 0
    out = capsys.readouterr().out
    assert "cpu, 2 ranks" in out and f"use it with --cluster {file}" in out
    for line in ("products in fp32", "attention", "passes", "collectives", "the host's launches"):
        assert f"\n{line} " in out
    assert "not found" not in out and "not measured on one node" in out
    gpu, constants = read(file)
    assert (gpu.name, constants["gpus_per_node"]) == ("cpu", 2)
    assert constants["launch"] == pytest.approx(3e-5)
    assert "2 ranks on cpu, torch" in json.loads((tmp_path / "c.json").read_text())["about"]
    assert main([*SMALL, "--cluster", file]) == 0


def test_a_program_gets_one_document(measured, tmp_path, capsys):
    file = str(tmp_path / "c.json")
    assert main(["calibrate", "-o", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "c.json").read_text())
    assert (found["gpu"], found["cluster"]) == (written["gpu"], written["cluster"])
    assert (found["ranks"], found["file"], found["not found"]) == (2, file, [])


def test_it_measures_with_as_many_ranks_as_are_asked_for(measured, tmp_path, capsys):
    main(["calibrate", "--ranks", "3", "-o", str(tmp_path / "c.json")])
    main(["calibrate", "-o", str(tmp_path / "c.json")])
    assert [device.ranks for device in measured] == [3, 2]


def test_a_profile_says_what_it_does_not_show(tmp_path, capsys):
    trace = {"traceEvents": [operator("mm", 1, [[1024, 1024]] * 2), kernel("gemm", 100, 1)],
             "deviceProperties": [A100]}  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    words = ["--profile", str(tmp_path / "trace.json"), "-o", str(tmp_path / "c.json")]
    assert main(["calibrate", *words]) == 0
    out = capsys.readouterr().out
    assert "products in 16 bits  " in out
    (missing,) = (line for line in out.splitlines() if line.startswith("not found"))
    assert missing.startswith("not found, so as of a100-80: products in fp32, attention, passes")
    assert missing.endswith("the host's memory, copies to the device, memory that CUDA takes")
    gpu, _ = read(tmp_path / "c.json")
    assert gpu.attention == GPUS["a100-80"].attention and gpu.name == A100["name"]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--ranks 0", "--ranks: expected a whole number from 1 to 1,024, got '0'"),
        ("--rank 2", "--rank is not known here; did you mean --ranks?"),
        ("--gpu h100", "--gpu is for --profile; without it, the machine itself is measured"),
        ("--profile {tmp}/no --ranks 2", "--ranks is for a measurement; a profile has the ranks"),
        ("--profile {tmp}/no", "--profile: cannot read '{tmp}/no': No such file or directory"),
        ("-o {tmp}/no/c.json", "--output: cannot write '{tmp}/no/c.json': there is no directory"),
        ("--gpu l4", "--gpu: expected one of a100-40"),
    ],
)
def test_what_makes_no_sense_is_one_line(words, message, measured, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *words.replace("{tmp}", str(tmp_path)).split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and message.replace("{tmp}", str(tmp_path)) in err
    assert not measured and not list(tmp_path.iterdir())


def test_a_rank_that_fails_is_one_line(measured, monkeypatch, tmp_path, capsys):
    def fails(device: Device) -> Samples:
        raise RuntimeError("a rank has failed: KeyError: 'x'")

    monkeypatch.setattr(calibrate, "samples", fails)
    assert main(["calibrate", "-o", str(tmp_path / "c.json")]) == 2
    assert capsys.readouterr().err == "minifsdp: calibrate: a rank has failed: KeyError: 'x'\n"


def test_more_ranks_than_gpus_are_refused(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(calibrate.torch.cuda, "device_count", lambda: 4)
    assert main(["calibrate", "--ranks", "5", "-o", str(tmp_path / "c.json")]) == 2
    assert "--ranks 5: there are 4 GPUs here" in capsys.readouterr().err and not measured
