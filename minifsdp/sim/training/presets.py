"""Models by name: what ``--model`` takes."""

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.sim.cli.blame import blaming
from minifsdp.sim.training.llama import Llama, LlamaBlock
from minifsdp.sim.training.models import T5, Block, Gpt, Job, Vit, classes, next_token
from minifsdp.sim.training.plain import job_of
from minifsdp.sim.training.sizes import SIZES, sized


def _gpt(width: int, layers: int, heads: int, vocabulary: int) -> Job:
    return Job(lambda: Gpt(width, layers, heads, vocabulary), (Block,), next_token)


def _roberta(width: int, layers: int, heads: int, vocabulary: int) -> Job:
    return Job(lambda: Gpt(width, layers, heads, vocabulary, causal=False), (Block,), next_token)


def _llama(width: int, layers: int, heads: int, keys: int, hidden: int, vocabulary: int) -> Job:
    return Job(
        lambda: Llama(width, layers, heads, keys, hidden, vocabulary), (LlamaBlock,), next_token
    )


FAMILIES: dict[str, Callable[..., Job]] = {
    "gpt": _gpt,
    "llama": _llama,
    "t5": lambda *sizes: Job(lambda: T5(*sizes), (Block,), next_token),
    "roberta": _roberta,
    "vit": lambda *sizes: Job(lambda: Vit(*sizes), (Block,), classes),
}
MODELS = {name: FAMILIES[family](*sizes) for name, (family, sizes) in SIZES.items()}


def find(
    name: str, config: str = "", shape: str = "", changes: dict[str, int] | None = None
) -> Job:
    """A preset; ``module:callable`` of the user's own, which returns a :class:`Job` or a plain
    ``nn.Module`` (plain.py); or ``hf:CLASS``, a class of transformers with a JSON file as its
    configuration.

    Args:
        shape: of one sample, for a plain module that does not take tokens: ``"3x224x224"``.
        changes: sizes of a preset that are to be other than its own; see sizes.py.

    Raises:
        ValueError: there is no such thing, or it cannot be made.
    """
    if changes:
        family, sizes = sized(name, changes)
        return FAMILIES[family](*sizes)
    if name in MODELS:
        return MODELS[name]
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(
            f"model {name!r} is not known. There are {', '.join(MODELS)}; or write module:callable "
            f"for one of your own."
        )
    if module == "hf":
        return _from_transformers(attribute, config)
    if "/" in module or module.endswith(".py"):
        raise ValueError(
            f"model {name!r}: a module is named as import names it, without folders and .py: "
            f"{Path(module).stem}:{attribute}. It is looked for in the current directory and on "
            f"PYTHONPATH"
        )
    try:
        with blaming(name, f"importing {module}"):
            there = importlib.import_module(module)
    except ValueError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and missing in _parents(module):
            raise ValueError(
                f"model {name!r}: there is no module {missing!r}. It is looked for in the current "
                f"directory and on PYTHONPATH"
            ) from None
        raise
    build = getattr(there, attribute, None)
    if not callable(build):
        what = "nothing" if build is None else f"{type(build).__name__}, no callable,"
        raise ValueError(f"model {name!r}: {module} has {what} of the name {attribute!r}")
    with torch.device("meta"), blaming(name, f"{attribute}()"):
        found = build()
    if isinstance(found, nn.Module):
        return job_of(name, build, shape)
    if not isinstance(found, Job):
        raise ValueError(
            f"model {name!r}: {attribute}() returned {type(found).__name__}, neither an "
            f"nn.Module nor a minifsdp.sim.training.models.Job(build, blocks, loss)."
        )
    if shape:
        raise ValueError(f"--input: model {name!r} is a Job, whose loss makes its own input")
    return found


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _from_transformers(name: str, config: str) -> Job:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"model 'hf:{name}' needs the package transformers: pip install transformers"
        ) from None
    kind: Any = getattr(transformers, name, None)
    if getattr(kind, "config_class", None) is None:
        raise ValueError(f"model 'hf:{name}': transformers has no model of this name")
    try:
        settings = kind.config_class.from_json_file(config)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--config {config!r} is not {name}'s configuration: {error}") from error
    with torch.device("meta"), blaming(f"hf:{name}", "its constructor"):
        module = kind(settings)
    # What transformers itself never splits over devices. The blocks are those of which there are
    # several; others may be embeddings, which share their weight with the output.
    names, counts = set(module._no_split_modules or ()), Counter(map(type, module.modules()))
    blocks = [part for part, count in counts.items() if part.__name__ in names and count > 1]

    def loss(model: nn.Module, batch: int, length: int) -> Tensor:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    return Job(lambda: kind(settings), tuple(blocks), loss)
