"""boxes.py: a range of a tensor in boxes, and what torch.distributed.checkpoint does with them."""

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import MetadataIndex

from minifsdp.chunks.boxes import BoxedTensor, boxed, boxes
from tests.lone_unit import lone_unit


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 5), (1, 6), (6, 1), (3, 2, 4), (2, 3, 1, 2)])
def test_every_range_of_a_tensor_is_a_few_boxes_in_sequence(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = list(boxes(shape, start, stop))
            cut = [
                whole[tuple(map(slice, at, map(sum, zip(at, size, strict=True))))]
                for at, size in found
            ]
            assert [tuple(part.shape) for part in cut] == [size for _, size in found]
            flat = [value for part in cut for value in part.reshape(-1).tolist()]
            assert flat == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_the_example_of_the_docstring():
    assert list(boxes((4, 5), 3, 17)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert list(boxes((4, 5), 6, 8)) == [((1, 1), (1, 2))]


@pytest.mark.parametrize("rank, expected", [
    (0, [{(0, 0): [[1, 2, 3]], (1, 0): [[4, 5]]}, {}, {}]),
    (1, [{(1, 2): [[6]]}, {(): 7}, {(0,): [8, 9, 10]}]),
])  # fmt: skip
def test_the_boxes_of_a_chunk_are_views_of_it(rank, expected):
    with lone_unit(rank=rank, ranks=2) as lone:
        chunk = lone.unit.sharded_flat_param.detach()
        found = boxed(lone.unit, chunk)
        assert [tuple(tensor.shape) for tensor in found] == [(2, 3), (), (3,)]
        has = [{tuple(at): part.tolist() for at, part in t.parts.items()} for t in found]
        assert has == expected
        chunk.zero_()
        assert not any(part.any() for tensor in found for part in tensor.parts.values())


def test_torch_gets_what_it_asks_for():
    tensor = BoxedTensor(torch.Size((4, 5)), torch.empty(0, dtype=torch.bfloat16))
    tensor.parts[torch.Size((1, 0))] = part = torch.ones(2, 5, dtype=torch.bfloat16)
    (chunk,) = tensor.__create_chunk_list__()
    assert (chunk.offsets, chunk.sizes) == ((1, 0), (2, 5))
    (item,) = tensor.__create_write_items__("a.weight", tensor)
    assert item.index == MetadataIndex("a.weight", (1, 0))
    assert item.tensor_data.size == (4, 5) and item.tensor_data.chunk == chunk
    assert item.tensor_data.properties.dtype is torch.bfloat16
    assert tensor.__get_tensor_shard__(item.index) is part


def test_async_save_copies_it():
    tensor = BoxedTensor(torch.Size((4, 5)), torch.empty(0))
    chunk = torch.ones(12)
    tensor.parts |= {
        torch.Size((0, 3)): chunk[:2].view(1, 2),
        torch.Size((1, 0)): chunk[2:].view(2, 5),
    }
    copy = StateDictStager().stage({"a": tensor})["a"]
    chunk.zero_()
    assert type(copy) is BoxedTensor and copy.shape == (4, 5)
    assert {k: v.sum().item() for k, v in copy.parts.items()} == {(0, 3): 2, (1, 0): 10}


def test_to_compute_with_it_is_refused():
    tensor = BoxedTensor(torch.Size((4, 5)), torch.empty(0))
    for use in (lambda: tensor + 1, lambda: tensor.sum(), lambda: tensor.clone()):
        with pytest.raises(
            NotImplementedError, match=r"has no values to compute with.*as_dtensors"
        ):
            use()
    assert repr(tensor) == "BoxedTensor([4, 5], torch.float32, boxes {})"
