"""What torch says where there is no room."""

import torch


def out_of_memory(
    size: int, capacity: int, reserved: int, allocated: int
) -> torch.OutOfMemoryError:
    """The error of a virtual GPU that has no room for ``size`` bytes; all are in bytes."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {_human(size)}. The virtual GPU has a total "
        f"capacity of {_human(capacity)} of which {_human(capacity - reserved)} is free. Of the "
        f"allocated memory {_human(allocated)} is allocated by PyTorch, and "
        f"{_human(reserved - allocated)} is reserved by PyTorch but unallocated."
    )


def _human(size: float) -> str:
    """As torch writes sizes."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.2f} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1024
    return f"{size:.2f} GiB"
