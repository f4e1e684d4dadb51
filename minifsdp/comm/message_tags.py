"""Which message is which: the tags that tell conversations apart, all built here.

Ranks start their collectives in the same order, so that the third all-gather of unit ``a`` on one
rank meets the third all-gather of unit ``a`` on the others. When ranks part ways, because one of
them skipped the rest of a backward for example, that is no longer so: a rank could take the
parameters that another one sends for a gradient. So every message carries a tag made of all that
must be equal on both sides::

    1 | unit: 14 bits | kind: 3 | bytes per element: 2 | how many there were before: 11

A message that nobody else sends is never taken for another one. Its receiver waits, and
deadlock_watch.py finds out that it waits in vain.

torch's own collectives (all-reduce, and all of them on a GPU) have no tags. They are counted here
all the same, so that deadlock_watch.py can tell who has started them.
"""

import weakref
from enum import IntEnum

import torch.distributed as dist

Key = tuple[str, int, int, int]  # the group's name, the unit's number, kind, bytes per element


class Kind(IntEnum):
    """What a message is about."""

    PARAMETERS = 0
    GRADIENT = 1  # gathered, to be looked at
    REDUCTION = 2
    ALL_REDUCTION = 3
    MOMENT = 4
    AGREEMENT = 5
    NOTES = 6  # through the store, see store.py
    OTHER = 7


_WORDS = {
    Kind.PARAMETERS: "the gather of the parameters of unit {} ({} bytes per element)",
    Kind.GRADIENT: "the gather of the gradient of unit {}",
    Kind.REDUCTION: "the reduction of the gradient of unit {}",
    Kind.ALL_REDUCTION: "the all-reduction of the gradient of unit {}",
}
started: dict[Key, int] = {}
"""How many messages of each kind this rank has started in this process group. A program that ends
its process group after a failure, and makes another, may have started more on one rank."""

_world: "weakref.ref[dist.ProcessGroup] | None" = None  # that they were started in


class Message:
    """One collective, as this rank sees it.

    Args:
        group: the ranks that take part.
        number: of the unit, the same on all of them.
        size: bytes per element. Ranks that send other dtypes do not understand each other: gloo
            ends the process when a message is longer than expected.
        label: of the unit; or, for other kinds, what the message is about.
    """

    __slots__ = ("count", "group", "key", "kind", "label", "verdict")

    def __init__(
        self, group: dist.ProcessGroup, number: int, kind: Kind, size: int, label: str
    ) -> None:
        # Notes are also exchanged by ranks that hold different groups of the same ranks.
        name = str(dist.get_process_group_ranks(group)) if kind is Kind.NOTES else group.group_name
        global _world
        now: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # there is one
        if _world is None or _world() is not now:
            _world = weakref.ref(now)
            started.clear()
        self.key: Key = (name, number, kind.value, size)
        self.count = started[self.key] = started.get(self.key, 0) + 1
        self.group, self.label, self.kind = group, label, kind
        self.verdict: str | None = None  # why it will never arrive, once deadlock_watch.py knows

    @property
    def tag(self) -> int:
        """A number that no other message under way has. Users' own are small."""
        _, number, kind, size = self.key
        size = size.bit_length() - 1
        return 1 << 30 | (number & 0x3FFF) << 16 | kind << 13 | size << 11 | self.count & 0x7FF

    def __str__(self) -> str:
        return _WORDS.get(self.kind, "{}").format(self.label, self.key[-1])


def made() -> int:
    """How many messages this rank has started in this process group."""
    return sum(started.values())
