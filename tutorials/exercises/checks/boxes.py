"""Checks of boxes.py: ranges of elements, and what several ranks have of the same parameters."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from tutorials.exercises.catalog import check

SHAPES = ((), (7,), (3, 2), (4, 1), (2, 3, 4), (3, 1, 2, 2))


def _boxes(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "raised" in got:
        return "a shape () has no rows, and one element; an empty range has no box"
    if "number of boxes" in what:
        return "whole rows that follow each other are one box, and not one box each"
    if "dimensions" in what and want == [0]:
        return "a shape () has no rows, and one element: its box has no dimensions"
    if "dimensions" in what and got:
        return "a box says for each dimension where it begins, and how large it is"
    if not isinstance(got, list):
        return None
    if len(set(got)) < len(got):
        return "an element is in two boxes: which rows are whole, rounded up or down"
    if set(want) - set(got) or not got:
        return (
            "elements are missing: the end of one row, the rows between, the beginning of another"
        )
    if set(got) - set(want):
        return "there are elements outside of the range: which rows are whole, rounded up or down"
    return "the boxes come in the order of memory, since views of a chunk are cut off one by one"


def _elements(shape: tuple[int, ...], boxes: list[Any]) -> list[int]:
    """The elements in some boxes of a tensor of this shape, by their places in memory."""
    places = torch.arange(prod(shape)).view(shape)
    found: list[int] = []
    for offsets, sizes in boxes:
        inside = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        found += places[inside].flatten().tolist()
    return found


@check("boxes.1", because=_boxes)
def ranges_of_elements() -> Iterator[Any]:
    from minifsdp.chunks.boxes import boxes

    for shape in SHAPES:
        for start in range(prod(shape) + 1):
            for stop in range(start, prod(shape) + 1):
                about = f"elements {start} to {stop} of a tensor {list(shape)}"
                found = list(boxes(shape, start, stop))
                dimensions = {len(offsets) for offsets, _ in found}
                dimensions |= {len(sizes) for _, sizes in found}
                yield f"dimensions of the boxes, {about}", sorted(dimensions)
                yield f"elements in the boxes, {about}", _elements(shape, found)
                most = max(2 * len(shape) - 1, 1)
                yield f"whether the number of boxes is at most {most}, {about}", len(found) <= most


@check("boxes.1", because=_boxes)
def what_three_ranks_save_is_the_whole() -> Iterator[Any]:
    from minifsdp.chunks.boxes import boxed
    from tests.lone_unit import SHAPES as PARAMS
    from tests.lone_unit import lone_unit

    for ranks in (1, 2, 3, 4):
        wholes = {name: torch.full(shape, torch.nan) for name, shape in PARAMS.items()}
        for rank in range(ranks):
            with lone_unit(rank, ranks) as lone:
                chunk = lone.unit.sharded_flat_param.detach()
                for whole, tensor in zip(wholes.values(), boxed(lone.unit, chunk), strict=True):
                    for offsets, part in tensor.parts.items():
                        pairs = zip(offsets, part.shape, strict=True)
                        whole[tuple(slice(at, at + size) for at, size in pairs)] = part
        for name, whole in wholes.items():
            yield f"{name}, put together from the boxes that {ranks} ranks have of it", whole
