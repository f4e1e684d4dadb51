"""sim/calls.py: what an operator reads, writes and makes, by its schema."""

import pytest
import torch

from minifsdp.sim.calls import Call, accesses, nbytes

aten = torch.ops.aten
A, B, C = (torch.empty(size) for size in (4, 4, 4))


@pytest.mark.parametrize(
    "operation, args, kwargs, read, written",
    [
        (aten.add.Tensor, (A, B), {}, [A, B], []),
        (aten.add_.Tensor, (A, B), {}, [B], [A]),
        (aten.add.out, (A, B), {"out": C}, [A, B], [C]),
        (aten._foreach_add_.List, ([A, B], [C, C]), {}, [C, C], [A, B]),
        (aten.view.default, (A, [2, 2]), {}, [], []),
    ],
)
def test_reads_and_writes_are_those_of_the_schema(operation, args, kwargs, read, written):
    found = accesses(operation, args, kwargs)
    assert [{id(t) for t in tensors} for tensors in found] == [
        {id(t) for t in tensors} for tensors in (read, written)
    ]


def test_bytes_are_those_that_are_there():
    a = torch.empty(2, 3)
    assert nbytes(a) == 24 and nbytes(a.bfloat16()) == 12
    assert nbytes(torch.empty(1, 3).expand(100, 3)) == 12
    assert nbytes(torch.empty(0, 3)) == 0


def call(operation, *args, **kwargs) -> Call:
    return Call(operation, args, kwargs, [A], [B], [C], C)


def test_what_is_moved_is_read_and_written_once():
    assert call(aten.add.Tensor).moved == 3 * 16 and call(aten.add.Tensor).name == "add"


def test_the_host_waits_for_a_copy_that_does_not_say_otherwise():
    assert call(aten.copy_.default, A, B).blocks
    assert not call(aten.copy_.default, A, B, True).blocks
    assert call(aten._to_copy.default, A, device="cpu").blocks
    assert not call(aten._to_copy.default, A, device="cpu", non_blocking=True).blocks
    assert call(aten.add.Tensor, A, B, True).blocks  # no copy, whatever its arguments are
