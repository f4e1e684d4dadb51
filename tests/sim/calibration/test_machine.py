"""sim/calibration/machine.py: from samples of a known machine, its constants."""

from dataclasses import replace

import pytest

from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.kernels import product_sample
from minifsdp.sim.calibration.machine import ERROR, Device, Samples, around, gpu_of
from minifsdp.sim.hardware.cluster_file import CLUSTER
from minifsdp.sim.hardware.costs import Cluster, relative_speed
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.hardware.kernels import ATTENTION, PASS, PRODUCT, Kernel

NOTHING = Samples(*([] for _ in range(10)))
H100 = GPUS["h100"]
LIKE = Device("H100", H100.memory, 8, H100.multiprocessors, H100, cpu=False)
UNKNOWN = replace(LIKE, name="another", like=None)
CPU = Device("cpu", 2**33, 2)


def samples_of(true: Cluster, device: Device) -> Samples:
    """What would be measured on a machine with these constants."""

    def products(low):
        rows = []
        for shape in ((1, 8192, 1024, 3072), (1, 4096, 4096, 4096), (1, 1000, 8192, 256)):
            _, m, n, k = shape
            kernel = Kernel(PRODUCT, 0, low, 0.0, 2.0 * m * n * k, shape)
            rows.append(product_sample(kernel, device, true.kernel_seconds(kernel)))
        return rows

    attention = []
    for keys in (512, 4096):
        kernel = Kernel(ATTENTION, 0, not device.cpu, 0.0, 1e12, (1, keys, keys, 64))
        done = kernel.done / relative_speed(kernel)
        attention.append(Sample(done, done / keys, true.kernel_seconds(kernel)))
    ranks = list(range(device.ranks))
    return Samples(
        products=products(True),
        products_fp32=products(False),
        attention=attention,
        passes=[Sample(1, n, true.kernel_seconds(Kernel(PASS, n, True))) for n in (10**8, 10**9)],
        collectives=[
            Sample(len(ranks) - 1, sent, true.ring_seconds(sent, ranks)) for sent in (1e3, 1e6, 1e9)
        ],
        beside=[1 - true.beside_collectives] * 2,
        launch=[true.launch] * 2,
        host=[true.host_memory / device.ranks] * 2,
        copies=[true.gpu.pcie * true.links_reached] * 2,
        taken=[true.taken - 1, true.taken],
    )


@pytest.mark.parametrize("device", [LIKE, UNKNOWN, CPU], ids=["like", "unknown", "cpu"])
def test_the_costs_are_those_of_the_machine_that_was_measured(device):
    gpu = replace(
        H100, memory=device.memory, multiprocessors=device.multiprocessors, tile=device.tile,
        tile_overhead=300.0, row_overhead=77.0,
    )  # fmt: skip
    true = Cluster(
        gpu, gpus_per_node=device.ranks, alpha_node=7e-5, beside_collectives=0.7, launch=2e-5,
        host_memory=1e11, taken=12345, kernel=0.0,
    )  # fmt: skip
    found = samples_of(true, device)
    ours = Cluster(gpu_of(found, device), **{**around(found, device), "kernel": 0.0})
    for shape in ((4, 2048, 640, 128), (1, 64, 64, 64)):
        for low in (True, False):
            kernel = Kernel(PRODUCT, 0, low, 0.0, 1e12, shape)
            assert ours.kernel_seconds(kernel) == pytest.approx(true.kernel_seconds(kernel))
    attention = Kernel(ATTENTION, 0, not device.cpu, 0.0, 1e12, (1, 128, 128, 128))
    assert ours.kernel_seconds(attention) == pytest.approx(true.kernel_seconds(attention))
    thin = Kernel(PASS, 10**7, False)
    assert ours.kernel_seconds(thin) == pytest.approx(true.kernel_seconds(thin), rel=0.01)
    ranks = list(range(device.ranks))
    assert ours.ring_seconds(1e5, ranks) == pytest.approx(true.ring_seconds(1e5, ranks))
    assert ours.copy_seconds(10**6) == pytest.approx(true.copy_seconds(10**6))
    assert ours.host_seconds(10**6) == pytest.approx(true.host_seconds(10**6))
    assert ours.launch == pytest.approx(2e-5) and ours.taken == 12345
    assert ours.moment / true.moment == pytest.approx(2e-5 / Cluster(H100).launch)
    assert ours.beside_collectives == pytest.approx(0.7)
    assert ours.host_computes is device.cpu and ours.gpu.error == ERROR


def test_flops_are_counted_against_the_data_sheet_where_there_is_one():
    found = samples_of(Cluster(replace(H100, products=0.4, passes=0.5)), LIKE)
    gpu, other = gpu_of(found, LIKE), gpu_of(found, UNKNOWN)
    assert gpu.flops == H100.flops and gpu.products == pytest.approx(0.4)
    assert gpu.bandwidth == H100.bandwidth and gpu.passes == pytest.approx(0.5)
    assert other.products == 1 and other.flops == pytest.approx(0.4 * H100.flops)
    assert other.name == "another" and not other.prefers_cudnn and gpu.prefers_cudnn


def test_what_was_not_measured_is_as_usual():
    gpu, constants = gpu_of(NOTHING, LIKE), around(NOTHING, LIKE)
    assert gpu == replace(H100, name="H100", error=ERROR)
    assert set(constants) == set(CLUSTER)
    assert constants == {**{n: getattr(Cluster(H100), n) for n in CLUSTER}, "gpus_per_node": 8}


def test_products_in_fp32_tell_their_own_share_and_no_other():
    slow = Cluster(replace(H100, products_fp32=0.5))
    found = replace(NOTHING, products_fp32=samples_of(slow, LIKE).products_fp32)
    gpu, other = gpu_of(found, LIKE), gpu_of(found, UNKNOWN)
    assert gpu.products_fp32 == pytest.approx(0.5) and gpu.flops_fp32 == H100.flops_fp32
    assert (gpu.products, gpu.products_tf32) == (H100.products, H100.products_tf32)
    assert other.flops_fp32 == other.flops_tf32 == pytest.approx(0.5 * H100.flops_fp32)
    assert other.products_fp32 == other.products_tf32 == 1


def test_a_collective_that_is_longer_beside_products_counts_as_so_much_longer():
    true = Cluster(H100)
    found = replace(samples_of(true, LIKE), beside=[1.5, 2.0, 9.0])  # the median
    ours = Cluster(gpu_of(found, LIKE), **around(found, LIKE))
    ranks = list(range(8))
    assert ours.ring_seconds(1e6, ranks) == pytest.approx(2 * true.ring_seconds(1e6, ranks))
    assert ours.beside_collectives == 0.05


def test_noise_does_not_make_anything_infinitely_fast():
    faster = [Sample(1.0, 1e6, 2e-3), Sample(1.0, 2e6, 1e-3)]
    found = replace(NOTHING, collectives=faster, passes=faster, products=faster)
    gpu = gpu_of(found, LIKE)
    assert 0 < gpu.links < 1e12 and 0 < gpu.passes * gpu.bandwidth < 1e12 and gpu.products > 0
