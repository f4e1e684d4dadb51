"""sim/cli/cluster.py: a preset as a file, to be edited."""

import json

from minifsdp.sim.__main__ import main, parser
from minifsdp.sim.cli.machine import machine
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS
from tests.sim.test_main import SMALL


def printed(capsys, words, path):
    assert main(["cluster", *words.split()]) == 0
    path.write_text(capsys.readouterr().out)
    return str(path)


def found(words):
    gpu, around = machine(parser().parse_args(words.split()))
    return Cluster(gpu, **around)


def test_what_it_prints_is_the_cluster_that_was_asked_for(tmp_path, capsys):
    words = "--gpu h200 --nodes 4 --gpus 4 --network 1600 --latency 7 --memory 100 --launch 9"
    file = printed(capsys, words, tmp_path / "file")
    assert found(f"--cluster {file}") == found(words) != Cluster(GPUS["h200"])
    assert found(f"--cluster {file} --nodes 2 --network 400").nodes == 2
    assert found(f"--cluster {file} --nodes 2 --network 400").network == 50e9


def test_it_may_be_edited_to_a_gpu_that_there_is_not(tmp_path, capsys):
    path = tmp_path / "file"
    printed(capsys, "--gpu a100-40", path)
    content = json.loads(path.read_text())
    content["gpu"] |= {"name": "mine", "memory": 10**12, "flops": 1e16}
    path.write_text(json.dumps(content))
    its = found(f"--cluster {path} --memory 900")
    assert its.gpu.name == "mine" and its.gpu.memory == 10**12 and its.gpu.flops == 1e16
    preset, mine = (
        simulate(parser().parse_args([*SMALL, *words]), 2).report()["step"]
        for words in (["--nodes", "1", "--batch", "4096"],
                      ["--nodes", "1", "--batch", "4096", "--cluster", str(path)])
    )  # fmt: skip
    assert mine < preset


def test_what_makes_no_sense_gets_one_line(capsys):
    assert main(["cluster", "--gpu", "h100-80"]) == 2
    assert "did you mean h100?" in capsys.readouterr().err
    assert main(["cluster", "--memory", "100"]) == 2
    assert "--memory 100: a100-40 has 39.39 GiB" in capsys.readouterr().err
    assert main(["cluster", "--batch", "1"]) == 2
    assert "--batch is not known here" in capsys.readouterr().err
