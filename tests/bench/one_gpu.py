"""minifsdp beside PyTorch's FSDP1 and FSDP2 on one real GPU: `python -m tests.bench.one_gpu`.

One process is rank 0 of several, as in gpu.py: kernels, streams, the host and the allocator are
real, and a collective takes its modelled time. All contenders get the same time for it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from torch import nn

import minifsdp
import minifsdp.core
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.machine import machine
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.training.presets import find
from tests.bench.gpu import modelled_network, name_of, steps_of

RUNS = [
    "--model gpt-125m --nodes 1 --batch 1 --seq 128",  # the host is what takes the time
    "--model gpt-125m --nodes 1 --batch 8 --seq 1024",
    "--model gpt-1.3b --nodes 2 --batch 8 --seq 1024",
]


def _flat(library: Any, module: nn.Module, blocks: Any, **options: Any) -> nn.Module:
    policy = theirs.wrap if library is theirs else library
    return library.FullyShardedDataParallel(  # type: ignore[no-any-return]
        module, auto_wrap_policy=policy.ModuleWrapPolicy(set(blocks)), **options
    )


def _with_16_bits(library: Any, module: nn.Module, blocks: Any, **options: Any) -> nn.Module:
    precision = library.MixedPrecision(torch.bfloat16, torch.bfloat16)
    return _flat(library, module, blocks, mixed_precision=precision, **options)


def _fully_shard(library: Any, module: nn.Module, blocks: Any) -> nn.Module:
    precision = theirs.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for block in module.modules():
        if isinstance(block, tuple(blocks)):
            library.fully_shard(block, mp_policy=precision)
    return library.fully_shard(module, mp_policy=precision)  # type: ignore[no-any-return]


CONTENDERS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "local": lambda module, blocks: module.to(torch.bfloat16),  # all of it, for itself
    "FSDP1": partial(_with_16_bits, theirs),
    "FSDP2": partial(_fully_shard, theirs),
    "mini": partial(_with_16_bits, minifsdp),
    "mini rows": partial(_fully_shard, minifsdp),
}


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--rounds", type=int, default=2)
    given = p.parse_args(argv)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu, here = name_of(properties.name, properties.total_memory), torch.device("cuda", 0)
    found = {}
    for run in RUNS:
        options = parser().parse_args([*run.split(), "--gpu", gpu])
        preset, around = machine(options)
        job = find(options.model)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for _ in range(given.rounds):
            for name, wrap in CONTENDERS.items():
                with modelled_network(Cluster(preset, **around)), here:
                    model = wrap(job.build(), job.blocks)
                    loss_of = partial(job.loss, model, options.batch, options.seq)
                    rounds[name].append(steps_of(model, loss_of))
                    del model, loss_of
        print(run)
        for name, figures in rounds.items():
            best = {key: min(figure[key] for figure in figures) for key in figures[0]}
            print(
                f"  {name:10} {best['step'] * 1e3:7.2f} ms "
                f"{best['peak allocated'] / 2**30:6.2f} GiB allocated, "
                f"{best['peak reserved'] / 2**30:6.2f} GiB reserved",
                flush=True,
            )
        found[run] = rounds
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
