"""A script as people write it for torch's FSDP1. test_scripts.py runs it as it is, and with
`minifsdp` in place of `torch.distributed.fsdp` in its imports.

    torchrun --nproc-per-node 2 tests/scripts/train_fsdp1.py --precision bf16 --use-orig-params
"""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

VOCABULARY, WIDTH, LENGTH = 32, 16, 12
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, 2, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parse(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--use-orig-params", action="store_true")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations")
    parser.add_argument("--comm-hook", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-norm", type=float, default=10.0)
    parser.add_argument("--init-scale", type=float, default=2.0**10)
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def wrap(model, args):
    dtype = DTYPES[args.precision]
    mixed_precision = None
    if dtype is not None:
        mixed_precision = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        mixed_precision=mixed_precision,
        sharding_strategy=ShardingStrategy[args.strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=args.cpu_offload),
        device_id=torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu"),
        sync_module_states=torch.cuda.is_available(),
        limit_all_gathers=True,
        use_orig_params=args.use_orig_params,
    )
    if args.checkpoint:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(
                checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, Block),
        )
    if args.comm_hook != "none":
        hook = getattr(default_hooks, f"{args.comm_hook}_compress_hook")
        model.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), hook)
    return model


def main(argv=None):
    """Returns the losses, the norms of the gradients, the scales, and the full state dict."""
    args = parse(argv)
    rank, device = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = wrap(Transformer(), args)
    if rank == 0:
        print(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    scaler = ShardedGradScaler(
        device, init_scale=args.init_scale, growth_interval=2, enabled=args.precision == "fp16"
    )
    data = torch.Generator().manual_seed(1 + rank)

    def micro_batch():
        tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=data)
        logits = model(tokens.to(model.compute_device))
        targets = (tokens + 1) % VOCABULARY
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(logits.device).flatten())
        scaler.scale(loss / args.accumulate).backward()
        return loss.detach()

    losses, norms, scales = [], [], []
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(2, device=model.compute_device)
        with model.no_sync():
            for _ in range(args.accumulate - 1):
                total[0] += micro_batch()
        total[0] += micro_batch()
        total[1] = args.accumulate
        scaler.unscale_(optimizer)
        norms.append(float(model.clip_grad_norm_(args.max_norm)))
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        dist.all_reduce(total, group=model.process_group)
        losses.append(float(total[0] / total[1]))
        scales.append(scaler.get_scale())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, norm {norms[-1]:.4f}")

    model.eval()
    with torch.no_grad():
        tokens = torch.arange(LENGTH, device=model.compute_device).repeat(2, 1)
        losses.append(float(model(tokens).float().logsumexp(-1).mean()))
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    if rank == 0:
        plain = Transformer()
        plain.load_state_dict(state)
    return {"losses": losses, "norms": norms, "scales": scales, "state": state}


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
