"""Pieces of memory, and how much there is of them; the rules are in allocator.py."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    stream: str
    small: bool
    allocated: bool = False
    previous: "Block | None" = None  # its neighbours in the segment
    next: "Block | None" = None
    users: set[str] = field(default_factory=set)  # other streams
    events: int = 0  # that have to be passed before it is free
    mapped: bool = True  # the device's memory is behind these addresses; see segments.py
    searches: int = 0  # in its pool, when it was freed

    @property
    def key(self) -> tuple[int, int]:
        """Best fit: the smallest first, and of those the lowest."""
        return self.size, self.address

    def cut(self, size: int) -> "Block":
        """Keep so many bytes; the rest is a block of its own, and is returned."""
        rest = Block(self.address + size, self.size - size, self.stream, self.small)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def joined_with(self, neighbour: "Block") -> "Block":
        """The one block that both are then."""
        first, second = sorted((self, neighbour), key=lambda block: block.address)
        first.size, first.next = first.size + second.size, second.next
        if second.next is not None:
            second.next.previous = first
        return first


@dataclass
class Level:
    """How much there is of something, in bytes, and how much there was at most."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
