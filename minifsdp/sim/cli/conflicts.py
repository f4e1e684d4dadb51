"""Options that are right by themselves and wrong together."""

import argparse
import json
from pathlib import Path

from minifsdp.sim.cli.machine import machine
from minifsdp.sim.cli.values import NOTHING_CLOSE, ImpossibleError, meant
from minifsdp.sim.hardware.gpus import GiB
from minifsdp.sim.memory.snapshots import read
from minifsdp.sim.training.sizes import NAMES, SIZES, sized

MOST_GPUS = 131_072
SEQ = 1024  # tokens of a sample, unless somebody gives another number


def check(options: argparse.Namespace) -> None:
    """Refuse them.

    Args:
        options: as of :func:`minifsdp.sim.cli.options.add_settings`.

    Raises:
        ValueError: says what to do; :class:`ImpossibleError`, where other values of some of them
            would be all right.
    """
    if ":" not in options.model and options.model not in SIZES:
        close = meant(options.model, list(SIZES))
        raise ValueError(
            f"--model: {options.model!r} is not known{close or NOTHING_CLOSE} (One of your own is "
            f"module:callable)"
        )
    changes = sizes_of(options)
    if changes:
        if options.model not in SIZES:
            raise ImpossibleError(
                f"--{next(iter(changes)).replace('_', '-')} is a size of a preset; the model "
                f"{options.model!r} has its own"
            )
        sized(options.model, changes)
    check_machine(options)
    check_groups(options)
    check_engine(options)
    if options.model.startswith("hf:"):
        check_config(options.config)
    elif options.config:
        raise ImpossibleError(
            "--config is for a model of transformers, as --model hf:LlamaForCausalLM"
        )
    if options.input and (options.model in SIZES or options.model.startswith("hf:")):
        raise ImpossibleError(
            f"--input is for a model of your own (module:callable); {options.model} takes --seq"
        )
    if options.input and options.seq != SEQ:
        raise ImpossibleError(
            "--seq is for texts; with --input a sample has the shape that you give there"
        )


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """Those of a preset that are to be other than its own."""
    return {name: value for name in NAMES if (value := getattr(options, name)) is not None}


def check_machine(options: argparse.Namespace) -> None:
    """That there can be such a cluster, and be shared out as the strategy wants it.

    Raises:
        ImpossibleError: says what to do.
    """
    gpu, around = machine(options)
    nodes, gpus = around["nodes"], around["gpus_per_node"]
    if nodes * gpus > MOST_GPUS:
        raise ImpossibleError(
            f"--nodes {nodes} with --gpus {gpus} each are more than {MOST_GPUS:,} "
            f"GPUs; take fewer nodes"
        )
    if options.memory is not None and int(options.memory * GiB) > gpu.memory:
        raise ImpossibleError(
            f"--memory {options.memory:g}: {gpu.name} has {gpu.memory / GiB:.2f} GiB; take no more "
            f"than that, or another --gpu, or one of your own (minifsdp cluster)"
        )


def check_groups(options: argparse.Namespace) -> None:
    """That GPUs can be shared out among groups which share a model.

    Raises:
        ImpossibleError: says what to do.
    """
    together, (_, around) = options.shard_group, machine(options)
    if together is None:
        return
    if options.strategy not in ("hybrid_shard", "hybrid_shard_zero2"):
        raise ImpossibleError(
            f"--shard-group {together} is for hybrid strategies; give --strategy hybrid_shard, or "
            f"leave it out"
        )
    gpus = around["nodes"] * around["gpus_per_node"]
    if gpus % together:
        raise ImpossibleError(
            f"--shard-group {together}: {gpus} GPUs cannot be shared out among groups of "
            f"{together}; take a divisor of {gpus}"
        )


def check_calibrate(options: argparse.Namespace) -> None:
    """Options of ``calibrate`` that exclude each other.

    Raises:
        ValueError: says what to do.
    """
    if options.gpu and not options.profile:
        raise ValueError("--gpu is for --profile; without it, the machine itself is measured")
    if options.ranks and options.profile:
        raise ValueError("--ranks is for a measurement; a profile has the ranks that it has")


def check_against(options: argparse.Namespace) -> None:
    """A snapshot is compared with one run.

    Raises:
        ValueError: there are several, or it is no snapshot.
    """
    if options.against is not None:
        if options.sweep:
            raise ValueError("--against compares one run; leave --sweep out")
        read(options.against)


def check_engine(options: argparse.Namespace) -> None:
    """What PyTorch's engines leave no choice in."""
    fixed: dict[str, tuple[str, ...]] = {}
    if options.engine == "fsdp1":
        fixed = {"limit": ("true", "none"), "forward": ("none", "pre")}
    elif options.engine == "fsdp2":
        fixed = {"limit": ("true", "none"), "forward": ("none",), "backward": ("pre",)}
    for name, values in fixed.items():
        given = getattr(options, name)
        if given not in (*values, None):  # None: plan will choose
            known = " or ".join(values)
            raise ImpossibleError(
                f"--engine {options.engine} has no --{name} {given}; give {known}, or --engine "
                f"minifsdp"
            )


def check_config(path: str) -> None:
    """A JSON file with an object in it."""
    if not path:
        raise ValueError("an hf: model needs --config FILE, its configuration as JSON")
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config: cannot read {path!r}: {error.strerror}") from error
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"--config: {path!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config: {path!r} has a {type(found).__name__}, not an object {{...}}")
