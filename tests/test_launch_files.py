"""tutorials/reference/slurm.sh and kubernetes.yaml: there is neither here, so what is in them is
parsed by the programs that would read it."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

REFERENCE = Path(__file__).parent.parent / "tutorials" / "reference"
SLURM, KUBERNETES = REFERENCE / "slurm.sh", REFERENCE / "kubernetes.yaml"


def check_torchrun(arguments):
    """torchrun takes them, and would start the program on both nodes, which meet at the first."""
    options = get_args_parser().parse_args(arguments)
    assert (options.nnodes, options.nproc_per_node) == ("2", "gpu")
    assert options.rdzv_backend == "c10d" and options.rdzv_id
    assert options.training_script == "example.py"
    return options.rdzv_endpoint


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_script_for_slurm_starts_torchrun_on_the_first_nodes_name(tmp_path):
    """Run by bash, with stand-ins for the two programs of SLURM's that it calls."""
    for name, body in (("scontrol", "printf 'node7\\nnode8\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "1234567", "SLURM_NNODES": "2"}
    result = subprocess.run(
        ["bash", SLURM, "example.py"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **job},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kill, torchrun, *arguments = result.stdout.splitlines()
    assert (kill, torchrun) == ("--kill-on-bad-exit=1", "torchrun")
    assert check_torchrun(arguments) == "node7:24567"


def test_sbatch_asks_for_one_task_a_node():
    """torchrun starts the ranks; of two tasks each would start all of them."""
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", SLURM.read_text(), re.M))
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "1")


def test_the_pods_on_kubernetes_find_the_first_by_its_name():
    yaml = pytest.importorskip("yaml", reason="PyYAML: `make test-site` installs it")
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    template = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"  # a word, with which the names are those of pods
    assert service["metadata"]["name"] == template["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    (container,) = template["containers"]
    torchrun, *arguments = container["command"]
    first = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert torchrun == "torchrun" and check_torchrun(arguments).split(":")[0] == first
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["volumes"]}


def test_the_page_starts_it_in_the_same_way():
    (command,) = re.findall(r"^torchrun (--nnodes .*)$", (REFERENCE / "using.md").read_text(), re.M)
    assert check_torchrun(shlex.split(command)) == "node0:29500"
