"""Options of the caching allocator, written as for PyTorch's ``PYTORCH_ALLOC_CONF``.

``expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8``; what each does
says :class:`AllocConf`. Names, limits and words for true and false are torch's
(``c10/core/AllocatorConfig.cpp``). torch has more options, which have no meaning here, and it reads
some mistakes as something else; both are refused here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MiB = 1024 * 1024
LARGE_SEGMENT = 20 * MiB


@dataclass(frozen=True)
class AllocConf:
    """What may be chosen.

    Attributes:
        expandable_segments: one segment for each stream and pool, that grows (segments.py).
        max_split_size: bytes. Blocks of this size or more are not cut: they are kept for requests
            that are nearly as large. None: all are cut.
        garbage_collection_threshold: above this share of the GPU's memory, free blocks that have
            not been used for long are given back before more is asked for. 0: they are kept.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    garbage_collection_threshold: float = 0.0


DEFAULTS = AllocConf()


def parse(text: str) -> AllocConf:
    """The options in a string; the last counts where one is given twice.

    Raises:
        ValueError: it is not ``name:value,name:value``, or torch would refuse it.
    """
    found: dict[str, Any] = {}
    for part in "".join(text.split()).split(",") if text.strip() else []:
        name, _, value = part.partition(":")
        if name not in _OPTIONS:
            known = ", ".join(f"{option}:{what}" for option, (_, what, _) in _OPTIONS.items())
            raise ValueError(f"the allocator has no option {part!r}. There are {known}.")
        field, what, read = _OPTIONS[name]
        try:
            found[field] = read(value)
        except (ValueError, KeyError):
            raise ValueError(f"the allocator's option is {name}:{what}, not {part!r}.") from None
    return AllocConf(**found)


def _split_size(value: str) -> int:
    if int(value) * MiB < LARGE_SEGMENT:
        raise ValueError
    return int(value) * MiB


def _share(value: str) -> float:
    if not 0.0 < float(value) < 1.0:
        raise ValueError
    return float(value)


_OPTIONS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "expandable_segments": (
        "expandable_segments",
        "True or False",
        {"True": True, "False": False}.__getitem__,
    ),
    "max_split_size_mb": ("max_split_size", "MiB, a whole number from 20 on", _split_size),
    "garbage_collection_threshold": (
        "garbage_collection_threshold",
        "a share between 0 and 1",
        _share,
    ),
}
