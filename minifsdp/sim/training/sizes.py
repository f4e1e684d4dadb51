"""Models by name, and their sizes.

==========  ==========================================================
gpt, mpt    width, layers, heads
llama       width, layers, heads, heads of keys, hidden, vocabulary
t5          width, layers of each half, heads, hidden
roberta     width, layers, heads, vocabulary
vit         width, layers, heads
==========  ==========================================================
"""

SIZES: dict[str, tuple[str, tuple[int, ...]]] = {
    "gpt-125m": ("gpt", (768, 12, 12)),  # the sizes of GPT-3, arXiv:2005.14165, table 2.1
    "gpt-1.3b": ("gpt", (2048, 24, 16)),
    "gpt-2.7b": ("gpt", (2560, 32, 32)),
    "gpt-7b": ("gpt", (4096, 32, 32)),
    "gpt-13b": ("gpt", (5120, 40, 40)),
    "gpt-30b": ("gpt", (7168, 48, 56)),  # OPT's, arXiv:2205.01068, table 1
    "gpt-175b": ("gpt", (12288, 96, 96)),
    "mpt-125m": ("mpt", (768, 12, 12)),  # MosaicML's, github.com/mosaicml/llm-foundry
    "mpt-350m": ("mpt", (1024, 24, 16)),
    "mpt-760m": ("mpt", (1536, 24, 12)),
    "mpt-1b": ("mpt", (2048, 24, 16)),
    "mpt-3b": ("mpt", (2560, 32, 20)),
    "mpt-7b": ("mpt", (4096, 32, 32)),
    "mpt-13b": ("mpt", (5120, 40, 40)),
    "mpt-30b": ("mpt", (7168, 48, 56)),
    "mpt-70b": ("mpt", (8192, 80, 64)),
    "llama2-7b": ("llama", (4096, 32, 32, 32, 11008, 32000)),  # arXiv:2307.09288
    "llama2-13b": ("llama", (5120, 40, 40, 40, 13824, 32000)),
    "llama2-34b": ("llama", (8192, 48, 64, 8, 22016, 32000)),  # IBM's, fms-fsdp
    "llama2-70b": ("llama", (8192, 80, 64, 8, 28672, 32000)),
    "llama3-8b": ("llama", (4096, 32, 32, 8, 14336, 128256)),  # arXiv:2407.21783
    "llama3-70b": ("llama", (8192, 80, 64, 8, 28672, 128256)),
    "t5-500m": ("t5", (1024, 16, 16, 4096)),
    # RoBERTa's sizes (arXiv:1907.11692), with so many layers that it is 1 GB in fp32
    "roberta-1gb": ("roberta", (1024, 16, 16, 50265)),
    "vit-h": ("vit", (1280, 32, 16)),  # arXiv:2010.11929
}
