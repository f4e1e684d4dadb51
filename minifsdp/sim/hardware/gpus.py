"""What GPUs can do, and how much of it kernels reach: figures of others, each with its source.

Data sheets are NVIDIA's, of A100, H100 and H200 SXM (dense rates); all memory is what torch says in
its messages about it. What kernels reach:

- ``passes``: BabelStream on A100, H100 and H200 (1.70, 2.97 and 4.15 TB/s), in Microsoft's
  AI-benchmarking-guide.
- ``attention``: FlashAttention-2, arXiv:2307.08691: 50 to 73 % of the peak of an A100, and up to
  335 TFLOPS on an H100.
- ``products``: large products alone reach 0.81 of an A100 (AI-benchmarking-guide) and 0.80 of an
  H100 (Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS). In training, where
  GPUs are hot and limited by their power, it is less: these shares are those with which the "fit"
  half of the published runs in README.md come out right.
- ``error``: three of four runs by which constants were chosen are within this of their prediction
  (11 % on the GPU with the largest errors, and so taken for all of them; runs unlike these have a
  wider range, see figures/likely.py). Of H200s none was found; theirs is twice as large.
"""

from dataclasses import dataclass

GB, TERA, GiB = 1e9, 1e12, 1024**3


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. The first figures are of its data sheet; the shares are measured."""

    name: str
    memory: int  # bytes in all, as CUDA reports them
    bandwidth: float  # of its memory, bytes / s
    flops: float  # of matrix products in 16 bits, per second
    flops_fp32: float  # and in 32, with TF32 as torch has it by default: off
    links: float  # to the other GPUs of its node, bytes / s in one direction
    pcie: float  # to the host's memory, bytes / s in one direction
    multiprocessors: int
    products: float  # share of `flops` that large products reach
    attention: float  # share of `flops` that fused attention reaches with heads of 128
    passes: float  # share of `bandwidth` that all other kernels reach
    error: float  # of predicted tokens per second: 0.1 is a tenth, either way
    hopper: bool = False
    tile: int = 128  # rows and columns of a tile of a product
    tile_overhead: float = (
        128  # what a tile takes to begin and to end, in steps along the inner size
    )
    row_overhead: float = 256  # what a row of attention's tiles takes to begin and to end, in keys


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "a100-40", int(39.39 * GiB), 1555 * GB, 312 * TERA, 19.5 * TERA, 300 * GB, 31.5 * GB,
            multiprocessors=108, products=0.66, attention=0.65, passes=0.83, error=0.11,
        ),
        Gpu(
            "a100-80", int(79.15 * GiB), 2039 * GB, 312 * TERA, 19.5 * TERA, 300 * GB, 31.5 * GB,
            multiprocessors=108, products=0.70, attention=0.65, passes=0.83, error=0.11,
        ),
        Gpu(
            "h100", int(79.10 * GiB), 3350 * GB, 989 * TERA, 67 * TERA, 450 * GB, 63 * GB,
            multiprocessors=132, products=0.53, attention=0.36, passes=0.88, error=0.11,
            hopper=True,
        ),
        Gpu(  # with HBM2e and 500 W, as in torchtitan's reports
            "h100-96", int(95.0 * GiB), 2400 * GB, 989 * TERA, 67 * TERA, 450 * GB, 63 * GB,
            multiprocessors=132, products=0.53, attention=0.36, passes=0.88, error=0.11,
            hopper=True,
        ),
        Gpu(
            "h200", int(139.81 * GiB), 4800 * GB, 989 * TERA, 67 * TERA, 450 * GB, 63 * GB,
            multiprocessors=132, products=0.53, attention=0.36, passes=0.86, error=0.22,
            hopper=True,
        ),
    )
}  # fmt: skip


def preset(name: str) -> Gpu:
    """A GPU by its name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in GPUS:
        raise ValueError(f"gpu={name!r} is not known. There are: {', '.join(GPUS)}.")
    return GPUS[name]


def like(device: str, memory: int) -> Gpu | None:
    """The preset for what CUDA calls a device, with about so many bytes; None if there is none."""
    for gpu in sorted(GPUS.values(), key=lambda gpu: abs(gpu.memory - memory)):
        if gpu.name.split("-")[0] in device.lower():
            return gpu
    return None
