"""sim/calibration/profiles.py: samples from a trace of torch.profiler.

The traces here are written by hand, with the fields that torch writes on a machine with GPUs.
"""

import gzip
import json
from pathlib import Path

import pytest
import torch

from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.profiles import read
from minifsdp.sim.hardware.gpus import GPUS

A100 = {"name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000, "numSms": 108}


def kernel(name, dur, number=None, **args):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "dur": dur,
        "args": {"External id": number, **args},
    }


def operator(name, number, dims, kind="c10::BFloat16", **args):
    its = {"External id": number, "Input Dims": dims, "Input type": [kind] * len(dims), **args}
    return {"ph": "X", "cat": "cpu_op", "name": f"aten::{name}", "dur": 9, "args": its}


def nccl(name, dur, sent, received, ranks=8, dtype="BFloat16"):
    args = {"Collective name": name, "In msg nelems": sent, "Out msg nelems": received}
    return kernel("ncclDevKernel_x", dur, **args, **{"Group size": ranks, "dtype": dtype})


@pytest.fixture
def write(tmp_path):
    def write(*events, properties=(A100,)):
        content = {"traceEvents": [*events], "deviceProperties": [*properties]}
        (tmp_path / "trace.json").write_text(json.dumps(content))
        return str(tmp_path / "trace.json")

    return write


def test_products_are_found_with_their_shapes_and_dtypes(write):
    found, device = read(
        write(
            operator("mm", 1, [[1024, 512], [512, 2048]]),
            operator("addmm", 2, [[2048], [1024, 512], [512, 2048], [], []]),
            operator("bmm", 3, [[4, 128, 64], [4, 64, 256]], "float"),
            kernel("gemm", 100, 1),
            kernel("splitK", 20, 1),
            kernel("gemm", 300, 2),
            kernel("gemm", 50, 3),
            kernel("gemm of nobody", 50, 9),
        )
    )
    flops, inner = 2.0 * 1024 * 512 * 2048, 512
    assert [s.seconds for s in found.products] == pytest.approx([120e-6, 300e-6])
    filled = flops / found.products[0].first
    assert 0.5 < filled <= 1 and found.products[0].second == found.products[0].first / inner
    (fp32,) = found.products_fp32
    assert fp32.seconds == pytest.approx(50e-6) and fp32.first == 64 * fp32.second
    assert (device.name, device.multiprocessors, device.ranks) == (A100["name"], 108, 1)
    assert device.memory == 85_000_000_000 and device.like == GPUS["a100-80"] and not device.cpu


def test_attention_is_found_forward_and_backward(write):
    query = [2, 1024, 16, 128]  # batch, length, heads, width
    forward = {"Concrete Inputs": [""] * 8 + ["True"]}
    backward = {"Concrete Inputs": [""] * 11 + ["False"]}
    found, _ = read(
        write(
            operator("_flash_attention_forward", 1, [query] * 3, **forward),
            operator("_flash_attention_backward", 2, [query] * 6, **backward),
            kernel("flash_fwd", 100, 1),
            kernel("flash_bwd", 300, 2),
        )
    )
    product = 2.0 * 2 * 16 * 1024 * 1024 * 128
    first, second = found.attention
    assert first == pytest.approx(Sample(product, product / 1024, 100e-6))
    done = 5 * product / 0.85
    assert second == pytest.approx(Sample(done, done / 1024, 300e-6))


def test_passes_are_found_with_what_they_read_and_write(write):
    found, _ = read(
        write(
            operator("add", 1, [[1000, 10], [10], []]),
            operator("add_", 2, [[1000, 10]] * 2),
            operator("gelu", 3, [[1000, 10]], "float"),
            operator("softmax", 4, [[1000, 10]]),
            *(kernel("elementwise", 10, number) for number in (1, 2, 3, 4)),
        )
    )
    assert [sample.second for sample in found.passes] == [40_020, 40_000, 80_000]


def test_of_collectives_of_a_size_the_fastest_counts(write):
    events = [
        nccl("_allgather_base", 500, 1000, 8000),
        nccl("_allgather_base", 900, 1000, 8000),
        nccl("_reduce_scatter_base", 700, 16_000, 2000, dtype="Float"),
        nccl("allreduce", 800, 1000, 1000),
        nccl("broadcast", 1, 1000, 1000),
        nccl("allreduce", 1, 1000, 1000, ranks=1),
    ]
    found, device = read(write(*events))
    assert found.collectives == [
        pytest.approx(Sample(7, 14_000, 500e-6)),
        pytest.approx(Sample(7, 56_000, 700e-6)),
        pytest.approx(Sample(14, 3500, 800e-6)),
    ]
    assert device.ranks == 8


def test_copies_to_the_device_are_found(write):
    copy = {"ph": "X", "cat": "gpu_memcpy", "dur": 100, "args": {"bytes": 10**6}}
    copies = [
        {**copy, "name": "Memcpy HtoD (Pinned -> Device)"},
        {**copy, "name": "Memcpy HtoD (Pageable -> Device)", "dur": 400},
        {**copy, "name": "Memcpy DtoH (Device -> Pinned)", "dur": 1},
    ]
    found, _ = read(write(kernel("x", 1), *copies))
    assert found.copies == [pytest.approx(1e10)]
    assert not (found.launch or found.host or found.beside or found.taken)


def test_a_compressed_file_is_read(write, tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(Path(write(kernel("x", 1))).read_bytes()))
    assert read(str(path))[1].name == A100["name"]


def test_a_gpu_that_is_not_known_needs_another_one(write):
    path = write(kernel("x", 1), properties=[{"name": "NVIDIA L4", "totalGlobalMem": 24 * 10**9}])
    with pytest.raises(ValueError, match=r"is of a GPU 'NVIDIA L4', which is not known; --gpu"):
        read(path)
    device = read(path, "a100-40")[1]
    assert device.like == GPUS["a100-40"] and device.memory == 24 * 10**9


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch before 2.13
def test_a_profile_of_a_cpu_has_no_kernels(tmp_path):
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.ones(8, 8) @ torch.ones(8, 8)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(ValueError, match="has no kernels of a GPU in it; profile a step on one"):
        read(str(tmp_path / "trace.json"))


@pytest.mark.parametrize("text", ["", "no", "[1]", "{}", '{"traceEvents": 1}', "\x1f\x8b"])
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "file").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"--profile: '.*file' is no (JSON|trace)") as error:
        read(str(tmp_path / "file"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"--profile: cannot read .*: No such file"):
        read(str(tmp_path / "nowhere"))
