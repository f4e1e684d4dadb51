"""Collectives of NCCL that do not belong together, noticed after some steps.

Messages between CPUs have tags (comm/message_tags.py), so that no message is taken for another one.
NCCL has none: the third collective of a rank meets the third one of the others. If ranks run units
of the same size in different orders, each gets another unit's parameters, or gradients of different
units are added, and nothing says so. (If the sizes differ, NCCL hangs.) rank_agreement.py would see
it, but on a GPU it looks in the first steps only, since the host has to wait for its answers.

So each rank hashes the order in which it starts collectives. At the end of every tenth backward it
writes the hash into the *store*, the key-value server at which ranks found each other, unless
another rank has done so before; then it compares. The GPU takes no part in that, nobody waits for
another rank, and it is one request to a server in ten steps::

    rank 0   gather a, gather b, ...   hash 5f3c   the first to come: writes it
    rank 1   gather b, gather a, ...   hash 91e0   reads 5f3c: RuntimeError

The first rank to come does not learn of it. It will wait for the others in its next collective,
until torchrun ends it, because another rank has failed, or NCCL's watchdog does.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from minifsdp.comm.consensus import groups_with_peers
from minifsdp.comm.message_tags import Kind, Launches, Message
from minifsdp.core.collectives import Group
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Layer

EVERY = 10  # backwards
Counts = dict[str, int]


class SameLaunches(Layer):
    """Compares what the ranks of one root have started."""

    def __init__(self, engine: Engine) -> None:
        self._units: Sequence[Any] = engine.units
        self._launches, self._backwards = defaultdict[str, Launches](Launches), 0
        for unit in self._units:
            unit.launches = self._launches

    def complete(self, reductions: Sequence[Any]) -> None:
        """Raises RuntimeError: ranks have started different collectives, or in different orders."""
        self._backwards += 1
        if self._backwards % EVERY or not self._launches:  # what has tags is not in there
            return
        groups = [group for u in self._units for group in (u.shard_group, u.replicate_group)]
        for group in dict.fromkeys(groups_with_peers(groups)):
            self._compare(group, self._launches[group.group_name])

    def _compare(self, group: Group, launches: Launches) -> None:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        note = Message(group, 0, Kind.STORE, 1, f"what the ranks {ranks} have started")
        counts = {_WORDS[kind].format(unit): n for (kind, unit), n in launches.counts.items()}
        mine = [rank, launches.order, counts]
        store: Any = dist.distributed_c10d._get_default_store()
        key = f"minifsdp/{note.label}"
        first, order, its_counts = json.loads(
            store.compare_set(f"{key}/{note.count}", "", json.dumps(mine))
        )
        if rank == ranks[0]:  # else a long run would fill the store. No rank is so far behind
            store.delete_key(f"{key}/{note.count - 2}")
        if order != launches.order:
            raise RuntimeError(
                f"ranks {first} and {rank} have started different collectives in the last {EVERY} "
                f"backwards ({_difference(first, its_counts, rank, counts)}). NCCL pairs them by "
                f"their order alone, so ranks may have computed with parameters of other units "
                f"and added gradients of different ones: go back to a checkpoint that is older. "
                f"Every rank has to run the same units in the same order. Look for a condition on "
                f"the rank or on the data; a unit that a rank has no use for must run there all "
                f"the same."
            )


_WORDS = {
    Kind.PARAMETERS: "gathers of unit {}",
    Kind.REDUCTION: "reductions of unit {}",
    Kind.ALL_REDUCTION: "all-reductions of unit {}",
}


def _difference(one: int, its_counts: Counts, other: int, counts: Counts) -> str:
    for what in {**its_counts, **counts}:
        there, here = its_counts.get(what, 0), counts.get(what, 0)
        if there != here:
            return f"{what}: {there} on rank {one}, {here} on rank {other}"
    return "equally many, in different orders"
