"""chunks/layout.py: the layout of a unit in chunks answers what that of one in rows does."""

import inspect

import pytest
import torch

from minifsdp.chunks.layout import FeaturedChunks
from minifsdp.rows import Rows

pytestmark = pytest.mark.direct
SHAPES = [torch.Size([2, 2]), torch.Size([3])]


def test_sizes_are_those_of_the_parameters_and_the_padding():
    layout = FeaturedChunks(SHAPES, 4)
    assert layout.sizes == [4, 3, 1]
    assert layout.trained_numel == layout.padded_numel == sum(layout.sizes) == 8


def test_views_leave_out_the_padding_and_an_optimizer_sees_a_whole_shard():
    layout = FeaturedChunks(SHAPES, 4)
    weight, bias = layout.unflatten(torch.arange(8.0), None)
    assert weight.tolist() == [[0, 1], [2, 3]] and bias.tolist() == [4, 5, 6]
    shard = torch.ones(2)
    (found,) = layout.local_tensors(shard, 0)
    assert found is shard


def test_a_rank_has_one_block():
    layout = FeaturedChunks(SHAPES, 2)
    assert layout.blocks is layout.trained_blocks is None


def test_rows_have_the_same_methods():
    methods = [*inspect.getmembers(FeaturedChunks, inspect.isfunction)]
    names = [name for name, _ in methods if not name.startswith("_")]
    assert names == ["flatten", "local_tensors", "optimized_numel", "shard", "unflatten"]
    for name in names:
        of_chunks, of_rows = (
            [*inspect.signature(getattr(layout, name)).parameters]
            for layout in (FeaturedChunks, Rows)
        )
        assert of_chunks == of_rows, name
