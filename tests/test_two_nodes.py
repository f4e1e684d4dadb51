"""Two nodes of two ranks each, started by torchrun on both: network namespaces with a link between
them, which is cut, and one of which dies.

In one namespace the port of torchrun's store is free, so it may be a fixed one.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.bench import net
from tests.patience import Patience

PROGRAM = """\
import sys, time, datetime
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from minifsdp import fully_shard

kind, steps, pause, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
rank = dist.get_rank()
shape, names = {"hybrid": ((2, 2), ("node", "rank")), "full": ((4,), ("rank",))}[kind]
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(steps):
    loss = (model(torch.randn(8, 32)) - 1).square().mean()
    loss.backward()
    optimizer.step(), optimizer.zero_grad()
    print(f"rank {rank} step {step} loss {loss.item()}\\n", end="", flush=True)  # as one piece
    time.sleep(pause)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def namespaces():
    if reason := net.missing():  # which tries to make one, so not while tests are collected
        pytest.skip(f"no network namespaces: {reason}")


def alone(steps: int) -> dict[tuple[int, int], float]:
    """By rank and step, the loss of a plain model that trains on the mean of four gradients."""
    torch.manual_seed(0)
    blocks = (torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3))
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    losses = {}
    for step in range(steps):
        for rank, generator in enumerate(generators):
            loss = (model(torch.randn(8, 32, generator=generator)) - 1).square().mean()
            (loss / 4).backward()
            losses[rank, step] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Nodes:
    """torchrun on both nodes, each of which writes what it and its ranks say to a file."""

    def __init__(self, folder, *arguments):
        self.files = [folder / f"node{node}" for node in range(2)]
        program = folder / "train.py"
        program.write_text(PROGRAM)
        # They are processes of one machine, and would read each other's memory.
        environment = {**os.environ, "MINIFSDP_COLLECTIVES": "gloo", "OMP_NUM_THREADS": "1"}
        self.launchers = []
        for node, file in enumerate(self.files):
            torchrun = (
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
                "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=two",
                # On machines with names of their own torchrun finds out both by itself.
                f"--local-addr=10.77.0.{node + 1}", f"--rdzv-conf=is_host={not node}",
            )  # fmt: skip
            command = [*net.command(node), *torchrun, program, *map(str, arguments)]
            environment["GLOO_SOCKET_IFNAME"] = net.DEVICE
            with file.open("w") as output:
                self.launchers.append(
                    subprocess.Popen(
                        command, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                )

    def said(self, node):
        return self.files[node].read_text()

    def wait_until(self, condition, seconds):
        patience = Patience(seconds)
        while not condition():
            assert patience.left, "\n".join(map(self.said, range(2)))
            time.sleep(patience.turn)
            patience.count()

    def wait_for_step(self, step):
        self.wait_until(lambda: f"step {step}" in self.said(0), 60)

    def losses(self):
        found = re.findall(r"rank (\d) step (\d+) loss (\S+)\n", self.said(0) + self.said(1))
        return {(int(rank), int(step)): float(loss) for rank, step, loss in found}


@contextmanager
def nodes(folder, *arguments):
    with net.links(2, net.Link(1000)):
        running = Nodes(folder, *arguments)
        try:
            yield running
        finally:
            for node, launcher in enumerate(running.launchers):
                for pid in net.processes(node):
                    os.kill(pid, signal.SIGKILL)
                launcher.wait()


def trains(running, steps):
    """Both end, and their losses are those of one process."""
    running.wait_until(lambda: all(x.poll() is not None for x in running.launchers), 90)
    assert [launcher.returncode for launcher in running.launchers] == [0, 0]
    losses, expected = running.losses(), alone(steps)
    assert losses.keys() == expected.keys() and len(losses) == 4 * steps
    assert max(abs(losses[key] - expected[key]) for key in losses) < 1e-6


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_two_nodes_train_as_one_process_does(kind, tmp_path):
    with nodes(tmp_path, kind, 6, 0, 60) as running:
        trains(running, 6)


def test_a_link_that_is_cut_for_five_seconds_delays_a_step(tmp_path):
    with nodes(tmp_path, "full", 12, 0.2, 60) as running:
        running.wait_for_step(3)
        net.set_link(1, there=False)
        time.sleep(5)
        assert (0, 11) not in running.losses()  # they wait
        net.set_link(1, there=True)
        trains(running, 12)


# Ranks wait in a message of a unit or, in a few backwards, in what they agree on first.
PLACE = r"(.* of unit '.*|start of a backward, )"
LOST = rf"rank {{}} waited in the {PLACE}called from train.py:\d+, and lost the other ranks"


def test_a_link_that_is_cut_for_good_ends_the_ranks_of_both_nodes(tmp_path):
    """Within the timeout of the group, and what a store takes that does not answer. The second node
    has lost the store, too, which the first keeps."""
    with nodes(tmp_path, "full", 400, 0.1, 8) as running:
        running.wait_for_step(3)
        net.set_link(1, there=False)
        for node in range(2):
            running.wait_until(lambda node=node: not ranks_of(node), 60)
            said = running.said(node)
            assert re.search(LOST.format(f"[{2 * node}{2 * node + 1}]"), said), said
            assert "another exception" not in said, said  # which would hide this one


def ranks_of(node):
    """The processes in the namespace of a node, without torchrun's own."""
    command_lines = (Path(f"/proc/{pid}/cmdline") for pid in net.processes(node))
    return [line for line in command_lines if b"torch.distributed.run" not in line.read_bytes()]


def test_a_node_that_dies_ends_the_ranks_of_the_other(tmp_path):
    with nodes(tmp_path, "full", 400, 0.1, 60) as running:
        running.wait_for_step(3)
        for pid in net.processes(1):
            os.kill(pid, signal.SIGKILL)
        running.wait_until(lambda: running.launchers[0].poll() is not None, 60)
        assert running.launchers[0].returncode != 0
        assert re.search(LOST.format(r"[01]"), running.said(0))
