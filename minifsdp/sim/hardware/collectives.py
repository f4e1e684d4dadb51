"""What a collective over several nodes takes: NCCL's algorithms and protocols, and other traffic.

NCCL can do the same collective in several ways, and picks the one that it estimates to be the
fastest. Its algorithms are the *ring*, on which a piece passes every rank, and for all-reduces the
*tree*, on which it passes as many nodes as the tree is high. Its protocols are *Simple*, which
sends bytes in large slices and a flag after each; *LL*, which sends a flag beside every 4 bytes,
so that nobody waits for a slice, at a quarter of the bandwidth; and *LL128*, with a flag for every
120 bytes. Simple is best for large messages, LL for the smallest.

The constants are those of NCCL 2.19, ``src/graph/tuning.cc`` (``baseLat``, ``hwLat``, and the
factors in ``ncclTopoTuneModel``), written down from memory and not from that file. Here they
count relative to those of a ring with Simple, whose own latencies are the cluster's
(:class:`minifsdp.sim.hardware.costs.Cluster`).

NCCL's estimate takes the network for its own. On a cluster with many jobs a message also waits
for those of others, and each step of a ring waits for the slowest of the messages that cross from
node to node at the same time. That is counted as if each of these messages had ``queued`` bytes
before it. It is *fitted*, by one model: Modalities' runs of 6.7B parameters on 64 and 256 GPUs
("fit" in tests/predictions.toml) need half a megabyte, and those on 2 nodes need nothing. So nodes
that share a switch (``quiet`` of them) are taken to have it for themselves, and the wait grows with
the share of nodes behind other switches. What it is, congestion or NCCL's own cost of a message,
these runs do not say.

Up to ``quiet`` nodes all collectives are rings with Simple. Other protocols would make a collective
shorter by a tenth of a millisecond at most, and ``calibrate`` measures what a ring on one node
takes, by whatever protocol.
"""

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

MICRO = 1e-6


class Way(NamedTuple):
    """An algorithm with a protocol. Latencies are in seconds, of a step within a node (NVLink) and
    of one that leaves it; ``share`` is that of the bandwidth, and ``most`` the bytes / s that this
    protocol reaches at best."""

    tree: bool
    begin: float
    node: float
    network: float
    share: float
    most: float = float("inf")


SIMPLE = Way(False, 8.4 * MICRO, 3.4 * MICRO, 14.0 * MICRO, 1.0)
WAYS = {
    "ring, Simple": SIMPLE,
    "ring, LL128": Way(False, 14.0 * MICRO, 1.9 * MICRO, 4.0 * MICRO, 0.92),
    "ring, LL": Way(False, 6.6 * MICRO, 0.6 * MICRO, 2.7 * MICRO, 1 / 4, 19e9),
    "tree, Simple": Way(True, 0.0, 28.0 * MICRO, 28.0 * MICRO, 0.92),
    "tree, LL128": Way(True, 14.0 * MICRO, 1.25 * MICRO, 8.5 * MICRO, 0.92 * 120 / 128),
    "tree, LL": Way(True, 6.8 * MICRO, 0.6 * MICRO, 5.0 * MICRO, 1 / 3.8, 19e9),
}


@dataclass(frozen=True)
class Group:
    """Ranks on several nodes, and the road between them. Times are in seconds."""

    nodes: int
    together: int  # ranks on one node
    bandwidth: float  # that a ring of them reaches, bytes / s
    alpha_node: float  # a step of a ring with Simple within a node
    alpha_network: float  # and one that leaves it
    wait: float  # of each message between nodes, for the traffic of others

    @property
    def ranks(self) -> int:
        return self.nodes * self.together

    def seconds(self, sent: float, rounds: int) -> float:
        """The way that NCCL would pick, and what it takes with the traffic of others.

        Args:
            sent: bytes that a rank sends in a round of a ring.
            rounds: 2 for an all-reduce, else 1.
        """
        way = self.picked(sent, rounds)
        messages = 2 * log2(self.nodes) if way.tree else rounds * (self.ranks - 1)
        return self.estimate(way, sent, rounds) + messages * self.wait

    def picked(self, sent: float, rounds: int) -> Way:
        """The fastest by NCCL's estimate, which knows of no other traffic."""
        ways = [way for way in WAYS.values() if rounds == 2 or not way.tree]
        return min(ways, key=lambda way: self.estimate(way, sent, rounds))

    def estimate(self, way: Way, sent: float, rounds: int) -> float:
        """Seconds that NCCL would expect of a way."""
        steps: float = self.ranks - 1
        crossings: float = min(self.nodes, steps)
        if way.tree:  # up and down, with all bytes each time
            crossings = log2(self.nodes)
            steps = self.together - 1 + crossings
            sent *= self.ranks / (self.ranks - 1)
        network = self.alpha_network * way.network / SIMPLE.network
        node = self.alpha_node * way.node / SIMPLE.node
        latency = crossings * network + (steps - crossings) * node
        bandwidth = min(self.bandwidth * way.share, way.most)
        return way.begin - SIMPLE.begin + rounds * (latency + sent / bandwidth)
