"""minifsdp beside PyTorch's FSDP1 and FSDP2 on one real GPU: `python -m tests.bench.one_gpu`.

One process is rank 0 of several, as in gpu.py: kernels, streams, the host and the allocator are
real, and a collective takes its modelled time. All contenders get the same time for it.
"""

import argparse
import json
import sys
from functools import partial

import torch

import minifsdp
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.machine import machine
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.training.presets import find
from tests.bench import contenders
from tests.bench.contenders import Setting, Wrap, as_fsdp2
from tests.bench.gpu import modelled_network, name_of, steps_of

RUNS = [
    "--model gpt-125m --nodes 1 --batch 1 --seq 128",  # the host is what takes the time
    "--model gpt-125m --nodes 1 --batch 8 --seq 1024",
    "--model gpt-1.3b --nodes 2 --batch 8 --seq 1024",
]


CONTENDERS: dict[str, Wrap] = {
    **{name: contenders.CONTENDERS[name] for name in ("FSDP1", "FSDP2", "mini")},
    "mini rows": partial(as_fsdp2, reshard=True, library=minifsdp),
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
                    model = wrap(job.build(), Setting(here, bf16=True, blocks=job.blocks))
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
