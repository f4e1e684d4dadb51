"""sim/hardware/collectives.py: what NCCL picks, and what other traffic adds."""

import math
from dataclasses import replace

import pytest

from minifsdp.sim.hardware.collectives import MICRO, SIMPLE, WAYS, Group
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GB, GPUS

A100 = Cluster(GPUS["a100-80"], links_reached=1.0)
NAMES = {way: name for name, way in WAYS.items()}


def group(nodes, together=8, wait=0.0) -> Group:
    return Group(nodes, together, 40 * GB, 3 * MICRO, 12 * MICRO, wait)


def picked(sent, rounds, *where) -> str:
    return NAMES[group(*where).picked(sent, rounds)]


def test_on_few_nodes_a_collective_is_a_ring_and_large_messages_stay_one():
    for nodes, sent in ((1, 1.0), (4, 1.0), (4, 1e9), (8, 1e10)):
        some = replace(A100, nodes=nodes, queued=0.0)
        ranks = [*range(8 * nodes)]
        ring = some.ring_seconds(sent, ranks)
        assert math.isclose(some.collective_seconds(sent, ranks), ring), nodes
    eight = replace(A100, nodes=8, queued=0.0)
    assert eight.collective_seconds(1.0, [*range(64)]) < eight.ring_seconds(1.0, [*range(64)]) / 3


def test_the_shorter_a_message_the_fewer_it_waits_for():
    assert [picked(sent, 1, 8) for sent in (1e3, 1e7, 1e9)] == [
        "ring, LL",
        "ring, LL128",
        "ring, Simple",
    ]


def test_an_all_reduce_is_a_tree_where_a_ring_would_be_long_and_only_there():
    block = 100e6  # bytes
    assert picked(block, 2, 2, 1) == picked(block, 2, 8, 1) == "ring, Simple"
    assert picked(block, 2, 256, 1).startswith("tree") and picked(1e9, 2, 64, 1) == "ring, Simple"
    assert not any(picked(sent, 1, 512).startswith("tree") for sent in (1.0, 1e6, 1e9))


def test_a_trees_latency_grows_with_its_height():
    found = [group(nodes, 1).seconds(1.0, 2) for nodes in (64, 128, 256)]
    ring = [group(nodes).seconds(1.0, 1) for nodes in (64, 128, 256)]
    assert found[2] - found[1] == pytest.approx(found[1] - found[0], rel=0.01)
    assert ring[2] - ring[1] == pytest.approx(2 * (ring[1] - ring[0]), rel=0.01)
    assert found[2] < ring[0] / 5


def test_latencies_count_from_those_of_the_cluster():
    slower = Group(64, 8, 40 * GB, 6 * MICRO, 24 * MICRO, 0.0)
    begin = WAYS["ring, LL"].begin - SIMPLE.begin
    assert slower.seconds(0.0, 1) - begin == pytest.approx(2 * (group(64).seconds(0.0, 1) - begin))


def test_each_message_between_nodes_waits_for_others_and_nccl_does_not_know():
    """The choice stays; a ring waits at each step, a tree at each level, up and down."""
    wait = 50 * MICRO
    for sent, rounds, together, messages in ((1e9, 1, 8, 511), (1e9, 2, 1, 126), (1e7, 2, 1, 12)):
        busy, alone = (group(64, together, seconds) for seconds in (wait, 0.0))
        assert busy.picked(sent, rounds) == alone.picked(sent, rounds)
        more = busy.seconds(sent, rounds) - alone.seconds(sent, rounds)
        assert more == pytest.approx(messages * wait)


def test_nodes_that_share_a_switch_have_it_to_themselves():
    def waits(nodes, **changed) -> float:
        busy = replace(A100, nodes=nodes, **changed)
        ranks = [*range(8 * nodes)]
        quiet = replace(busy, queued=0.0)
        return busy.collective_seconds(1e9, ranks) - quiet.collective_seconds(1e9, ranks)

    assert waits(2) == waits(4) == 0 < waits(8)
    # 511 steps, each as long as `queued` bytes take through a port, behind 60 of 64 nodes.
    behind = 511 * A100.queued * 60 / 64
    for network, port in ((200, 25), (100, 12.5), (50, 12.5), (10, 10)):  # GB/s, of 8 GPUs
        assert waits(64, network=network * GB) == pytest.approx(behind / (port * GB))


def test_the_replicas_of_a_chunk_wait_for_fewer_messages_than_all_ranks():
    many = replace(A100, nodes=64)
    alone = replace(many, queued=0.0)
    columns, everybody = [*range(0, 512, 8)], [*range(512)]
    found = [c.collective_seconds(25e6, columns, 2) for c in (many, alone)]
    whole = [c.collective_seconds(25e6, everybody) for c in (many, alone)]
    assert 0 < found[0] - found[1] < (whole[0] - whole[1]) / 4


def test_a_tree_sends_everything_up_and_down():
    """A rank of a ring sends all but one of as many pieces as there are ranks, each time."""
    four = group(4, 1)
    more = four.estimate(WAYS["tree, Simple"], 3e9, 2) - four.estimate(WAYS["tree, Simple"], 0, 2)
    assert more == pytest.approx(2 * 4e9 / (0.92 * 40 * GB))
