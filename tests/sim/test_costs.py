"""sim/costs.py: rooflines, rings, and nothing fitted."""

import math

import pytest
import torch

from minifsdp.sim.costs import GB, GPUS, MICRO, Cluster, count_flops, is_low, nbytes, preset

A100 = GPUS["a100-40"]


def test_a_kernel_takes_its_arithmetic_or_its_bytes_whichever_is_longer():
    one = Cluster(A100, efficiency=1.0, efficiency_bytes=1.0)
    assert one.kernel_seconds(312e12, 0, low=True) == 1.0
    assert one.kernel_seconds(19.5e12, 0, low=False) == 1.0
    assert one.kernel_seconds(1e12, 1555 * 10**9, low=True) == 1.0
    assert one.kernel_seconds(0, 0, low=True) == one.kernel == 2 * MICRO


def test_each_rank_of_a_ring_pays_for_every_step_and_for_every_byte():
    one = Cluster(A100, gpus_per_node=8, efficiency_bytes=1.0)
    ranks = list(range(8))
    assert math.isclose(one.ring_seconds(300 * GB, ranks), 1.0 + 7 * 3 * MICRO)
    assert math.isclose(one.ring_seconds(300 * GB, ranks, rounds=2), 2.0 + 14 * 3 * MICRO)
    assert one.ring_seconds(1 * GB, [0]) == one.kernel  # with nobody


def test_between_nodes_the_network_is_what_counts_and_rings_share_it():
    two = Cluster(A100, nodes=2, gpus_per_node=8, network=50 * GB, efficiency_bytes=1.0)
    everybody = list(range(16))
    assert math.isclose(two.ring_seconds(50 * GB, everybody), 1.0 + (2 * 12 + 13 * 3) * MICRO)
    # The replicas of one chunk: one rank in each node, and all eight of a node at the same time.
    assert math.isclose(two.ring_seconds(50 * GB, [0, 8]), 8.0 + 12 * MICRO)


def test_flops_are_torchs_own_count_and_bytes_are_those_that_are_there():
    a, b = torch.empty(2, 3), torch.empty(3, 5)
    assert count_flops(torch.ops.aten.mm.default, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    assert count_flops(torch.ops.aten.add.Tensor, (a, a), {}, a) == 0
    assert nbytes(a) == 24 and nbytes(a.bfloat16()) == 12
    assert nbytes(torch.empty(1, 3).expand(100, 3)) == 12
    assert nbytes(torch.empty(0, 3)) == 0
    assert is_low([a, a.half()]) and not is_low([a])


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"gpu='a1000' is not known\. There are: a100-40, a100-80"):
        preset("a1000")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_newer_gpu_is_not_slower(gpu):
    assert gpu.bandwidth >= A100.bandwidth and gpu.flops >= A100.flops
    assert gpu.memory >= A100.memory and gpu.links >= A100.links
