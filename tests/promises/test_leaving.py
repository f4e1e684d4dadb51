"""Promises about ranks that are done: who is late finds what they have lent, and nothing else.

Each program ends process groups or processes, so it runs in a world of its own.
"""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import minifsdp
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy, StateDictType, fully_shard
from minifsdp.comm import same_machine
from tests.ranks import World, join_another_group
from tests.small import stack, step


def batch(width: int = 6) -> torch.Tensor:
    """The same on all ranks, also after their process group."""
    return torch.linspace(-1, 1, 3 * width).view(3, width)


class Late(nn.Module):
    """On rank 1 it takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        if dist.is_initialized() and dist.get_rank():
            time.sleep(0.2)
        return self.linear(x)


def sharded() -> FSDP:
    torch.manual_seed(0)
    return FSDP(nn.Sequential(Late(), Late()), auto_wrap_policy=ModuleWrapPolicy({Late}))


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return model(batch(64)).pow(2).mean().item()


def summed(model: FSDP) -> float:
    with FSDP.summon_full_params(model):
        if dist.get_rank():
            time.sleep(0.2)
        return sum(param.double().sum().item() for param in model.parameters())


def trained(model: nn.Module) -> float:
    loss = model(batch(64)).pow(2).mean()
    loss.backward()
    return loss.item()


def destroy() -> None:
    """And live on, with other data where what was lent has been."""
    dist.destroy_process_group()
    until, kept = time.monotonic() + 1.5, []
    while time.monotonic() < until:
        kept = [*kept[-20:], torch.full((64 * 33,), 1e30)]
        time.sleep(0.001)


ENDS = {
    "destroys its process group": destroy,
    "exits": sys.exit,
    "raises": lambda: 1 / 0,
    "exits at once": lambda: os._exit(0),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def late(end: str, does) -> float:
    """Rank 0 is done before rank 1 has read all of it, and ends."""
    model, do = sharded(), globals()[does]
    evaluate(model)
    found = do(model)
    if dist.get_rank() == 0:
        try:
            ENDS[end]()
        except BaseException:
            os._exit(1)  # without what multiprocessing does, as a process of torchrun ends
    return found


@pytest.mark.parametrize("does", ["evaluate", "trained", "summed"])
@pytest.mark.parametrize("end", ENDS)
def test_who_is_late_finds_what_was_lent_when_a_rank(end, does):
    world = World(2)
    try:
        world.call(os.getpid, (), {}, 60)  # all are there
        for connection in world.connections:
            connection.send((late, (end, does), {}))
        ok, found, _ = world.connections[1].recv()
    finally:
        world.kill()
    torch.manual_seed(0)
    plain = nn.Sequential(Late(), Late())
    expected = sum(param.double().sum().item() for param in plain.parameters())
    assert ok, found
    assert found == pytest.approx(expected if does == "summed" else evaluate(plain), rel=1e-5)


def caught() -> float:
    """Rank 0 catches an exception, and sets its parameters."""
    model = sharded()
    for _ in range(3):  # in the first steps rank 1 would ask where rank 0 is
        evaluate(model)
    if dist.get_rank() == 0:
        model.module[1].module.linear.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(model)
        for param in model.parameters():
            param.data.fill_(1e30)
        time.sleep(1)
        return 0.0
    return evaluate(model)


def test_who_is_late_finds_what_a_rank_has_lent_before_an_exception():
    world = World(2)
    try:
        _, found = world.call(caught, (), {}, 60)
    finally:
        world.kill()
    torch.manual_seed(0)
    assert found == pytest.approx(evaluate(nn.Sequential(Late(), Late())), rel=1e-5)


def again_and_again(folder: str) -> list[int]:
    """Process groups that are destroyed, with what was lent in them."""
    files = []
    for _ in range(6):
        join_another_group(folder)
        step(stack(2))
        files.append(sum("memfd" in os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()))
    assert len(same_machine.neighbors) <= 2
    return files


def open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_process_groups_again_and_again_keep_nothing(tmp_path):
    """Faster one after the other than the thread looks that closes them."""
    world = World(2)
    try:
        for files in world.call(again_and_again, (str(tmp_path),), {}, 60):
            assert files[-1] <= files[0] + 4, files
    finally:
        world.kill()


# ----------------------------------------------------- what is done after the process group is gone


def calls(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> dict:
    def sharded_state() -> None:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.state_dict()

    def recompute() -> None:
        checkpoint(model, batch(), use_reentrant=False).sum().backward()

    found = {
        "forward": lambda: model(batch()),
        "evaluation": lambda: torch.no_grad()(model)(batch()),
        "checkpoint": recompute,
        "state_to_save": lambda: minifsdp.state_to_save(model, optimizer),
        "state_to_load": lambda: minifsdp.state_to_load(model, optimizer).__enter__(),
        "as_dtensors": lambda: minifsdp.as_dtensors(model, optimizer).__enter__(),
        "optim_state_dict": lambda: FSDP.optim_state_dict(model, optimizer),
    }
    if kind == "fully_shard":
        return {**found, "unshard": model.unshard}
    return {
        **found,
        "state_dict": model.state_dict,
        "sharded state_dict": sharded_state,
        "summon_full_params": lambda: FSDP.summon_full_params(model).__enter__(),
        "clip_grad_norm_": lambda: model.clip_grad_norm_(1.0),
    }


def after_its_end(kind: str, steps: int) -> dict[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    if kind == "fully_shard":
        fully_shard(model)
    else:
        model = FSDP(model, use_orig_params=kind == "rows")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(batch()).sum().backward()
        optimizer.step()
    loss = model(batch()).sum() if steps else None
    dist.barrier()
    dist.destroy_process_group()
    said = {}
    tried = calls(model, optimizer, kind)
    if loss is not None:
        tried["backward"] = loss.backward
    for name, call in reversed(tried.items()):
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "nothing"
    return said


GONE = "RuntimeError: the process group of this model is gone: dist.destroy_process_group() was"


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ["chunks", "rows", "fully_shard"])
def test_what_needs_other_ranks_says_that_the_process_group_is_gone(kind, steps):
    world = World(2)
    try:
        for said in world.call(after_its_end, (kind, steps), {}, 60):
            for name, text in said.items():
                assert text.startswith(GONE), (name, text)
    finally:
        world.kill()


def alone_after_its_end() -> float:
    model = stack(2, sharding_strategy=ShardingStrategy.NO_SHARD)
    for at in range(3):
        step(model, at)
    model.eval()
    with torch.no_grad():
        before = model(batch())
        dist.destroy_process_group()
        assert torch.equal(model(batch()), before)
    assert model.state_dict()
    try:
        model(batch()).sum().backward()
    except RuntimeError as error:
        return str(error)


def test_where_every_rank_has_everything_it_may_be_evaluated_and_saved_after_that():
    world = World(2)
    try:
        for said in world.call(alone_after_its_end, (), {}, 60):
            assert said.startswith("the process group of this model is gone")
    finally:
        world.kill()
