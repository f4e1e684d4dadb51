"""Tags: a number for each message, so that messages are not mistaken for each other.

Ranks start their collectives in the same order, so the third all-gather of unit ``a`` on one rank
meets the third all-gather of unit ``a`` on the others. When one rank leaves that order, for example
because an exception has ended its backward, gloo would still pair its next message with whatever
the other ranks send: parameters could be read as a gradient. So every message from rank to rank
has a tag, which is made of all that must be equal on both sides::

    bit 30 | unit: 14 bits | kind: 3 | bytes per element: 2 | count of earlier ones: 11

A message that does not match is never received. The receiver waits for its own message, and
deadlock_watch.py finds out that it will not come.

torch's own collectives (broadcast, and on a GPU all of them) have no tags. They are counted here
all the same, because deadlock_watch.py has to know which rank has started which. Their order is
kept, too, for checks/same_launches.py to compare.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

Key = tuple[str, int, int, int]
"""The name of the process group, the number of the unit, the kind, and the bytes per element."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Kind(IntEnum):
    """What a message carries. Three bits of the tag, so there may be eight of them."""

    PARAMETERS = 0
    GRADIENT = 1  # gathered between steps, for the user to look at
    REDUCTION = 2
    ALL_REDUCTION = 3
    MOMENT = 4  # rank_agreement.py: where a rank is in the step
    AGREEMENT = 5  # rank_agreement.py: which units get a gradient
    STORE = 6  # consensus.py: through the store, so it needs no tag
    OTHER = 7


_WORDS = {
    Kind.PARAMETERS: "the gather of the parameters of unit {} ({} bytes per element)",
    Kind.GRADIENT: "the gather of the gradient of unit {}",
    Kind.REDUCTION: "the reduction of the gradient of unit {}",
    Kind.ALL_REDUCTION: "the all-reduction of the gradient of unit {}",
}
started: dict[Key, int] = {}
"""How many messages with this key this rank has started in the current default process group."""
owners: dict[str, int] = {}
"""By name of a process group: the thread that has started the last message in it."""

_all_started = 0
_caches: list[Any] = []
_world: "weakref.ref[dist.ProcessGroup] | None" = None  # the default group of these counts


class Message:
    """One collective, as this rank sees it.

    Args:
        group: the ranks that take part.
        number: of the unit, the same on all ranks.
        size: bytes per element. It is in the tag because gloo ends the process when a message is
            longer than its receiver expects, as it is if ranks compute in different dtypes.
        label: of the unit, for errors; or, for other kinds, what the message is.

    Raises:
        RuntimeError: the process group was destroyed.
    """

    __slots__ = ("count", "group", "key", "kind", "label", "verdict")

    def __init__(
        self, group: dist.ProcessGroup, number: int, kind: Kind, size: int, label: str
    ) -> None:
        check_exists(group)
        global _world, _all_started
        now: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]  # there is one
        if _world is None or _world() is not now:
            # A program that makes another process group after a failure may have started more
            # messages on one rank than on the others, so all ranks count from zero again.
            _world = weakref.ref(now)
            started.clear()
            owners.clear()
            for each in _caches:
                each.cache_clear()
        name: str = group.group_name
        owners[name] = thread = threading.get_ident()
        # What goes through the store is counted by its label, which says what it is about, between
        # which ranks: ranks may hold different groups of the same ranks. In a thread beside the
        # main one the group counts, too: other threads may use the same label, in any order.
        if kind is Kind.STORE and thread == threading.main_thread().ident:
            name = label
        elif kind is Kind.STORE:
            name = label = f"{label}, in group {name!r} in a thread"
        self.key: Key = (name, number, kind.value, size)
        self.count = started[self.key] = started.get(self.key, 0) + 1
        _all_started += 1
        self.group, self.label, self.kind = group, label, kind
        self.verdict: str | None = None  # why it will never arrive; deadlock_watch.py sets it

    def uncount(self) -> None:
        """This message, the last one with its key, has not come about."""
        started[self.key] -= 1

    @property
    def tag(self) -> int:
        """A number that no other message has at the same time. Bit 30 keeps it apart from the tags
        that users choose for their own messages, which are small."""
        _, number, kind, size = self.key
        size = size.bit_length() - 1
        return 1 << 30 | (number & 0x3FFF) << 16 | kind << 13 | size << 11 | self.count & 0x7FF

    @property
    def serial(self) -> int:
        """As the tag, with twice the bits, so that no two messages of a group have the same one:
        unit: 31 | kind: 3 | bytes per element: 2 | count: 27."""
        _, number, kind, size = self.key
        unit, count = number & (1 << 31) - 1, self.count & (1 << 27) - 1
        return unit << 32 | kind << 29 | (size.bit_length() - 1) << 27 | count

    @property
    def line(self) -> int:
        """The unit and the kind, without what changes from message to message: bits 13 to 29 of the
        tag. One unit's messages of one kind come one after another."""
        return self.tag >> 13 & 0x1FFFF

    def __str__(self) -> str:
        return _WORDS.get(self.kind, "{}").format(self.label, self.key[-1])


def cached(function: _Function) -> _Function:
    """As ``functools.cache``, but emptied when there is another default process group. Otherwise it
    would keep all earlier groups alive, and the threads that gloo has for them."""
    remembers: Any = cache(function)
    _caches.append(remembers)
    return remembers  # type: ignore[no-any-return]


class Launches:
    """The collectives without tags that this rank has started for the units of one root, in one
    process group.

    Attributes:
        order: a hash of the collectives, in the order in which they were started.
        counts: how many of each kind, for each unit's label.
    """

    def __init__(self) -> None:
        self.order, self.counts = 0, Counter[tuple[Kind, str]]()

    def add(self, message: Message) -> None:
        """Count a collective that starts now."""
        self.order = hash((self.order, *message.key[1:]))  # of numbers: the same on all ranks
        self.counts[message.kind, message.label] += 1


def exists(group: dist.ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def check_exists(group: dist.ProcessGroup) -> None:
    """Refuse to send anything in a process group that was destroyed.

    Raises:
        RuntimeError: it was destroyed.
    """
    if not exists(group):
        raise RuntimeError(
            "the process group of this model is gone: dist.destroy_process_group() was called, and "
            "this needs other ranks. Destroy it at the very end: after the last forward, backward, "
            "state_dict, clip_grad_norm_ and whatever else ranks do together. To go on after it, "
            "call init_process_group(), build and wrap the model again, and load a checkpoint."
        )


def messages_started() -> int:
    """How many messages of any kind this rank has started."""
    return _all_started
