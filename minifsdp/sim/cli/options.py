"""What the command line takes, and what it says to somebody who has mistyped.

Every value is looked at before anything runs: each by itself where it is parsed (values.py), and
together (conflicts.py). No torch in here, nor in what this imports.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NoReturn

from minifsdp.sim.cli.conflicts import MOST_GPUS, SEQ, check
from minifsdp.sim.cli.machine import GPU, GPUS_PER_NODE, NETWORK, NODES
from minifsdp.sim.cli.not_modelled import FP8, check_modelled
from minifsdp.sim.cli.values import (
    NOTHING_CLOSE,
    ImpossibleError,
    alloc,
    limit,
    meant,
    number,
    one_of,
    recompute,
    shape,
    whole,
)
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.training.sizes import NAMES, SIZES

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
PRECISION = ("fp32", "tf32", "bf16", "bf16-fp32")
BACKWARD = ("pre", "post", "none")
FORWARD = ("none", "pre", "post")
UNITS = ("model", "block", "part")
ATTENTION = ("auto", "flash", "cudnn", "efficient", "math", "triton")
ENGINES = ("minifsdp", "fsdp1", "fsdp2")
OPTIMIZERS = ("sgd", "adam", "adamw", "adamw-fused", "adamw-8bit", "adamw-bf16")
YES = ("no", "yes")
SIZE_WORDS = {
    "width": "of a preset's layers, other than its own",
    "layers": "of a preset",
    "heads": "of a preset's attention",
    "kv_heads": "of a Llama's keys and values",
    "hidden": "of a Llama's or T5's MLP: the width inside",
    "vocab": "tokens that a preset knows",
}
COMMANDS = ["plan", "calibrate", "cluster"]


class Parser(argparse.ArgumentParser):
    """Refuses in one line, and says what may have been meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0]
            check_modelled(option)
            names = list(self._option_string_actions) if option.startswith("-") else COMMANDS
            close = "; it comes first" if option in COMMANDS else meant(option, names)
            self.error(f"{option} is not known here{close or NOTHING_CLOSE}")
        return found

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def add_settings(p: argparse.ArgumentParser) -> None:
    """A model, a cluster, and how to train the one on the other. All may be swept."""
    add = _adder(p)
    add("--model", "gpt-125m", f"{', '.join(SIZES)}; module:callable; or hf:CLASS, with --config")
    add("--config", "", "of an hf: model, a JSON file")
    add("--input", "", "of a model of your own: one sample's shape, as 3x224x224", shape)
    for size in NAMES:
        add(f"--{size.replace('_', '-')}", None, SIZE_WORDS[size], whole(10_000_000))
    add_machine(p)
    add("--alloc", "", "as PYTORCH_ALLOC_CONF: expandable_segments:True", alloc)
    add("--price", None, "of a GPU, dollars an hour", number(0, 1e6))
    add("--batch", 8, "samples on each GPU", whole(1_000_000))
    add("--seq", SEQ, "tokens in each", whole(1_000_000))
    add("--steps", 3, "steps; figures are of the last", whole(1000))
    add("--accumulate", 1, "batches in a step", whole(1000))
    _choice(add, "--no-sync", YES, "reduce after the last of them only")
    _choice(add, "--engine", ENGINES, "whose way to gather ahead (training/history.py)")
    _choice(add, "--strategy", STRATEGIES, "what is sharded, and until when")
    together = "GPUs that share a model in hybrid strategies (default: those of a node)"
    add("--shard-group", None, together, whole(MOST_GPUS))
    precision = f"of computation, and of reductions: {', '.join(PRECISION)}"
    add("--precision", "bf16", precision, one_of(*PRECISION, others={"fp8": FP8}))
    alive = "units alive at once: a number; true, 2 and one that only the GPU still uses; or none"
    add("--limit", "true", alive, limit)
    _choice(add, "--backward", BACKWARD, "prefetch")
    _choice(add, "--forward", FORWARD, "prefetch")
    _choice(add, "--unit", UNITS, "what is gathered at once", "block")
    _choice(add, "--offload", YES, "parameters on the host")
    kept = "what the forward keeps for the backward on the host, as torch's save_on_cpu"
    _choice(add, "--offload-activations", YES, kept)
    add(
        "--recompute",
        "none",
        "activation checkpointing: none, full, selective, or a share of the blocks, as 1/2",
        recompute,
    )
    _choice(add, "--attention", ATTENTION, "its kernel")
    _choice(add, "--fused", YES, "a Llama's norm, rotary embedding and SwiGLU in one kernel each")
    _choice(add, "--compile", YES, "each block by torch.compile (hardware/fusion.py)")
    _choice(add, "--loss", ("whole", "fused", "chunked"), "memory of logits")
    _choice(add, "--optimizer", OPTIMIZERS, "and its states", "adamw")
    _choice(add, "--clip", YES, "gradients by their norm")


def add_machine(p: argparse.ArgumentParser) -> None:
    """A GPU, and the cluster around it."""
    add = _adder(p)
    add("--gpu", None, f"{', '.join(GPUS)} (default: {GPU})", one_of(*GPUS))
    add("--cluster", "", "instead of --gpu: a file of constants, as calibrate and cluster make")
    add(
        "--nodes",
        None,
        f"of the cluster (default: {NODES}, or the --cluster file's)",
        whole(16_384),
    )
    gpus = f"of a node (default: {GPUS_PER_NODE}, or the --cluster file's)"
    add("--gpus", None, gpus, whole(1024))
    network = f"of a node, Gbit/s (default: {NETWORK}, or the --cluster file's)"
    add("--network", None, network, number(0.001, 1e6))
    add(
        "--latency",
        None,
        "of a step that leaves a node, us (default: hardware/costs.py)",
        number(0, 1e6),
    )
    launch = "the host's time for a kernel, us (default: hardware/costs.py)"
    add("--launch", None, launch, number(0, 1e6))
    reach = "share of a GPU's peak that large products reach (default: hardware/gpus.py)"
    add("--products", None, reach, number(0.001, 1))
    add(
        "--memory",
        None,
        "of a GPU, for PyTorch, GiB (default: what CUDA leaves)",
        number(0.001, 1e4),
    )


def _adder(p: argparse.ArgumentParser) -> Callable[..., None]:
    def add(name: str, default: Any, what: str, kind: Callable[[str], Any] = str) -> None:
        shown = f"{what} (default: {default})" if default else what
        p.add_argument(name, default=default, help=shown, type=kind, metavar="VALUE")

    return add


def _choice(
    add: Callable[..., None], name: str, names: Sequence[str], what: str, default: str = ""
) -> None:
    add(name, default or names[0], f"{what}: {', '.join(names)}", one_of(*names))


Row = tuple[dict[str, str], argparse.Namespace]


def grid(parser: Parser, options: argparse.Namespace, sweeps: Sequence[str]) -> list[Row]:
    """One run for each combination of the values of all sweeps.

    Args:
        sweeps: each ``NAME=A,B,...``, with the name of a setting.

    Returns:
        What is special about each run, by name; and all its settings.

    Raises:
        ValueError: a value makes no sense, or no combination does.
    """
    only = Parser(add_help=False)
    add_settings(only)
    names = [option[2:] for option in only._option_string_actions]
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        name, _, values = sweep.partition("=")
        if not values:
            raise ValueError(f"--sweep is NAME=A,B,... with the name of a setting, not {sweep!r}")
        if name not in names:
            raise ValueError(
                f"--sweep: there is no setting {name!r}{meant(name, names) or NOTHING_CLOSE}"
            )
        if name in axes:
            raise ValueError(f"--sweep {name} is there twice; write all values behind one")
        axes[name] = values.split(",")
    rows: list[Row] = []
    impossible: list[ImpossibleError] = []
    for combination in product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        its = argparse.Namespace(**vars(options))
        for name, value in chosen.items():  # as if it had been written there
            parsed = parser.parse_args([f"--{name}={value}"])
            field = name.replace("-", "_")
            setattr(its, field, getattr(parsed, field))
        try:
            check(its)
        except ImpossibleError as error:  # runs.py leaves it out, with a word, if there are others
            impossible.append(error)
        rows.append((chosen, its))
    if len(impossible) == len(rows):
        raise impossible[0]
    return rows
