"""Options that are right by themselves and wrong together."""

import argparse
import json
from pathlib import Path

from minifsdp.sim.cli.machine import machine
from minifsdp.sim.cli.values import NOTHING_CLOSE, meant
from minifsdp.sim.hardware.gpus import GiB
from minifsdp.sim.memory.snapshots import read
from minifsdp.sim.training.sizes import SIZES

MOST_GPUS = 131_072


def check(options: argparse.Namespace) -> None:
    """Refuse them.

    Args:
        options: as of :func:`minifsdp.sim.cli.options.add_settings`.

    Raises:
        ValueError: says what to do.
    """
    if ":" not in options.model and options.model not in SIZES:
        close = meant(options.model, list(SIZES))
        raise ValueError(
            f"--model: {options.model!r} is not known{close or NOTHING_CLOSE} (One of your own is "
            f"module:callable)"
        )
    gpu, around = machine(options)
    gpus = around["gpus_per_node"]
    if options.nodes * gpus > MOST_GPUS:
        raise ValueError(
            f"--nodes {options.nodes} with --gpus {gpus} each are more than {MOST_GPUS:,} "
            f"GPUs; take fewer nodes"
        )
    has = gpu.memory / GiB
    if options.memory is not None and options.memory > has:
        raise ValueError(
            f"--memory {options.memory:g}: {gpu.name} has {has:.1f} GiB; take less, or another "
            f"--gpu"
        )
    check_engine(options)
    if options.model.startswith("hf:"):
        check_config(options.config)
    elif options.config:
        raise ValueError("--config is for a model of transformers, as --model hf:LlamaForCausalLM")
    if options.input and (options.model in SIZES or options.model.startswith("hf:")):
        raise ValueError(
            f"--input is for a model of your own (module:callable); {options.model} takes --seq"
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
        fixed = {"limit": ("2", "none"), "forward": ("none", "pre")}
    elif options.engine == "fsdp2":
        fixed = {"limit": ("2", "none"), "forward": ("none",), "backward": ("pre",)}
    for name, values in fixed.items():
        given = getattr(options, name)
        if given not in (*values, None):  # None: plan will choose
            known = " or ".join(values)
            raise ValueError(
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
