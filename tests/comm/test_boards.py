"""boards.py: memory of two processes, with numbers and copies."""

import gc
import os
from unittest.mock import patch

import pytest
import torch

from minifsdp.comm import boards
from minifsdp.comm.boards import LENT, READ, Board
from tests.comm.near import NEEDED

pytestmark = [*NEEDED, pytest.mark.direct]
LAST = boards._LINES - 1


def both_sides() -> tuple[Board, Board]:
    own = Board.new(5)
    return own, Board.of(os.getpid(), own.file, 5)


def kib(board: Board) -> int:
    return os.fstat(board.file).st_blocks // 2


def files() -> int:
    gc.collect()  # what tests before this one have left would be closed meanwhile
    return len(os.listdir("/proc/self/fd"))


def test_what_one_side_writes_the_other_one_reads():
    own, theirs = both_sides()
    for line in (0, 7, LAST):
        own.write(line, LENT, line + 1)
        theirs.write(line, READ, -line)
        assert theirs.read(line, LENT) == line + 1 and own.read(line, READ) == -line
    assert not own.closed and not theirs.closed
    own.close()
    assert own.closed and theirs.closed


def test_tensors_of_all_sizes_are_copied():
    own, theirs = both_sides()
    tensors = {
        line: [torch.randn(n).to(dtype) for n in (3, 0, 1, 5000)]
        for line, dtype in ((0, torch.float32), (1, torch.bfloat16), (LAST, torch.float64))
    }
    for line, sent in tensors.items():
        own.write_copy(line, sent)
    del own  # the other side keeps them
    for line, sent in tensors.items():
        found = [torch.empty_like(tensor) for tensor in sent]
        theirs.read_copy(line, found)
        assert all(map(torch.equal, found, sent))


def test_all_is_copied_although_linux_writes_a_part_at_a_time():
    """At most 2 GiB; here it is 8 bytes."""
    own, theirs = both_sides()
    sent, found = torch.randn(20), torch.empty(20)
    write, read = os.pwrite, os.preadv
    with (
        patch.object(os, "pwrite", lambda file, data, at: write(file, data[:8], at)),
        patch.object(os, "preadv", lambda file, data, at: read(file, [data[0][:8]], at)),
    ):
        own.write_copy(3, [sent])
        theirs.read_copy(3, [found])
    assert torch.equal(sent, found)


def test_a_copy_takes_memory_until_it_is_freed_and_no_other():
    own, theirs = both_sides()
    sent = torch.randn(1 << 18)
    before = kib(own)
    for line in (4, 5, LAST):
        own.write_copy(line, [sent])
    assert kib(own) - before == 3 * 1024
    theirs.free_copy(4)
    theirs.free_copy(LAST)
    assert kib(own) - before == 1024
    found = torch.empty_like(sent)
    theirs.read_copy(5, [found])
    assert torch.equal(sent, found)


def test_another_file_is_no_board(tmp_path):
    own, before = Board.new(5), files()
    with pytest.raises(ValueError, match="is no board for this rank"):
        Board.of(os.getpid(), own.file, 6)
    with open(tmp_path / "short", "w+") as short, pytest.raises(ValueError, match="mmap"):
        Board.of(os.getpid(), short.fileno(), 5)
    with pytest.raises(OSError, match="No such file"):
        Board.of(os.getpid(), -1, 5)
    assert files() == before


def test_a_system_that_has_no_such_files_is_told_of():
    before = files()
    with (
        patch.object(os, "ftruncate", side_effect=OSError("file too large")),
        pytest.raises(OSError, match="too large"),
    ):
        Board.new(5)
    assert files() == before


def test_files_are_closed_with_their_boards():
    before = files()
    own, theirs = both_sides()
    assert files() > before
    del own, theirs
    assert files() == before
