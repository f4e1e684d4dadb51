"""sim/hardware/costs.py: rooflines, tiles and rings."""

import math
from dataclasses import replace

import pytest

from minifsdp.sim.hardware.costs import MICRO, Cluster
from minifsdp.sim.hardware.gpus import GB, GPUS, GiB
from minifsdp.sim.hardware.kernels import ATTENTION, ATTENTION_BACKWARD, PASS, PRODUCT, Kernel

A100 = replace(
    GPUS["a100-40"], products=1.0, products_tf32=1.0, products_fp32=1.0, attention=1.0,
    attention_fp32=1.0, passes=1.0,
)  # fmt: skip
IDEAL = Cluster(A100, links_reached=1.0)

TILE = TILE_OVERHEAD = 128


def product(products, rows, columns, inner, low=True, moved=0) -> Kernel:
    flops = 2.0 * products * rows * columns * inner
    return Kernel(PRODUCT, moved, low, flops, flops, (products, rows, columns, inner))


def share(kernel, peak=312e12) -> float:
    """Of the peak, that a kernel reaches."""
    return kernel.done / IDEAL.kernel_seconds(kernel) / peak


def test_a_kernel_takes_its_arithmetic_or_its_bytes_whichever_is_longer():
    assert IDEAL.kernel_seconds(Kernel(PASS, 1555 * 10**9, True)) == 1.0
    assert IDEAL.kernel_seconds(Kernel(PASS, 0, True)) == IDEAL.kernel == 2 * MICRO
    thin = product(1, 1, 4096, 4096, moved=1555 * 10**9)
    assert IDEAL.kernel_seconds(thin) == 1.0


def test_each_kind_of_number_has_its_peak_and_its_share():
    """Of products, and of attention, which has no TF32."""
    shares = {"products": 0.5, "products_tf32": 0.6, "products_fp32": 0.9, "attention": 0.4}
    gpu = replace(A100, **shares, attention_fp32=0.7)
    for kind, low, tf32, reached in (
        (PRODUCT, True, False, 312 * 0.5), (PRODUCT, True, True, 312 * 0.5),
        (PRODUCT, False, True, 156 * 0.6), (PRODUCT, False, False, 19.5 * 0.9),
        (ATTENTION, True, False, 312 * 0.4), (ATTENTION, False, True, 19.5 * 0.7),
    ):  # fmt: skip
        kernel = Kernel(kind, 0, low, 1e18, 1e18, (108, TILE, 10**9, 10**9), tf32)
        seconds = Cluster(gpu).kernel_seconds(kernel)
        assert 1e18 / seconds / 1e12 == pytest.approx(reached, rel=1e-4)


def test_a_product_is_cut_into_tiles_and_these_into_waves():
    inner = 10**9  # so that beginning a tile does not count
    full = product(108, TILE, TILE, inner)
    assert share(full) == pytest.approx(1, rel=1e-5)
    assert share(product(108, TILE, TILE, inner, low=False), 19.5e12) == pytest.approx(1, rel=1e-5)
    one_more = product(109, TILE, TILE, inner)  # has a second wave for itself
    assert share(one_more) == pytest.approx(109 / 216, rel=1e-5)
    half = product(108, TILE // 2, TILE, inner)
    assert share(half) == pytest.approx(1 / 2, rel=1e-5)
    over = product(54, TILE + 1, TILE, inner)
    assert share(over) == pytest.approx((TILE + 1) / (2 * TILE), rel=1e-5)


def test_what_a_tile_takes_to_begin_counts_more_the_shorter_it_is():
    assert share(product(108, TILE, TILE, TILE_OVERHEAD)) == pytest.approx(1 / 2)
    assert share(product(108, TILE, TILE, 3 * TILE_OVERHEAD)) == pytest.approx(3 / 4)


def test_a_product_with_few_tiles_is_cut_along_its_inner_size_too():
    assert share(product(1, TILE, TILE, 10**9)) == pytest.approx(1, rel=1e-5)
    short = product(1, TILE, TILE, 4 * TILE_OVERHEAD)  # which gives two pieces
    assert share(short) == pytest.approx(2 / 108 * 4 / 5)


def attention(columns, inner, kind=ATTENTION) -> Kernel:
    return Kernel(kind, 0, True, 1e15, 1e15, (16, 4096, columns, inner))


def test_attention_is_slower_with_small_heads_short_texts_and_backward():
    long = share(attention(10**9, 128))
    assert long == pytest.approx(1, rel=1e-5)
    assert share(attention(10**9, 64)) < 0.9 * long
    assert share(attention(512, 128)) < 0.7 * long
    assert share(attention(10**9, 128, ATTENTION_BACKWARD)) < 0.9 * long


def test_each_rank_of_a_ring_pays_for_every_step_and_for_every_byte():
    ranks = list(range(8))
    assert math.isclose(IDEAL.ring_seconds(300 * GB, ranks), 1.0 + 7 * 3 * MICRO)
    assert math.isclose(IDEAL.ring_seconds(300 * GB, ranks, rounds=2), 2.0 + 14 * 3 * MICRO)
    assert IDEAL.ring_seconds(1 * GB, [0]) == IDEAL.kernel  # with nobody


def test_between_nodes_the_network_is_what_counts_and_rings_share_it():
    two = replace(IDEAL, nodes=2)
    everybody = list(range(16))
    assert math.isclose(two.ring_seconds(50 * GB, everybody), 1.0 + (2 * 12 + 13 * 3) * MICRO)
    # The replicas of one chunk: one rank in each node, and all eight of a node at the same time.
    assert math.isclose(two.ring_seconds(50 * GB, [0, 8]), 8.0 + 12 * MICRO)


def test_the_host_has_a_bandwidth_of_its_own_which_all_processes_of_a_node_share():
    assert IDEAL.copy_seconds(int(31.5 * GB)) == 1.0
    assert IDEAL.host_seconds(int(37.5 * GB)) == 1.0  # 300 GB/s, of which each of eight has 37.5
    assert replace(IDEAL, gpus_per_node=1).host_seconds(int(37.5 * GB)) == 1 / 8


def test_cuda_takes_memory_before_pytorch_does():
    assert 37 * GiB < IDEAL.capacity == A100.memory - IDEAL.taken < 39 * GiB
    assert replace(IDEAL, taken=10**15).capacity == 0


def test_the_slowest_of_many_gpus_is_slower_than_that_of_few():
    few, many, more = (replace(IDEAL, nodes=nodes).slowest() for nodes in (4, 64, 512))
    assert few == IDEAL.slowest() == 1 < many < more < 1 + 2 * IDEAL.straggling
    assert replace(IDEAL, nodes=512, straggling=0.0).slowest() == 1


def test_attention_in_triton_is_slower_and_more_so_backward():
    triton = replace(IDEAL, triton=True)
    for kind, times in ((ATTENTION, 1.4), (ATTENTION_BACKWARD, 2.0)):
        kernel = attention(4096, 128, kind)
        assert triton.kernel_seconds(kernel) == pytest.approx(times * IDEAL.kernel_seconds(kernel))
    other = product(108, TILE, TILE, 4096)
    assert triton.kernel_seconds(other) == IDEAL.kernel_seconds(other)
