"""sim/memory/out_of_memory.py: torch's words, with torch's units."""

import pytest
import torch

from minifsdp.sim.memory.out_of_memory import out_of_memory


@pytest.mark.parametrize(
    "size, words",
    [
        (512, "512 bytes"),
        (1536, "1.50 KiB"),
        (20 * 2**20, "20.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (5000 * 2**30, "5000.00 GiB"),
    ],
)
def test_it_says_what_was_wanted_and_what_there_is(size, words):
    error = out_of_memory(size, capacity=40 * 2**30, reserved=30 * 2**30, allocated=29 * 2**30)
    assert isinstance(error, torch.OutOfMemoryError)
    assert str(error) == (
        f"CUDA out of memory. Tried to allocate {words}. The virtual GPU has a total capacity of "
        "40.00 GiB of which 10.00 GiB is free. Of the allocated memory 29.00 GiB is allocated by "
        "PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
