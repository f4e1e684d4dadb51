"""rows.py: each rank has rows of each parameter, and all have the parameters end to end."""

import pytest
import torch

from minifsdp.comm.blocks import of_rank
from minifsdp.rows import Rows, block_numel, check_divisible, local_shape
from tests.pretended_gpu import PretendedGpu

pytestmark = pytest.mark.direct

SHAPES = [
    torch.Size(shape)
    for shape in [(3, 2), (3,), (0, 3), (1, 4), (5, 2, 2), (4, 0), (6,)]  # uneven, few, empty
]
WORLDS = (1, 2, 3, 4, 8)
TRAINED = [True, False, True, True, False, False, True]
KINDS = {"trained": [True] * 7, "frozen": [False] * 7, "some of each": TRAINED}
every_kind = pytest.mark.parametrize("trained", KINDS.values(), ids=KINDS)


def params():
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def test_the_picture():
    rows = Rows([torch.Size((3, 2)), torch.Size((3,))], [True, True], 2)
    flat = rows.flatten([torch.arange(1.0, 7).view(3, 2), torch.arange(7.0, 10)])
    assert rows.blocks == [4, 2, 2] and rows.marks == 2 and rows.padded_numel == 12 + 2 * 2
    assert flat.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 0] + 4 * [0]
    assert rows.shard(flat, 0).tolist() == [1, 2, 3, 4, 7, 8] + 2 * [0]
    assert rows.shard(flat, 1).tolist() == [5, 6, 0, 0, 9, 0] + 2 * [0]


@every_kind
def test_what_is_divided_and_gathered_is_what_it_was(trained):
    for ranks in WORLDS:
        rows = Rows(SHAPES, trained, ranks)
        shards = [rows.shard(rows.flatten(params()), rank) for rank in range(ranks)]
        parts = zip(*(s.split(rows.blocks) for s in shards), strict=True)  # as a gather lays them
        gathered = torch.cat([block for part in parts for block in part])
        assert len(gathered) == rows.padded_numel
        for found, param in zip(rows.unflatten(gathered), params(), strict=True):
            assert torch.equal(found, param)


@every_kind
def test_ranks_have_the_rows_that_torch_chunk_gives_them(trained):
    """As torch's Shard(0) does: the first ranks have equally many, the next one the rest."""
    for ranks in WORLDS:
        rows = Rows(SHAPES, trained, ranks)
        flat = rows.flatten(params())
        for rank in range(ranks):
            local = rows.local_tensors(rows.shard(flat, rank), rank)
            for param, found in zip(params(), local, strict=True):
                chunks = param.chunk(ranks) if len(param) else ()
                expected = chunks[rank] if rank < len(chunks) else param[:0]
                assert torch.equal(found, expected)
                assert found.shape == local_shape(param.shape, rank, ranks)


def test_all_blocks_of_a_parameter_are_as_large_as_the_first_ranks():
    for ranks in WORLDS:
        for shape in SHAPES:
            assert block_numel(shape, ranks) == local_shape(shape, 0, ranks).numel()


def test_what_is_frozen_comes_last_and_of_each_what_has_an_odd_length():
    rows = Rows(SHAPES, TRAINED, 2)
    assert rows.order == [0, 2, 3, 6, 4, 5, 1]
    assert rows.with_grad == rows.order[:4] and rows.marks == 4 + 1
    assert rows.trained_blocks == [4, 0, 4, 3, 5] == rows.blocks[:5]
    assert rows.trained_numel == 22 + 10 and rows.padded_numel == 22 + 10 + 4 + 24 + 0
    assert rows.optimized_numel(0) == rows.optimized_numel(1) == 11


@pytest.mark.parametrize("kind", ["trained", "frozen"])
def test_where_all_are_alike_every_element_may_have_a_gradient(kind):
    rows = Rows(SHAPES, KINDS[kind], 3)
    assert rows.order == [2, 4, 5, 0, 1, 3, 6]
    assert rows.trained_blocks == rows.blocks and rows.trained_numel == rows.padded_numel


def test_of_the_part_that_has_a_gradient_there_is_nothing_for_the_others():
    rows = Rows(SHAPES, TRAINED, 2)
    whole = rows.flatten(params())
    part, rest = whole[: rows.trained_numel], whole[rows.trained_numel :]
    for view, param, trained in zip(rows.unflatten(part), params(), TRAINED, strict=True):
        assert torch.equal(view, param) if trained else view is None
    for view, param in zip(rows.unflatten(part, rest), params(), strict=True):
        assert torch.equal(view, param)
    shard = rows.shard(whole, 1)
    everything = rows.local_tensors(shard, 1)
    of_part = rows.local_tensors(shard[: sum(rows.trained_blocks)], 1)
    for local, expected, trained in zip(of_part, everything, TRAINED, strict=True):
        assert torch.equal(local, expected) if trained else local is None


@every_kind
def test_padding_is_zero_and_so_is_its_gradient(trained):
    for ranks in WORLDS:
        rows = Rows(SHAPES, trained, ranks)
        flat = rows.flatten([param.abs() + 1 for param in params()]).requires_grad_()
        sum(view.sum() for view in rows.unflatten(flat)).backward()
        assert torch.equal(flat.grad, (flat > 0).float())
        assert flat.grad.sum() == sum(shape.numel() for shape in SHAPES)


def test_views_are_memory_of_the_flat_parameter_and_of_the_shard():
    rows = Rows(SHAPES, TRAINED, 3)
    flat, shard = torch.zeros(rows.padded_numel), torch.zeros(sum(rows.blocks))
    for view in rows.unflatten(flat) + rows.local_tensors(shard, 0):
        view += 1
    assert flat.sum() == sum(shape.numel() for shape in SHAPES)
    assert shard.sum() == len(shard) - rows.marks  # rank 0 has no padding


def test_marks_tell_what_no_rank_has_used():
    """In every dtype, also scaled, and on each rank the same: from what it has of the sum."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = Rows(SHAPES, TRAINED, 3)
        grads = [torch.zeros(rows.trained_numel, dtype=dtype) for _ in range(3)]
        for grad, unused in zip(grads, [[0, 6], [6, 0, 3], [3, 6]], strict=True):
            rows.mark_unused(grad, [rows.with_grad.index(number) for number in unused])
            assert rows.unused(grad) == sorted(unused), "also of one rank's own"
            assert not grad[: -3 * rows.marks].signbit().any(), "nothing else is written"
        mean = grads[0] / 3 + grads[1] / 3 + grads[2] / 3
        for rank in range(3):
            assert rows.unused(of_rank(mean, rows.trained_blocks, 3, rank)) == [6]


def test_a_unit_of_one_parameter_needs_no_marks():
    rows = Rows([torch.Size((3, 2))], [True], 2)
    assert rows.marks == 0 and rows.blocks == [4] and rows.unused(torch.zeros(4)) == []


def test_matrices_begin_where_memory_is_aligned_whatever_lengths_are_around_them():
    """On a GPU products read 16 bytes at a time, if they may. Those are 8 elements of bf16."""
    for number in (1, 2, 8, 9, 10, 40):
        pairs = [torch.Size((4, 16)), torch.Size((5,))] * number
        for trained in (True, False):
            rows = Rows([torch.Size((1,)), *pairs], [True] + [trained] * len(pairs), 2)
            places = [
                view.storage_offset() for view in rows.unflatten(torch.zeros(rows.padded_numel))
            ]
            assert not any(place % 8 for place in places[1::2])
            assert rows.marks >= len(rows.with_grad) and sum(rows.trained_blocks) % 8 == 0


def test_a_shard_does_not_keep_the_whole_alive():
    rows = Rows([torch.Size((4, 2))], [True], 2)
    shard = rows.shard(rows.flatten([torch.ones(4, 2)]), 0)
    assert shard.untyped_storage().nbytes() == shard.nbytes


def test_the_dtype_stays_and_no_gradient_is_needed():
    rows = Rows(SHAPES, TRAINED, 2)
    flat = rows.flatten([torch.nn.Parameter(param.bfloat16()) for param in params()])
    assert flat.dtype is torch.bfloat16 and not flat.requires_grad


def test_what_has_no_rows_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'scale' has no dimension.* vector of one element"):
        check_divisible({"weight": torch.ones(2), "scale": torch.tensor(1.0)})


def test_a_unit_has_one_device_and_may_be_frozen_in_part():
    weight = torch.nn.Parameter(torch.ones(2))
    check_divisible({"weight": weight, "bias": torch.ones(2)})
    check_divisible({"weight": weight, "bias": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"same device. Found cpu: weight; meta: bias"):
        check_divisible({"weight": weight, "bias": torch.ones(2, device="meta")})


def test_marks_of_parameters_are_set_without_a_wait():
    layout = Rows([torch.Size([4]), torch.Size([3]), torch.Size([2])], [True, True, True], 2)
    with PretendedGpu() as gpu:
        grad = torch.zeros(layout.trained_numel, device="cuda")
        layout.mark_unused(grad, [0, 2])
        assert gpu.waits == []
        assert layout.unused(grad) == [0, 2]
