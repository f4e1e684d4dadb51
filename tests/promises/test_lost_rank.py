"""A rank is lost, and the others go on: with a new process group, in the processes that they are.

The programs are what torchft and its like do. Each ends a process, so it has a world of its own.
"""

import gc
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from minifsdp.comm import deadlock_watch, same_machine
from minifsdp.core.unit import Unit
from tests.promises import Block
from tests.ranks import World

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts what is left in Linux's /proc"
)
SAVED, DIES = 2, 4  # steps: what is saved before the first of them; in which a rank dies
FULL = StateDictOptions(full_state_dict=True)


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def sharded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(7, 3))
    if kind == "wrapper":
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))
    mesh = None
    if kind == "hybrid" and dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


class Training:
    """A model, its optimizer, and how far they are."""

    def __init__(self, kind: str, folder: str) -> None:
        self.model, self.step = sharded(kind), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.folder = folder

    def run(self, steps: int, dies: bool = False) -> list[tuple[float, float]]:
        params, losses = [*self.model.parameters()], []
        while self.step < steps:
            torch.manual_seed(100 * self.step + dist.get_rank())
            loss = self.model(torch.randn(4, 7)).pow(2).mean()
            if dies and self.step == steps - 1:  # of which it has begun, and lent its parameters
                os._exit(1)
            loss.backward()
            clip = getattr(self.model, "clip_grad_norm_", partial(clip_grad_norm_, params))
            losses.append((loss.item(), float(whole(clip(max_norm=0.1)))))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return losses

    def save(self) -> None:
        dcp.save(minifsdp.state_to_save(self.model, self.optimizer), checkpoint_id=self.folder)

    def load(self) -> None:
        with minifsdp.state_to_load(self.model, self.optimizer) as state:
            dcp.load(state, checkpoint_id=self.folder)
        self.step = SAVED

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's."""
        found = self.model.named_parameters()
        return {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in found}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def join(place: str, rank: int, size: int) -> None:
    store = dist.FileStore(place, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def left_over() -> dict[str, int]:
    """What this process has of models and process groups."""
    gc.collect()
    kinds = Counter("unit" for thing in gc.get_objects() if isinstance(thing, Unit))
    tasks = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    files = [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in files]
    return {
        "units": kinds["unit"],
        "threads of gloo": tasks.count("pt_gloo_runloop"),
        "threads of Python": threading.active_count(),
        "files": sum("memfd" in link for link in links),
        "sockets": sum("socket" in link for link in links),
        "neighbors": len(same_machine.neighbors),
        "watched": len(deadlock_watch._groups),
        "unfinished": len(deadlock_watch.unfinished),
    }


def until_a_rank_dies(kind: str, folder: str, saves: bool, dies: int) -> str:
    """What the others are told."""
    training = Training(kind, folder)
    if saves:
        training.run(SAVED)
        training.save()
    else:
        training.load()
    training.run(DIES)
    try:
        training.run(DIES + 1, dies=dist.get_rank() == dies)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def go_on(kind: str, folder: str, steps: int = DIES + 2):
    training = Training(kind, folder)
    training.load()
    return training.run(steps), training.parameters()


def survive(kind: str, folder: str, size: int, losses: int, comes_back: bool):
    """In each rank: the last one dies, as often as ``losses`` says."""
    mine, found, counts = dist.get_rank(), [], []
    for loss in range(losses):
        said = until_a_rank_dies(kind, folder, saves=not loss, dies=size - 1)
        if mine == size - 1:
            return None  # it has not died
        dist.destroy_process_group()
        size -= not comes_back
        join(f"{folder}/store{loss}", mine, size)
        found.append((said, go_on(kind, folder)))
        time.sleep(2 * deadlock_watch.POLL)
        counts.append(left_over())
    return found, counts


def come_back(kind: str, folder: str, loss: int, rank: int, size: int):
    """In a new process that takes the place of the one that was lost, and is the next to die."""
    dist.destroy_process_group()
    join(f"{folder}/store{loss}", rank, size)
    found = go_on(kind, folder)
    until_a_rank_dies(kind, folder, saves=False, dies=rank)
    return found


@pytest.fixture
def worlds():
    """Makes a world whose ranks have found each other."""
    made: list[World] = []

    def start(size: int) -> World:
        made.append(World(size))
        made[-1].call(os.getpid, (), {}, 60)
        return made[-1]

    yield start
    for world in made:
        world.kill()


def send(world: World, function, *args) -> None:
    for connection in world.connections:
        connection.send((function, args, {}))


def received(world: World, rank: int = 0):
    report = world._receive(rank)
    assert report.ok, report.result
    return report.result


def check_same(found, expected) -> None:
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind, size", [("wrapper", 3), ("fully_shard", 3), ("hybrid", 4)])
def test_the_others_go_on_as_ranks_of_new_processes_would(kind, size, worlds, tmp_path):
    """Twice, down to one rank or two."""
    world = worlds(size)
    send(world, survive, kind, str(tmp_path), size, 2, False)
    ranks = [received(world, rank) for rank in range(size - 2)]
    for loss in range(2):
        fresh = worlds(size - 1 - loss).call(go_on, (kind, str(tmp_path)), {}, 60)
        for (found, _), expected in zip(ranks, fresh, strict=False):
            said, went_on = found[loss]
            assert "lost the other ranks" in said and "Look at their output" in said
            check_same(went_on, expected)
    for _, counts in ranks:
        assert [count["units"] for count in counts] == [0, 0]


def test_another_process_takes_the_place_of_the_one_that_was_lost(worlds, tmp_path):
    world, losses, kind = worlds(2), 3, "fully_shard"
    send(world, survive, kind, str(tmp_path), 2, losses, True)
    others = []
    for loss in range(losses):
        others.append(worlds(1))
        send(others[-1], come_back, kind, str(tmp_path), loss, 1, 2)
    found, counts = received(world)
    expected = worlds(2).call(go_on, (kind, str(tmp_path)), {}, 60)
    for _, went_on in found:
        check_same(went_on, expected[0])
    assert counts[1] == counts[2]  # nothing is left of each time


def use_the_old_model(kind: str, folder: str) -> dict[str, str]:
    """After a rank was lost, with the group that the others have made."""
    mine, training, said = dist.get_rank(), Training(kind, folder), {}
    training.run(SAVED)
    training.save()
    if mine == 2:
        os._exit(1)
    with suppress(RuntimeError):
        training.run(DIES)
    dist.destroy_process_group()
    join(f"{folder}/store", mine, 2)
    calls = {
        "a step": lambda: training.run(DIES),
        "to save it": training.save,
        "to load it": training.load,
        "torch's state": lambda: get_model_state_dict(training.model, options=FULL),
    }
    for name, call in calls.items():
        said[name] = "nothing"
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("kind", ["wrapper", "fully_shard"])
def test_a_model_of_the_group_that_is_gone_says_what_to_do(kind, worlds, tmp_path):
    world = worlds(3)
    send(world, use_the_old_model, kind, str(tmp_path))
    for rank in range(2):
        for name, text in received(world, rank).items():
            if kind == "fully_shard" and name == "torch's state":  # of which only torch knows
                assert "Error" in text or torch.__version__.startswith("2.11")  # raises nothing
                continue
            assert "the process group of this model is gone" in text, (name, text)
            assert "build and wrap the model again, and load a checkpoint" in text
