"""What GPUs can do, and how much of it kernels reach: figures of others, each with its source.

Data sheets are those of A100, H100 and H200 SXM, of HGX B200, of GB200 NVL72 and of MI300X (all
rates are dense); all memory is what torch says in its messages about it. Two GPUs are made for one
cluster each: the A100 with 64 GB of Leonardo (Turisini et al., arXiv:2307.16885: 124
multiprocessors and 1.64 TB/s) and the H100 with 64 GB of HBM2e of MareNostrum 5 (Banchelli et al.,
arXiv:2503.09917). What kernels reach:

- ``passes``: BabelStream on A100, H100 and H200 (1.70, 2.97 and 4.15 TB/s), in Microsoft's
  AI-benchmarking-guide; of MI300X 81 %: Ambati and Diep, arXiv:2510.27583.
- ``attention``: FlashAttention-2, arXiv:2307.08691: 50 to 73 % of the peak of an A100, and up to
  335 TFLOPS on an H100.
- ``products``: large products alone reach 0.81 of an A100 (AI-benchmarking-guide) and 0.80 of an
  H100 (Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS). In training, where
  GPUs are hot and limited by their power, it is less: these shares are those with which the "fit"
  half of the published runs in README.md come out right. Of MI300X they reach 0.45 alone
  (arXiv:2510.27583), and are taken to lose in training what they lose on an H100.
- ``products_tf32``: alone 134 of the 156 TFLOPS of an A100, 0.86 (torch's "CUDA semantics": 10,240
  cubed in 16 ms). The same tensor cores with the same power lose in training what ``products``
  loses there, so it is 0.86 times ``products`` in training, to ``products`` alone.
- ``products_fp32``: 18.9 of the 19.5 TFLOPS of an A100, 0.97 (cuBLAS, in issue 4 of
  Yinghan-Li/YHs_Sample; "CUDA semantics" has 0.11 s, which is 19.5). These are not tensor cores,
  and power does not limit them. Of other GPUs no figures were found, so they have the same share.
- ``attention_fp32``: the only fused kernel in 32 bits is "efficient"; no figures of it were found.
  It multiplies in three products of TF32 (CUTLASS's ``OpMultiplyAddFastF32``), which is taken to be
  as fast as a product in fp32.
- ``error``: three of four runs by which constants were chosen are within this of their prediction
  (11 % on the GPU with the largest errors, and so taken for all of them; runs unlike these have a
  wider range, see figures/likely.py). Of H200, B200, GB200, MI300X and the H100 with 64 GB nobody's
  runs were compared: theirs is twice as large.
"""

from dataclasses import dataclass, replace

GB, TERA, GiB = 1e9, 1e12, 1024**3


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. The first figures are of its data sheet; the shares are measured."""

    name: str
    memory: int  # bytes in all, as CUDA reports them
    bandwidth: float  # of its memory, bytes / s
    flops: float  # of matrix products in 16 bits, per second
    flops_tf32: float  # in 32 bits with TF32, which torch has off by default
    flops_fp32: float  # and without
    links: float  # to the other GPUs of its node, bytes / s in one direction
    pcie: float  # to the host's memory, bytes / s in one direction
    multiprocessors: int
    products: float  # share of `flops` that large products reach
    products_tf32: float  # and of `flops_tf32`
    products_fp32: float  # and of `flops_fp32`
    attention: float  # share of `flops` that fused attention reaches with heads of 128
    attention_fp32: float  # and of `flops_fp32`
    passes: float  # share of `bandwidth` that all other kernels reach
    error: float  # of predicted tokens per second: 0.1 is a tenth, either way
    prefers_cudnn: bool = False  # torch takes cuDNN's attention first: Hopper and Blackwell
    tile: int = 128  # rows and columns of a tile of a product
    tile_overhead: float = (
        128  # what a tile takes to begin and to end, in steps along the inner size
    )
    row_overhead: float = 256  # what a row of attention's tiles takes to begin and to end, in keys


A100 = Gpu(
    "a100-80", int(79.15 * GiB), 2039 * GB, 312 * TERA, 156 * TERA, 19.5 * TERA, 300 * GB,
    31.5 * GB, multiprocessors=108, products=0.70, products_tf32=0.74, products_fp32=0.97,
    attention=0.65, attention_fp32=0.97, passes=0.83, error=0.11,
)  # fmt: skip
H100 = Gpu(
    "h100", int(79.10 * GiB), 3350 * GB, 989 * TERA, 494 * TERA, 67 * TERA, 450 * GB,
    63 * GB, multiprocessors=132, products=0.53, products_tf32=0.57, products_fp32=0.97,
    attention=0.36, attention_fp32=0.97, passes=0.88, error=0.11, prefers_cudnn=True,
)  # fmt: skip
B200 = replace(
    H100, name="b200", memory=int(178.35 * GiB), bandwidth=8000 * GB, flops=2250 * TERA,
    flops_tf32=1125 * TERA, flops_fp32=75 * TERA, links=900 * GB, multiprocessors=148,
    passes=0.86, error=0.22,
)  # fmt: skip
GPUS = {
    gpu.name: gpu
    for gpu in (
        replace(
            A100, name="a100-40", memory=int(39.39 * GiB), bandwidth=1555 * GB, products=0.66,
            products_tf32=0.70,
        ),
        replace(
            A100, name="a100-64", memory=int(63.4 * GiB), bandwidth=1640 * GB, flops=358 * TERA,
            flops_tf32=179 * TERA, flops_fp32=22.4 * TERA, multiprocessors=124,
        ),
        A100,
        replace(  # four of the six stacks of memory of the next one
            H100, name="h100-64", memory=int(63.4 * GiB), bandwidth=1600 * GB, error=0.22,
        ),
        H100,
        replace(  # with HBM2e and 500 W, as in torchtitan's reports
            H100, name="h100-96", memory=int(95.0 * GiB), bandwidth=2400 * GB,
        ),
        replace(
            H100, name="h200", memory=int(139.81 * GiB), bandwidth=4800 * GB, passes=0.86,
            error=0.22,
        ),
        B200,
        # Of GB200 NVL72, whose nodes have four (--gpus 4); their NVLink to the rest of the rack is
        # not modelled. The host is on NVLink-C2C, which two GPUs share.
        replace(
            B200, name="gb200", memory=int(184.0 * GiB), flops=2500 * TERA, flops_tf32=1250 * TERA,
            flops_fp32=80 * TERA, pcie=225 * GB,
        ),
        # Seven links of Infinity Fabric. torch has no cuDNN there. Attention is taken to be as fast
        # as on an H100.
        replace(
            H100, name="mi300x", memory=int(191.5 * GiB), bandwidth=5300 * GB, flops=1307 * TERA,
            flops_tf32=654 * TERA, flops_fp32=163 * TERA, links=448 * GB, multiprocessors=304,
            products=0.30, products_tf32=0.30, attention=0.27, passes=0.81, error=0.22,
            prefers_cudnn=False,
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
