"""Models by name: what ``--model`` takes."""

import importlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.sim.models import (
    T5,
    Block,
    Gpt,
    Job,
    Llama,
    LlamaBlock,
    Vit,
    classes,
    next_token,
)


def _gpt(width: int, layers: int, heads: int) -> Job:
    return Job(lambda: Gpt(width, layers, heads), (Block,), next_token)


def _mpt(width: int, layers: int, heads: int) -> Job:
    return Job(lambda: Gpt(width, layers, heads, 50368), (Block,), next_token)


def _llama(width: int, layers: int, heads: int, keys: int, hidden: int, vocabulary: int) -> Job:
    return Job(
        lambda: Llama(width, layers, heads, keys, hidden, vocabulary), (LlamaBlock,), next_token
    )


MODELS: dict[str, Job] = {
    "gpt-125m": _gpt(768, 12, 12),  # the sizes of GPT-3, arXiv:2005.14165, table 2.1
    "gpt-1.3b": _gpt(2048, 24, 16),
    "gpt-7b": _gpt(4096, 32, 32),
    "gpt-13b": _gpt(5120, 40, 40),
    "gpt-30b": _gpt(7168, 48, 56),  # OPT's, arXiv:2205.01068, table 1
    "gpt-175b": _gpt(12288, 96, 96),
    "mpt-125m": _mpt(768, 12, 12),  # MosaicML's, github.com/mosaicml/llm-foundry
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    "llama2-7b": _llama(4096, 32, 32, 32, 11008, 32000),  # arXiv:2307.09288
    "llama2-13b": _llama(5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": _llama(8192, 48, 64, 8, 22016, 32000),  # IBM's, fms-fsdp
    "llama2-70b": _llama(8192, 80, 64, 8, 28672, 32000),
    "llama3-8b": _llama(4096, 32, 32, 8, 14336, 128256),  # arXiv:2407.21783
    "llama3-70b": _llama(8192, 80, 64, 8, 28672, 128256),
    "t5-500m": Job(lambda: T5(1024, 16, 16, 4096), (Block,), next_token),
    # RoBERTa's sizes (arXiv:1907.11692), with so many layers that it is 1 GB in fp32
    "roberta-1gb": Job(lambda: Gpt(1024, 16, 16, 50265, False), (Block,), next_token),
    "vit-h": Job(lambda: Vit(1280, 32, 16), (Block,), classes),  # arXiv:2010.11929
}


def find(name: str, config: str = "") -> Job:
    """A preset; ``module:callable`` of the user's own, which returns a :class:`Job`; or
    ``hf:CLASS``, a class of transformers with a JSON file as its configuration.

    Raises:
        ValueError: there is no such thing.
    """
    if name in MODELS:
        return MODELS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"model {name!r} is not known. There are {', '.join(MODELS)}; or write module:callable "
            f"for one of your own, which returns a minifsdp.sim.models.Job."
        )
    if module == "hf":
        return _from_transformers(attribute, config)
    try:
        found = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {name!r}: {error}") from error
    if not isinstance(found, Job):
        raise ValueError(
            f"model {name!r}: {attribute}() returned a {type(found).__name__}, not a "
            f"minifsdp.sim.models.Job(build, blocks, loss)."
        )
    return found


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
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {config!r} is not {name}'s configuration: {error}") from error
    with torch.device("meta"):
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
