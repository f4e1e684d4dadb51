"""Models by name, and their sizes: of each family those in :data:`FIELDS`, in this order.

``hidden`` is the width between the two products of an MLP; without it, it is four times ``width``.
``layers`` of a t5 are those of each half.
"""

from minifsdp.sim.cli.values import ImpossibleError

FIELDS: dict[str, tuple[str, ...]] = {
    "gpt": ("width", "layers", "heads", "vocab"),
    "llama": ("width", "layers", "heads", "kv_heads", "hidden", "vocab"),
    "t5": ("width", "layers", "heads", "hidden", "vocab"),
    "roberta": ("width", "layers", "heads", "vocab"),
    "vit": ("width", "layers", "heads"),
}
NAMES = ("width", "layers", "heads", "kv_heads", "hidden", "vocab")
"""All that a family may have."""

SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    "gpt-125m": ("gpt", (768, 12, 12, 50304)),  # the sizes of GPT-3, arXiv:2005.14165, table 2.1
    "gpt-1.3b": ("gpt", (2048, 24, 16, 50304)),
    "gpt-2.7b": ("gpt", (2560, 32, 32, 50304)),
    "gpt-7b": ("gpt", (4096, 32, 32, 50304)),
    "gpt-13b": ("gpt", (5120, 40, 40, 50304)),
    "gpt-30b": ("gpt", (7168, 48, 56, 50304)),  # OPT's, arXiv:2205.01068, table 1
    "gpt-175b": ("gpt", (12288, 96, 96, 50304)),
    "mpt-125m": ("gpt", (768, 12, 12, 50368)),  # MosaicML's, github.com/mosaicml/llm-foundry
    "mpt-350m": ("gpt", (1024, 24, 16, 50368)),
    "mpt-760m": ("gpt", (1536, 24, 12, 50368)),
    "mpt-1b": ("gpt", (2048, 24, 16, 50368)),
    "mpt-3b": ("gpt", (2560, 32, 20, 50368)),
    "mpt-7b": ("gpt", (4096, 32, 32, 50368)),
    "mpt-13b": ("gpt", (5120, 40, 40, 50368)),
    "mpt-30b": ("gpt", (7168, 48, 56, 50368)),
    "mpt-70b": ("gpt", (8192, 80, 64, 50368)),
    "llama2-7b": ("llama", (4096, 32, 32, 32, 11008, 32000)),  # arXiv:2307.09288
    "llama2-13b": ("llama", (5120, 40, 40, 40, 13824, 32000)),
    "llama2-34b": ("llama", (8192, 48, 64, 8, 22016, 32000)),  # IBM's, fms-fsdp
    "llama2-70b": ("llama", (8192, 80, 64, 8, 28672, 32000)),
    "llama3-8b": ("llama", (4096, 32, 32, 8, 14336, 128256)),  # arXiv:2407.21783
    "llama3-70b": ("llama", (8192, 80, 64, 8, 28672, 128256)),
    "t5-500m": ("t5", (1024, 16, 16, 4096, 32128)),
    # RoBERTa's sizes (arXiv:1907.11692), with so many layers that it is 1 GB in fp32
    "roberta-1gb": ("roberta", (1024, 16, 16, 50265)),
    "vit-h": ("vit", (1280, 32, 16)),  # arXiv:2010.11929
}


def sized(name: str, changes: dict[str, int]) -> tuple[str, tuple[int, ...]]:
    """A family, and the sizes of a model of it, some of which are other than those of ``name``.

    Args:
        changes: by name; see :data:`NAMES`.

    Raises:
        ImpossibleError: models of this family have no such size, or sizes do not fit together.
    """
    family, sizes = SIZES[name]
    mine = dict(zip(FIELDS[family], sizes, strict=True))
    for field in changes:
        if field not in mine:
            has = ", ".join(f"--{own.replace('_', '-')}" for own in mine)
            raise ImpossibleError(
                f"--{field.replace('_', '-')}: {name} has no such size; it has {has}"
            )
    mine |= changes
    for many, few in (("width", "heads"), ("heads", "kv_heads")):
        if mine[many] % mine.get(few, 1):
            raise ImpossibleError(
                f"{name} with {few.replace('_', '-')} {mine[few]}: they have to divide its {many}, "
                f"{mine[many]}; give --{few.replace('_', '-')} or --{many} another value"
            )
    return family, tuple(mine.values())
