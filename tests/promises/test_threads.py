"""Promises about threads: each may train a model of its own, and one model is for one at a time."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from minifsdp.comm import deadlock_watch
from tests.promises import batch
from tests.ranks import device, on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="CUDA has one current device")


def model(seed: int, group: dist.ProcessGroup, kind: str) -> nn.Module:
    torch.manual_seed(seed)
    blocks = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2 + seed))
    plain = nn.Sequential(*blocks)
    if kind == "chunks":
        policy = ModuleWrapPolicy({nn.Sequential})
        return FSDP(plain, process_group=group, auto_wrap_policy=policy)
    mesh = DeviceMesh.from_group(group, device().type)
    for block in plain:
        fully_shard(block, mesh=mesh)
    return fully_shard(plain, mesh=mesh)


def train(trained: nn.Module, seed: int, steps: int) -> list[float]:
    losses, optimizer = [], torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in range(steps):
        loss = trained(batch(3, 6, step=100 * seed + step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_threads(functions) -> None:
    errors: list[BaseException] = []

    def run(function) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", ["chunks", "rows"])
@pytest.mark.parametrize("wraps", ["before", "in the thread"])
@on_ranks(2)
def test_two_models_in_two_threads_each_in_its_process_group(kind, wraps):
    """They wait, compare and prefetch at the same time; each trains as it does alone."""
    groups = [dist.new_group() for _ in range(4)]  # torch makes groups in one order, in one thread
    alone = [train(model(seed, groups[seed], kind), seed, 8) for seed in range(2)]
    made = {s: model(s, groups[2 + s], kind) for s in range(2 if wraps == "before" else 0)}
    found = {}

    def run(seed: int) -> None:
        time.sleep(0.02 * ((dist.get_rank() + seed) % 2))  # another one is first on each rank
        trained = made.get(seed) or model(seed, groups[2 + seed], kind)
        found[seed] = train(trained, seed, 8)

    in_threads([lambda: run(0), lambda: run(1)])
    assert [found[0], found[1]] == alone
    assert not deadlock_watch.waiting


class Meets(nn.Module):
    """Its forward waits until the test goes on; perhaps after a backward of its own."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(6, 6), asks
        self.begun, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        if self.asks:
            torch.autograd.grad(self.linear(x.requires_grad_()).sum(), x)
        self.begun.set()
        assert self.go_on.wait(30)
        return self.linear(x)


@pytest.mark.parametrize("asks", [False, True])
@on_ranks(2)
def test_one_model_in_two_threads_at_the_same_time_is_refused(asks):
    meets = Meets(asks)
    trained = FSDP(nn.Sequential(meets, nn.Linear(6, 2)))

    def second() -> None:
        assert meets.begun.wait(30)
        try:
            with pytest.raises(RuntimeError, match=r"root: Sequential\) runs in another thread"):
                trained(batch(3, 6))
        finally:
            meets.go_on.set()

    in_threads([lambda: train(trained, 0, 3), second])
    train(trained, 0, 1)  # the first one has not noticed; and this is a third thread, after it


@on_ranks(2)
def test_so_is_a_forward_beside_a_backward():
    trained = FSDP(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
    begun, go_on = threading.Event(), threading.Event()

    def hook(grad: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(30)

    def first() -> None:
        x = batch(3, 6).requires_grad_()
        x.register_hook(hook)
        trained(x).sum().backward()

    def second() -> None:
        assert begun.wait(30)
        try:
            with pytest.raises(RuntimeError, match="runs in another thread at the same time"):
                trained(batch(3, 6))
        finally:
            go_on.set()

    in_threads([first, second])
    train(trained, 0, 1)


@on_ranks(2)
def test_threads_may_take_turns():
    trained, other = (model(0, dist.new_group(), "chunks") for _ in range(2))
    expected = [train(other, at, 2) for at in range(3)]
    found = []
    for at in range(3):
        in_threads([lambda at=at: found.append(train(trained, at, 2))])
    assert found == expected
