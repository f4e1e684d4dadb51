"""Train a small GPT under minifsdp, then again under DistributedDataParallel, and compare.

    python tutorials/train_gpt.py                          # 2 ranks on the CPU, or all GPUs
    python tutorials/train_gpt.py --ranks 4 --layers 8     # see --help
    python tutorials/train_gpt.py --program tutorials/fsdp_in_one_file.py
    torchrun --nproc-per-node 2 tutorials/train_gpt.py     # or launch it yourself

The text is Python's own standard library, which every machine that runs this has. Tokens are bytes.
Everything that has to do with sharding is in `shard()`; the rest is an ordinary training loop.
"""

from minifsdp.sim.cli.terminal import INTERRUPTED, begin, end_tidily, say_stopped, typed

begin(program=__name__ == "__main__")  # first: what follows takes seconds

import argparse
import copy
import importlib.util
import logging
import os
import runpy
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    core,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim.cli.files import folder_problem

CONTEXT = 64  # tokens a prediction may look back on
BATCH = 16  # sequences per rank and step
HEAD = 32  # width of one attention head


# ------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """Attention, then a two-layer network; each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, width // HEAD, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder: from tokens `[batch, time]` to logits `[batch, time, vocab]`."""

    def __init__(self, layers: int, width: int, vocab: int = 256, context: int = CONTEXT) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))


# ---------------------------------------------------------------------------------- the training


def shard(model: GPT, args: argparse.Namespace) -> Any:
    """All it takes: each block becomes a unit, what is left (embeddings, head) the root's."""
    if args.program is not None:
        program = runpy.run_path(args.program)
        model.engine = program["fsdp"](model.to(args.torch_device), Block)
        return model
    if args.core:
        return core.FullyShardedDataParallel(
            model.to(args.torch_device),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=args.strategy,
            backward_prefetch=args.prefetch,
            forward_prefetch=args.prefetch is not None,
            limit_all_gathers=args.limit,
        )
    grid = None
    if "HYBRID" in args.strategy.name:  # rows of ranks that share, columns that hold the same
        rows = args.replicas, dist.get_world_size() // args.replicas
        grid = init_device_mesh(args.device, rows, mesh_dim_names=("replicate", "shard"))
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=args.strategy,
        cpu_offload=CPUOffload(args.offload),
        mixed_precision=MixedPrecision(param_dtype=args.precision),
        device_id=args.torch_device,
        backward_prefetch=args.prefetch,
        forward_prefetch=args.prefetch is not None,
        limit_all_gathers=args.limit,
        device_mesh=grid,
    )


class Reference:
    """What it is compared with: DDP, of the model or, in mixed precision, of a copy in the low
    dtype, whose gradients train an exact one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.exact = GPT(args.layers, args.width).to(args.torch_device)
        low = self.exact if args.precision is None else copy.deepcopy(self.exact).to(args.precision)
        self.model = DDP(low)
        pairs = zip(self.exact.parameters(), low.parameters(), strict=True)
        self.pairs = [] if low is self.exact else list(pairs)

    def before_forward(self) -> None:
        for exact, low in self.pairs:
            low.data.copy_(exact)

    def before_step(self) -> None:
        for exact, low in self.pairs:
            exact.grad, low.grad = low.grad.to(exact.dtype), None


def train(
    model: nn.Module, text: Tensor, args: argparse.Namespace, reference: Reference | None = None
) -> Tensor:
    """Some steps of AdamW, on other data on each rank. Returns this rank's losses, `[steps]`."""
    name = "fsdp" if reference is None else "ddp"
    trained = model if reference is None else reference.exact
    optimizer = torch.optim.AdamW(trained.parameters())  # after wrapping: it gets the shards
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.1, cycle_momentum=False
    )
    sampler = torch.Generator().manual_seed(dist.get_rank())
    losses = torch.zeros(args.steps, device=args.torch_device)
    own = {"losses": losses, "sampler": sampler.get_state(), "random": torch.get_rng_state()}
    done, checkpoints = 0, None
    if args.checkpoint is not None and reference is None:
        from checkpoints import Checkpoints

        settings = {"steps": args.steps, "lr": args.lr, "text": len(text)}
        checkpoints = Checkpoints(args.checkpoint, model, optimizer, schedule, settings)
        done = checkpoints.resume(own)
        sampler.set_state(own["sampler"])
        torch.set_rng_state(own["random"])
        say(f"{name:>4}  {f'goes on after step {done}' if done else 'there is no checkpoint yet'}")
        if done and checkpoints.ranks != dist.get_world_size():
            say(f"      {checkpoints.ranks} ranks have made these steps; from here on, other data")
    start, shown = time.perf_counter(), done
    for step in range(done + 1, args.steps + 1):
        at = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=sampler)
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in at.tolist()])
        rows = rows.to(args.torch_device, torch.long)
        if reference is not None:
            reference.before_forward()
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        if reference is not None:
            reference.before_step()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step - 1] = loss.detach()
        if checkpoints is not None and (step % args.every == 0 or step == args.steps):
            own |= {"sampler": sampler.get_state(), "random": torch.get_rng_state()}
            checkpoints.save(step, own)
        if step == 1 or step % 50 == 0 or step == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.SUM)
            seconds, steps = time.perf_counter() - start, step - shown
            rate = steps * BATCH * CONTEXT * dist.get_world_size() / seconds
            mean /= dist.get_world_size()
            say(f"{name:>4}  step {step:4}  loss {mean:.4f}  {rate:7,.0f} tokens/s")
            start, shown = time.perf_counter(), step
    if checkpoints is not None:
        checkpoints.close()
    return losses


@torch.no_grad()
def sample(model: nn.Module, args: argparse.Namespace, start: str, length: int) -> str:
    """Let the sharded model write. All ranks take part in the gathers and draw the same bytes."""
    torch.manual_seed(0)
    tokens = torch.tensor([list(start.encode())], device=args.torch_device)
    for _ in range(length):
        logits = model(tokens[:, -CONTEXT:])[0, -1] / 0.7
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def compare(fsdp: Any, plain: GPT, losses: Tensor, reference: Tensor) -> bool:
    """Print how equal the two runs are: losses of all ranks, and every parameter. Returns whether
    they are equal in every bit."""
    worst = (losses - reference).abs().max()
    same = int((losses == reference).sum())
    counts = torch.tensor([same, len(losses)], device=worst.device)
    differ = [*(losses != reference).tolist(), True]
    first = torch.tensor(differ.index(True), device=worst.device)
    dist.all_reduce(counts)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if isinstance(fsdp, FSDP):
        with FSDP.summon_full_params(fsdp, writeback=False):
            gap, what = compare_parameters(dict(fsdp.named_parameters()), plain)
    elif isinstance(fsdp, GPT):
        gap, what = compare_parameters(fsdp.engine.full_params(), plain)
    else:
        gap, what = compare_shards(fsdp, dict(plain.named_parameters()))
    who = "the program" if isinstance(fsdp, GPT) else "minifsdp"
    say(f"{who} against DistributedDataParallel, from the same seed and on the same data:")
    say(f"  losses      {counts[0]} of {counts[1]} bit-equal   largest difference {worst:.3g}")
    say(f"  {what} bit-equal   largest difference {gap:.3g}")
    if first < len(losses):
        say(f"  (the first loss that differs is that of step {int(first) + 1})")
    if dist.get_world_size() > 2:
        say("  (the last bits of a sum of three or more depend on its order, and orders differ)")
    gaps = torch.tensor(gap, device=worst.device)
    dist.all_reduce(gaps, dist.ReduceOp.MAX)
    return float(worst) == float(gaps) == 0


def compare_parameters(found: dict[str, Tensor], plain: GPT) -> tuple[float, str]:
    """The largest difference of a parameter; and how many are equal, in words."""
    expected = dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    gaps = [(found[n] - expected[n].to(found[n].device)).abs().max().item() for n in expected]
    return max(gaps), f"parameters  {sum(gap == 0 for gap in gaps)} of {len(gaps)}"


def compare_shards(fsdp: Any, expected: dict[str, Tensor]) -> tuple[float, str]:
    """The same of this rank's shards. The core does not gather parameters between steps."""
    gaps = []
    for unit in fsdp.engine.units:
        names = [f"{unit.name}.{info.name}".lstrip(".") for info in unit.param_infos]
        flat = unit.layout.flatten([expected[name] for name in names])
        own = unit.layout.shard(flat, unit.shard_rank)
        gaps.append((own - unit.padded_shard).abs().max().item())
    return max(gaps), f"shards      {sum(gap == 0 for gap in gaps)} of {len(gaps)}"


# -------------------------------------------------------------------------------------- the rest


def say(line: str = "") -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def read(path: str | None) -> bytes:
    if path is not None:
        return Path(path).read_bytes()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)


def join(backend: str) -> None:
    """Make the group of all ranks. With `torchrun --max-restarts` each start has keys of its own in
    torchrun's store; else the ranks would look for those of the start before (pytorch 2.13)."""
    store, rank, ranks = next(iter(dist.rendezvous("env://")))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"start {start}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def main(args: argparse.Namespace) -> None:
    if args.torch_device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    join("nccl" if args.torch_device.type == "cuda" else "gloo")
    text = torch.frombuffer(bytearray(args.data), dtype=torch.uint8)

    torch.manual_seed(0)
    plain = GPT(args.layers, args.width)
    total = sum(param.nbytes for param in plain.parameters())
    model = shard(plain, args)
    held = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())  # of a DTensor
    # A program of one's own may keep its units elsewhere.
    units = f"{len(model.engine.units)} units" if hasattr(model.engine, "units") else "units"
    say(
        f"GPT: {args.layers} layers, width {args.width}, {total / 4e6:.2f} M parameters "
        f"({total / 1e6:.2f} MB) in {units} over {dist.get_world_size()} ranks; "
        f"text: {len(text) / 1e6:.1f} MB"
    )
    losses = train(model, text, args)
    at_most = ""
    if isinstance(model, FSDP):  # the others do not count
        peak = model.engine.stats.peak_unsharded_bytes
        at_most = f", at most {peak:,} bytes unsharded at a time"
    say(f"parameters per rank: {held:,} bytes held sharded{at_most} (DDP: {total:,} always)\n")

    torch.manual_seed(0)
    reference = Reference(args)
    expected = train(reference.model, text, args, reference)
    say()
    equal = compare(model, reference.exact, losses, expected)
    written = sample(model, args, "def ", 240)
    say("\nWritten by the sharded model:\n\n    " + written.replace("\n", "\n    "))
    dist.barrier()
    ranks = dist.get_world_size()
    # DDP holds the group as well. If it were the last to do so, the rank could hang: DDP frees the
    # group with Python's lock held, which gloo's thread needs in order to end (pytorch 2.13).
    del reference
    dist.destroy_process_group()
    if args.torch_device.type == "cpu" and args.precision is None and ranks <= 2 and not equal:
        sys.exit(1)  # where every bit has to be equal


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=typed(), description=__doc__.partition("\n")[0])
    chatty = os.environ.get("RANK", "0") == "0"

    def one_line(message: str) -> NoReturn:
        sys.exit(f"{parser.prog}: {message} (see --help)" if chatty else 2)

    parser.error = one_line  # type: ignore[method-assign]
    cuda = torch.cuda.device_count()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--strategy",
        default="full_shard",
        help="full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2",
    )
    parser.add_argument(
        "--replicas", type=int, default=2, help="of the whole model, with hybrid_shard"
    )
    parser.add_argument(
        "--core", action="store_true", help="with minifsdp/core/ alone: fp32, and no checkpoints"
    )
    parser.add_argument(
        "--program", metavar="FILE", help="with fsdp(model, *kinds) of a file, by its defaults"
    )
    parser.add_argument("--offload", action="store_true", help="parameters live on the host")
    parser.add_argument("--precision", default="fp32", help="to compute with: fp32, bf16")
    parser.add_argument("--prefetch", default="pre", help="pre, post or none")
    parser.add_argument(
        "--limit", default="true", help="units alive at once: a number, true (page 11), or none"
    )
    parser.add_argument("--ranks", type=int, help="default: 2 on the CPU, all GPUs on CUDA")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="cpu or cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help=f"a multiple of {HEAD}")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save there, and go on from what is there"
    )
    parser.add_argument("--every", type=int, default=100, help="steps from save to save")
    parser.add_argument(
        "--text", metavar="PATH", help="a file to train on; default: Python's library"
    )
    args = parser.parse_args(argv)

    def pick(option: str, value: str, choices: dict[str, object]) -> object:
        if value not in choices:
            parser.error(f"{option} {value}: choose from {', '.join(choices)}")
        return choices[value]

    strategies = {s.name.lower().strip("_"): s for s in ShardingStrategy}
    args.strategy = pick("--strategy", args.strategy, strategies)
    precisions = {"fp32": None, "bf16": torch.bfloat16}
    args.precision = pick("--precision", args.precision, precisions)
    modes = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
    args.prefetch = pick("--prefetch", args.prefetch, {**modes, "none": None})
    pick("--device", args.device, {"cpu": 1, "cuda": 1})
    if args.device == "cuda" and not cuda:
        parser.error("--device cuda: torch sees no GPU here")
    args.torch_device = torch.device(args.device)
    launched = "WORLD_SIZE" in os.environ  # by torchrun, perhaps on several machines
    if launched:
        args.ranks = int(os.environ["WORLD_SIZE"])
    elif args.ranks is None:
        args.ranks = cuda if args.device == "cuda" else 2
    if args.device == "cuda" and not launched and args.ranks > cuda:
        parser.error(f"--ranks {args.ranks}: there are {cuda} GPUs, and each rank needs its own")
    for name in ("steps", "ranks", "layers", "replicas", "every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: has to be at least 1")
    if "HYBRID" in args.strategy.name and args.ranks % args.replicas:
        parser.error(f"--replicas {args.replicas}: has to divide the {args.ranks} ranks")
    if args.width < HEAD or args.width % HEAD:
        parser.error(f"--width {args.width}: has to be a multiple of {HEAD}, the width of a head")
    if args.limit not in ("true", "none") and not (args.limit.isdigit() and int(args.limit) >= 1):
        parser.error(f"--limit {args.limit}: has to be true, a number from 1, or none")
    args.limit = int(args.limit) if args.limit.isdigit() else args.limit == "true"
    if args.core and (
        args.offload or args.precision or args.checkpoint or "HYBRID" in args.strategy.name
    ):
        parser.error(
            "--core: the core has no --offload, --precision, --checkpoint and hybrid strategies"
        )
    if args.checkpoint is not None and importlib.util.find_spec("numpy") is None:
        parser.error("--checkpoint: torch.distributed.checkpoint needs NumPy; pip install numpy")
    if args.checkpoint is not None and chatty:
        with torch.device("meta"):
            model = GPT(args.layers, args.width)
        nbytes = 3 * sum(param.nbytes for param in model.parameters())  # two more are AdamW's
        if problem := folder_problem(args.checkpoint.expanduser(), nbytes):
            parser.error(f"--checkpoint {args.checkpoint}: {problem}")
    if args.program is not None and not Path(args.program).is_file():
        parser.error(f"--program {args.program}: there is no such file")
    try:
        args.data = read(args.text)
    except OSError as error:
        parser.error(f"--text {args.text}: {error.strerror}")
    if len(args.data) < 2 * CONTEXT:
        parser.error(f"--text {args.text}: {len(args.data)} bytes are too few; take a longer text")
    return args


def launch(args: argparse.Namespace, argv: list[str]) -> None:
    """Run this file again under torchrun, one process a rank."""
    start_ranks(args.ranks, [__file__, *argv])


def start_ranks(ranks: int, program: list[str]) -> None:
    """Run a program under torchrun; if a rank fails, end with its exit status."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    end_tidily()
    logging.disable()  # torchrun's; the ranks speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        torchrun(["--standalone", "--nproc-per-node", str(ranks), *program])
    except (KeyboardInterrupt, SignalException):
        say_stopped("\nstopped; all ranks have ended")
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # a thread of torchrun's store may abort a Python that ends as usual
    except ChildFailedError as failure:
        sys.exit(failure.get_first_failure()[1].exitcode)


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    if "RANK" in os.environ:
        try:
            main(arguments)
        except RuntimeError:
            time.sleep(2)  # Has another rank been interrupted? Then our own signal is on its way.
            raise
    else:
        launch(arguments, sys.argv[1:])
