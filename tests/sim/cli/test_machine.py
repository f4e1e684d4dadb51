"""sim/cli/machine.py: which GPU, and what is around it."""

import json

import pytest

from minifsdp.sim.__main__ import main, parser
from minifsdp.sim.cli.machine import machine
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.hardware.cluster_file import CLUSTER, content
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GB, GPUS, GiB
from tests.sim.test_main import SMALL

CONSTANTS = {name: getattr(Cluster(GPUS["h200"]), name) for name in CLUSTER}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(content(GPUS["h200"], {**CONSTANTS, "gpus_per_node": 4, "launch": 1e-3}, ""))
    return str(path)


def found(words):
    gpu, around = machine(parser().parse_args(words.split()))
    return Cluster(gpu, **around)


def test_where_nothing_is_said_it_is_the_usual_one():
    assert found("") == Cluster(GPUS["a100-40"])
    assert found("--gpu h100 --nodes 3 --gpus 2") == Cluster(GPUS["h100"], 3, 2)


def test_a_file_has_the_gpu_and_its_constants(file):
    expected = Cluster(GPUS["h200"], 2, **{**CONSTANTS, "gpus_per_node": 4, "launch": 1e-3})
    assert found(f"--cluster {file} --nodes 2") == expected


def test_what_is_said_otherwise_counts_before_the_file(file):
    words = "--gpus 16 --launch 7 --latency 9 --products 0.3 --memory 100 --network 80"
    its = found(f"--cluster {file} {words}")
    assert (its.gpus_per_node, its.launch, its.alpha_network) == pytest.approx((16, 7e-6, 9e-6))
    shares = its.gpu.products, its.gpu.products_tf32, its.gpu.products_fp32
    assert shares == (0.3, 0.3, 0.3) and its.capacity == 100 * GiB and its.network == 10 * GB


@pytest.mark.slow
def test_a_run_and_a_plan_use_it(file, capsys):
    slow = simulate(parser().parse_args([*SMALL, "--cluster", file])).report()
    fast = simulate(parser().parse_args([*SMALL, "--cluster", file, "--launch", "1"])).report()
    assert slow["step"] > 3 * fast["step"]  # a millisecond for each kernel
    assert main([*SMALL, "--cluster", file, "--json"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert figures["step"] == slow["step"] and figures["settings"]["cluster"] == file
    given = "--strategy full_shard --precision bf16 --unit block --offload no --recompute none"
    given += " --backward pre --forward none"
    assert main(["plan", *SMALL, *given.split(), "--cluster", file]) == 0
    two = simulate(parser().parse_args([*SMALL, "--cluster", file]), steps=2).report()  # as plan
    assert f"step {two['step'] * 1e3:,.1f} ms" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["plan"]])
@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--cluster {file} --gpu h100",
            "says which GPU there is, and so does --gpu h100; give one",
        ),
        ("--cluster {file}x", "x': No such file or directory; minifsdp calibrate"),
        ("--cluster {bad}", "bad' is of format 7, and this is 2; calibrate again"),
        ("--cluster {file} --memory 150", "--memory 150: h200 has 139.81 GiB; take no more"),
        ("--cluster {file} --nodes 16384 --gpus 9", "--gpus 9 each are more than 131,072 GPUs"),
    ],
)
def test_what_is_wrong_with_it_is_one_line_before_any_run(
    command, words, message, file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("minifsdp.sim.cli.run._train", None)
    (tmp_path / "bad").write_text('{"format": 7, "minifsdp": "0.1.0"}')
    given = words.format(file=file, bad=tmp_path / "bad").split()
    assert main([*command, *given]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


def test_a_sweep_over_gpus_is_refused_too(file, capsys):
    assert main(["--cluster", file, "--sweep", "gpu=h100,h200"]) == 2
    assert "give one of them" in capsys.readouterr().err
