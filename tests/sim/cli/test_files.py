"""sim/cli/files.py: what cannot be written is noticed before."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minifsdp.sim.cli import files
from minifsdp.sim.cli.files import ENOUGH, check_files, file_problem, folder_problem


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes, as on a disk that is full.

    No fixture: pytest says that a test has passed before it ends its fixtures, and may say it in a
    file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path):
    there = tmp_path / "there"
    there.write_text("before")
    assert (
        file_problem(there)
        == file_problem(tmp_path / "new")
        == file_problem(Path(os.devnull))
        == ""
    )
    assert there.read_text() == "before" and os.listdir(tmp_path) == ["there"]


def test_one_that_cannot_is_named_with_the_reason(tmp_path):
    assert file_problem(tmp_path) == "it is a directory"
    assert file_problem(tmp_path / "no" / "file") == f"there is no directory '{tmp_path / 'no'}'"
    assert file_problem(Path("/dev/full")) == "no space left on device"
    assert file_problem(Path("/proc/file")) == "no such file or directory"
    with pytest.raises(ValueError, match=r"--svg: cannot write '/dev/full': no space left"):
        check_files({"html": None, "svg": "/dev/full"})


def test_a_full_disk_is_noticed_and_nothing_stays_on_it(tmp_path):
    with full_disk():
        problems = file_problem(tmp_path / "file"), folder_problem(tmp_path / "a" / "b")
    assert problems == ("file too large", "file too large")
    assert not os.listdir(tmp_path)


def test_two_options_need_two_files(tmp_path):
    with pytest.raises(ValueError, match="--trace and --svg name the same file"):
        check_files({"svg": str(tmp_path / "a"), "trace": f"{tmp_path}/../{tmp_path.name}/a"})


def test_a_folder_may_be_there_or_be_made(tmp_path):
    assert folder_problem(tmp_path) == folder_problem(tmp_path / "a" / "b") == ""
    assert not os.listdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    assert folder_problem(file) == "it is a file"
    assert folder_problem(file / "a" / "b") == f"{file} is a file"
    assert folder_problem(Path("/proc/folder")) == "no such file or directory"


def test_a_folder_needs_room_for_what_will_be_in_it(tmp_path, monkeypatch):
    assert folder_problem(tmp_path, nbytes=2**60).startswith("1,099,511,627,776 MiB are needed")
    free = files.shutil.disk_usage(tmp_path)._replace(free=9 * ENOUGH)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: free)
    assert folder_problem(tmp_path, nbytes=10 * ENOUGH) == ""
    assert folder_problem(tmp_path, 11 * ENOUGH) == "11 MiB are needed there, and about 10 are free"
