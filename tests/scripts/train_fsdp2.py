"""A script as people write it for torch's FSDP2. test_scripts.py runs it as it is, and with
`minifsdp` in place of `torch.distributed.fsdp` in its imports.

    torchrun --nproc-per-node 2 tests/scripts/train_fsdp2.py --precision bf16
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from tests.scripts.train_fsdp1 import LENGTH, VOCABULARY, Transformer

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Checkpointed(Transformer):
    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--keep", action="store_true", help="do not reshard after forward")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-norm", type=float, default=10.0)
    parser.add_argument("--init-scale", type=float, default=2.0**10)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def shard(model, args):
    settings = {
        "mesh": init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[args.precision], reduce_dtype=torch.float32
        ),
        "offload_policy": OffloadPolicy(),
        "reshard_after_forward": not args.keep,
    }
    if args.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE == "cuda")
    for layer in model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def main(argv=None):
    """Returns the losses, the norms of the gradients, the scales, and the full state dict."""
    args = parse(argv)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = shard((Checkpointed if args.checkpoint else Transformer)().to(DEVICE), args)
    assert isinstance(model, Transformer) and isinstance(model, FSDPModule)
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and "norm" not in name]
    others = [p for p in model.parameters() if not any(p is other for other in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    scaler = torch.amp.GradScaler(
        DEVICE, init_scale=args.init_scale, growth_interval=2, enabled=args.precision == "fp16"
    )
    data = torch.Generator().manual_seed(1 + rank)
    losses, norms, scales = [], [], []
    for step in range(args.steps):
        total = torch.zeros((), device=DEVICE)
        for micro in range(args.accumulate):
            model.set_requires_gradient_sync(micro == args.accumulate - 1)
            tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=data).to(DEVICE)
            logits, targets = model(tokens), (tokens + 1) % VOCABULARY
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            scaler.scale(loss / args.accumulate).backward()
            total += loss.detach() / args.accumulate
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        norms.append(float(norm.full_tensor()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dist.all_reduce(total, dist.ReduceOp.AVG if DEVICE == "cuda" else dist.ReduceOp.SUM)
        losses.append(float(total))
        scales.append(scaler.get_scale())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, norm {norms[-1]:.4f}")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    if rank == 0:
        plain = Transformer()
        plain.load_state_dict(state)
        assert moments["state"].keys() == dict(plain.named_parameters()).keys()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state), options=options)
    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(LENGTH, device=DEVICE).repeat(2, 1))
        losses.append(float(logits.float().logsumexp(-1).mean()))
    return {"losses": losses, "norms": norms, "scales": scales, "state": state}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if __name__ == "__main__":
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    main()
    dist.destroy_process_group()
