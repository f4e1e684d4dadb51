"""PyTorch's caching allocator once more, to compare minifsdp/sim/memory/allocator.py with.

It shares no code with that, and has no lists that are kept in order, no neighbours and no ages: a
segment is a list of pieces, and every question is answered by looking at all of them. Written from
`c10/cuda/CUDACachingAllocator.cpp`; the names of functions are those of there.
"""

M = 2**20


class FullError(Exception):
    """There is no room."""


class Piece:
    def __init__(self, at, size, state):
        self.at, self.size, self.state = at, size, state  # "free", "used", "pending", or "hole"
        self.users, self.passed, self.inserted = set(), False, 0


class Segment:
    def __init__(self, stream, small, at, size, state):
        self.stream, self.small, self.pieces = stream, small, [Piece(at, size, state)]


class PlainAllocator:
    def __init__(self, capacity, expandable=False, max_split=None, gc=0.0):
        self.capacity, self.expandable, self.gc = capacity, expandable, gc
        self.max_split = float("inf") if max_split is None else max_split
        self.segments, self.calls, self.next_at = [], {True: 0, False: 0}, 0
        self.mallocs = self.frees = self.retries = self.reserved = 0

    def pieces(self, stream=None, small=None, state="free"):
        """As (segment, place), in the order of PyTorch's sets: by size, or by address."""
        found = [
            (segment, piece)
            for segment in self.segments
            for piece in segment.pieces
            if piece.state == state
            and stream in (None, segment.stream)
            and small in (None, segment.small)
        ]
        by_size = state == "free"
        return sorted(found, key=lambda f: (f[1].size, f[1].at) if by_size else f[1].at)

    def level(self, *states):
        return sum(p.size for s in self.segments for p in s.pieces if p.state in states)

    def malloc(self, size, stream):
        self.process_events()
        size = max((size + 511) // 512 * 512, 512)
        small = size <= M
        found = self.get_free_block(size, stream, small)
        if found is None:
            if self.gc:
                self.garbage_collect_cached_blocks()
            found = self.alloc_block(size, stream, small)
            if found is None and self.release_available_cached_blocks(size, stream, small):
                found = self.alloc_block(size, stream, small)
            if found is None:
                self.retries += 1
                self.release_cached_blocks()
                found = self.alloc_block(size, stream, small)
            if found is None:
                raise FullError
        segment, piece = found
        left = piece.size - size
        finely = small or self.expandable
        if left >= 512 if finely else size < self.max_split and left > M:
            self.split(segment, piece, size)
        piece.state = "used"
        return segment, piece

    def split(self, segment, piece, size):
        rest = Piece(piece.at + size, piece.size - size, piece.state)
        rest.inserted = self.calls[segment.small]
        piece.size = size
        segment.pieces.insert(segment.pieces.index(piece) + 1, rest)
        return rest

    def get_free_block(self, size, stream, small):
        self.calls[small] += 1
        found = [(s, p) for s, p in self.pieces(stream, small) if p.size >= size]
        if not found:
            return None
        best = 0
        if self.expandable:
            while best + 1 < len(found) and self.grown(*found[best + 1]) < self.grown(*found[best]):
                best += 1
        segment, piece = found[best]
        if size < self.max_split <= piece.size:
            return None
        if size >= self.max_split and piece.size >= size + 20 * M:
            return None
        return segment, piece

    def grown(self, segment, piece):
        after = segment.pieces[segment.pieces.index(piece) + 1 :]
        return piece.size + (after[0].size if after and after[0].state == "hole" else 0)

    def alloc_block(self, size, stream, small):
        if self.expandable:
            return self.try_allocate_expandable_block(size, stream, small)
        if small:
            wanted = 2 * M
        elif size < 10 * M:
            wanted = 20 * M
        else:
            wanted = (size + 2 * M - 1) // (2 * M) * 2 * M
        if self.reserved + wanted > self.capacity:
            return None
        self.mallocs, self.reserved = self.mallocs + 1, self.reserved + wanted
        segment = Segment(stream, small, self.next_at, wanted, "free")
        self.next_at += wanted
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def try_allocate_expandable_block(self, size, stream, small):
        segment, place = self.find_expandable_block(size, stream, small)
        page = (2 if small else 20) * M
        if segment.pieces[place].state == "hole":
            place = self.map_block(segment, place, size, page)
        while place is not None and segment.pieces[place].size < size:
            place = self.map_block(segment, place + 1, size - segment.pieces[place].size, page)
        return None if place is None else (segment, segment.pieces[place])

    def find_expandable_block(self, size, stream, small):
        for segment, hole in self.pieces(stream, small, "hole"):
            place = segment.pieces.index(hole)
            if place and segment.pieces[place - 1].state == "free":
                place -= 1
            room = 0
            for piece in segment.pieces[place:]:
                if piece.state not in ("free", "hole"):
                    break
                room += piece.size
            if room >= size:
                return segment, place
        pages = (self.capacity + self.capacity // 8 + 20 * M - 1) // (20 * M)
        segment = Segment(stream, small, self.next_at, pages * 20 * M, "hole")
        self.next_at += pages * 20 * M
        self.segments.append(segment)
        return segment, 0

    def map_block(self, segment, place, size, page):
        """Where the free piece is then."""
        hole = segment.pieces[place]
        mapped = (min(size, hole.size) + page - 1) // page * page
        if self.reserved + mapped > self.capacity:
            return None
        self.mallocs, self.reserved = self.mallocs + 1, self.reserved + mapped
        if mapped < hole.size:
            self.split(segment, hole, mapped)
        hole.state = "free"
        return segment.pieces.index(self.merge(segment, hole))

    def merge(self, segment, piece):
        """With what is beside it and in the same state."""
        place = segment.pieces.index(piece)
        for other in (place + 1, place - 1):
            if 0 <= other < len(segment.pieces) and segment.pieces[other].state == piece.state:
                neighbour = segment.pieces[other]
                piece.at, piece.size = min(piece.at, neighbour.at), piece.size + neighbour.size
                segment.pieces.remove(neighbour)
        piece.inserted = self.calls[segment.small]
        return piece

    def free(self, segment, piece):
        piece.state, piece.passed = "pending" if piece.users else "free", False
        if not piece.users:
            self.merge(segment, piece)

    def synchronize(self):
        """All events that were recorded so far are passed; the next allocation sees that."""
        for segment in self.segments:
            for piece in segment.pieces:
                piece.passed = piece.state == "pending"

    def process_events(self):
        for segment in self.segments:
            for piece in list(segment.pieces):
                if piece.state == "pending" and piece.passed:
                    piece.users = set()
                    self.free(segment, piece)

    def garbage_collect_cached_blocks(self):
        allowed = int(self.gc * self.capacity)
        if self.reserved <= allowed:
            return
        target, reclaimed = self.reserved - allowed, 0
        while reclaimed < target:
            left = [(s, p) for s, p in self.pieces(small=False) if len(s.pieces) == 1]
            if not left:
                return
            average = sum(self.calls[False] - p.inserted for _, p in left) / len(left)
            for segment, piece in left:
                if self.calls[False] - piece.inserted >= average:
                    reclaimed += piece.size
                    self.release_block(segment)

    def release_available_cached_blocks(self, size, stream, small):
        if self.max_split == float("inf"):
            return False
        size = max(size, self.max_split)
        mine = [(s, p) for s, p in self.pieces(stream, small) if not self.expandable]
        if larger := [segment for segment, piece in mine if piece.size >= size]:
            self.release_block(larger[0])
            return True
        released = 0
        for segment, piece in reversed(mine):
            if released >= size or piece.size < self.max_split:
                break
            released += piece.size
            self.release_block(segment)
        return released >= size

    def release_block(self, segment):
        self.synchronize()  # by cudaFree
        self.frees, self.reserved = self.frees + 1, self.reserved - segment.pieces[0].size
        self.segments.remove(segment)

    def release_cached_blocks(self):
        self.synchronize()
        self.process_events()
        for segment in list(self.segments):
            if self.expandable:
                for piece in list(segment.pieces):
                    if piece.state == "free":
                        self.unmap_block(segment, piece)
            elif len(segment.pieces) == 1 and segment.pieces[0].state == "free":
                self.release_block(segment)

    def unmap_block(self, segment, piece):
        page, base = (2 if segment.small else 20) * M, segment.pieces[0].at
        first = (piece.at - base + page - 1) // page * page + base
        last = (piece.at + piece.size - base) // page * page + base
        if first >= last:
            return
        if first > piece.at:
            piece = self.split(segment, piece, first - piece.at)
        if last < piece.at + piece.size:
            self.split(segment, piece, last - piece.at)
        self.frees, self.reserved = self.frees + 1, self.reserved - piece.size
        piece.state = "hole"
        self.merge(segment, piece)
