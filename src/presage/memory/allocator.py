"""PyTorch's CUDA caching allocator as a state machine: one device, one stream, expandable segments off.

The rules are the documented ones. A request is rounded up to 512 bytes. Up to 1 MiB it is served from 2 MiB segments
(the small pool), above that from the large pool, whose segments are 20 MiB for requests under 10 MiB and otherwise the
request rounded up to 2 MiB. The smallest free block that fits is taken, the one at the lowest address among equals.
What is left of it becomes a free block of its own when it is at least 512 bytes (small pool) or more than 1 MiB (large
pool); otherwise the block is handed out whole, and counts whole. A freed block grows together with free neighbours of
its segment. Segments are never returned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

KIB = 1024
MIB = 1024 * KIB

ROUND = 512
SMALL_REQUEST = 1 * MIB  # the largest request of the small pool, and the largest remainder the large pool wastes
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # from here on a request gets a segment of its own
SEGMENT_ROUND = 2 * MIB


def rounded(nbytes: int) -> int:
    """The bytes a request takes at least."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """Size of the segment allocated from the driver when no free block fits a rounded request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUND) * SEGMENT_ROUND


class MemoryBlock:
    """A piece of a segment, handed out or free, linked to its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = True
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


@dataclass
class Allocator:
    """State of the allocator: bytes of allocated blocks, and of the segments reserved for them."""

    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list)  # address, size
    _small: list[tuple[int, int]] = field(default_factory=list)  # free blocks as (size, address), sorted
    _large: list[tuple[int, int]] = field(default_factory=list)
    _free: dict[int, MemoryBlock] = field(default_factory=dict)  # free blocks by address
    _next_address: int = 0

    def allocate(self, nbytes: int) -> MemoryBlock | None:
        """A block for a request; nothing for an empty one, which takes no memory."""
        if nbytes <= 0:
            return None
        size = rounded(nbytes)
        small = size <= SMALL_REQUEST
        block = self._best_fit(size, small) or self._new_segment(size, small)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: MemoryBlock | None) -> None:
        """Free a block; it is merged with its free neighbours."""
        if block is None:
            return
        if block.free:
            raise ValueError("a block was freed twice")
        self.allocated -= block.size
        block.free = True
        if block.after is not None and block.after.free:
            self._take(block.after)
            self._absorb(block, block.after)
        if block.before is not None and block.before.free:
            before = block.before
            self._take(before)
            self._absorb(before, block)
            block = before
        self._give(block)

    def free_bytes(self) -> list[tuple[int, int]]:
        """The free blocks as (address, size), by address."""
        return sorted((address, size) for size, address in self._small + self._large)

    def _best_fit(self, size: int, small: bool) -> MemoryBlock | None:
        pool = self._small if small else self._large
        place = bisect_left(pool, (size, -1))
        if place == len(pool):
            return None
        _, address = pool.pop(place)
        return self._free.pop(address)

    def _new_segment(self, size: int, small: bool) -> MemoryBlock:
        length = segment_size(size)
        block = MemoryBlock(self._next_address, length, small)
        self.segments.append((self._next_address, length))
        self._next_address += length
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _split(self, block: MemoryBlock, size: int) -> None:
        rest = block.size - size
        if rest < ROUND if block.small else rest <= SMALL_REQUEST:
            return
        remainder = MemoryBlock(block.address + size, rest, block.small)
        remainder.before, remainder.after = block, block.after
        if block.after is not None:
            block.after.before = remainder
        block.after = remainder
        block.size = size
        self._give(remainder)

    @staticmethod
    def _absorb(block: MemoryBlock, after: MemoryBlock) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block

    def _give(self, block: MemoryBlock) -> None:
        insort(self._small if block.small else self._large, (block.size, block.address))
        self._free[block.address] = block

    def _take(self, block: MemoryBlock) -> None:
        pool = self._small if block.small else self._large
        del pool[bisect_left(pool, (block.size, block.address))]
        del self._free[block.address]
