"""minifsdp against torch's FSDP1, FSDP2 and DDP, on this machine: `make bench`.

Three questions, each with both contenders in one run and taking turns, so that a noisy machine
disturbs both alike. Only the ratios mean anything.

- **step**: a communication-heavy GPT (34 M parameters, 32 tokens a rank), 2 ranks, one thread each.
- **bytes**: what each rank's sockets have sent during a step, as the kernel counts it (Linux).
- **host**: time the engine itself takes for each unit and step: 100 nested units of one small
  layer, in a process group of 2 ranks without a second rank: all collectives are replaced by
  nothing.
"""

import argparse
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import minifsdp.reduce
import minifsdp.unshard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from tutorials.train_gpt import GPT, Block

CPU = torch.device("cpu")
Step = Callable[[], None]


def bytes_sent() -> int:
    """By this process, over all its TCP connections: `tcpi_bytes_sent` of each."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, 200)[0]
        except OSError:
            continue  # closed meanwhile, or not TCP
    return total


def step_of(model: nn.Module, vocab: int) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(vocab, (1, 32))

    def step() -> None:
        model(tokens).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contenders() -> dict[str, Step]:
    vocab = 8192

    def gpt() -> GPT:
        torch.manual_seed(0)
        return GPT(layers=8, width=512, vocab=vocab)

    def mini(strategy: ShardingStrategy, **settings: bool) -> nn.Module:
        policy = ModuleWrapPolicy({Block})
        return FSDP(gpt(), None, strategy, None, policy, forward_prefetch=True, **settings)

    def theirs(strategy: TorchStrategy) -> nn.Module:
        return TorchFSDP(gpt(), None, strategy, None, TorchPolicy({Block}), device_id=CPU)

    def their_rows() -> nn.Module:
        model = gpt()
        for block in filter(lambda module: isinstance(module, Block), model.modules()):
            fully_shard(block)
        return fully_shard(model)

    models: dict[str, nn.Module] = {
        "minifsdp FULL_SHARD": mini(ShardingStrategy.FULL_SHARD),
        "torch FSDP1 FULL_SHARD": theirs(TorchStrategy.FULL_SHARD),
        "minifsdp SHARD_GRAD_OP": mini(ShardingStrategy.SHARD_GRAD_OP),
        "torch FSDP1 SHARD_GRAD_OP": theirs(TorchStrategy.SHARD_GRAD_OP),
        "minifsdp rows": mini(ShardingStrategy.FULL_SHARD, use_orig_params=True),
        "torch fully_shard": their_rows(),
        "minifsdp NO_SHARD": mini(ShardingStrategy.NO_SHARD),
        "torch DDP": DDP(gpt()),
    }
    return {name: step_of(model, vocab) for name, model in models.items()}


def bench_steps(rank: int, ranks: int, rounds: int, rendezvous: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    steps = contenders()
    times: dict[str, list[float]] = {name: [] for name in steps}
    sent = dict.fromkeys(steps, 0)
    for turn in range(-2, rounds):  # two rounds to warm up
        for name, step in steps.items():
            dist.barrier()
            before, start = bytes_sent(), time.perf_counter()
            step()
            dist.barrier()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
                sent[name] += bytes_sent() - before
    if rank == 0:
        print(f"a step, {ranks} ranks, one thread each, medians of {rounds} rounds:")
        for name in steps:
            milliseconds = statistics.median(times[name]) * 1e3
            print(
                f"  {name:26} {milliseconds:7.0f} ms  {sent[name] / rounds / 2**20:6.1f} MiB sent"
            )
        pairs = [*zip(list(steps)[::2], list(steps)[1::2], strict=True)]
        for a, b in [*pairs, ("minifsdp rows", "minifsdp FULL_SHARD")]:
            ratios = [x / y for x, y in zip(times[a], times[b], strict=True)]
            print(
                f"  {a} / {b}: time {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}), bytes {sent[a] / sent[b]:.2f}"
            )
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter otherwise


def bench_host(rounds: int, units: int = 100) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    minifsdp.unshard.all_gather = lambda *_, **__: lambda: None
    minifsdp.reduce.reduce_scatter = lambda flat, *_, **__: (
        flat[: len(flat) // 2].clone(),
        lambda: None,
    )
    for name in ("all_gather", "reduce_scatter_tensor", "reduce_scatter_single"):
        setattr(dist, name, lambda *_, **__: None)

    def nest(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return wrap(nn.Sequential(*(wrap(nn.Linear(16, 16)) for _ in range(units - 1))))

    models = {
        "plain module": nest(lambda module: module),
        "minifsdp": nest(lambda module: FSDP(module)),
        "torch FSDP1": nest(lambda module: TorchFSDP(module, device_id=CPU)),
    }
    x = torch.randn(4, 16)
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(-3, rounds):
        for name, model in models.items():
            start = time.process_time()
            model(x).sum().backward()
            if turn >= 0:
                times[name].append((time.process_time() - start) / units * 1e6)
    print(f"host time per unit and step, {units} units, collectives do nothing:")
    plain = statistics.median(times["plain module"])
    for name in ("minifsdp", "torch FSDP1"):
        print(f"  {name:26} {statistics.median(times[name]) - plain:7.0f} us over a plain module's")
    ratios = [
        (a - p) / (b - p)
        for a, b, p in zip(
            times["minifsdp"], times["torch FSDP1"], times["plain module"], strict=True
        )
    ]
    print(f"  minifsdp / torch FSDP1: {statistics.median(ratios):.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    bench_host(arguments.rounds)
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/ranks"
        mp.spawn(bench_steps, (arguments.ranks, arguments.rounds, rendezvous), arguments.ranks)
