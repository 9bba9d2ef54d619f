"""The caching allocator: documented answers, and laws that hold for any events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.memory.allocator import KIB, MIB, Allocator, MemoryBlock, rounded, segment_size
from quickest import quickest


@dataclass(frozen=True, slots=True)
class Level:
    """Memory after one request or release."""

    allocated: int
    reserved: int


def replay(events: Iterable[tuple[int, int]]) -> tuple[Allocator, list[Level]]:
    """Run (key, nbytes) requests and (key, -1) releases; the final state, and the level after each event."""
    state, live, levels = Allocator(), dict[int, MemoryBlock | None](), list[Level]()
    for key, nbytes in events:
        if nbytes < 0:
            state.release(live.pop(key))
        else:
            live[key] = state.allocate(nbytes)
        levels.append(Level(state.allocated, state.reserved))
    return state, levels


def test_sizes_are_rounded_to_512_bytes() -> None:
    assert [rounded(n) for n in (1, 511, 512, 513, 1024, 1_000_000)] == [512, 512, 512, 1024, 1024, 1_000_448]


def test_segments_by_request() -> None:
    assert segment_size(512) == 2 * MIB
    assert segment_size(1 * MIB) == 2 * MIB
    assert segment_size(1 * MIB + 512) == 20 * MIB
    assert segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB
    assert segment_size(11 * MIB) == 12 * MIB


def test_an_empty_request_takes_nothing() -> None:
    a = Allocator()
    a.release(a.allocate(0))
    assert (a.allocated, a.reserved) == (0, 0)


def test_small_requests_share_a_segment() -> None:
    a = Allocator()
    for _ in range(4096):
        a.allocate(512)
    assert (a.allocated, a.reserved) == (2 * MIB, 2 * MIB)
    a.allocate(1)
    assert (a.allocated, a.reserved) == (2 * MIB + 512, 4 * MIB)


def test_large_requests_share_20_mib() -> None:
    a = Allocator()
    for _ in range(10):
        a.allocate(2 * MIB)
    assert (a.allocated, a.reserved) == (20 * MIB, 20 * MIB)


def test_a_remainder_of_up_to_1_mib_is_handed_out_too() -> None:
    a = Allocator()
    a.release(a.allocate(12 * MIB))
    block = a.allocate(11 * MIB)
    assert block is not None
    assert (block.size, a.allocated, a.reserved) == (12 * MIB, 12 * MIB, 12 * MIB)
    a.release(block)
    a.allocate(11 * MIB - 512)
    assert a.allocated == 11 * MIB - 512


def test_the_smallest_block_that_fits_is_taken() -> None:
    a = Allocator()
    big, small = a.allocate(40 * MIB), a.allocate(20 * MIB)
    a.release(big)
    a.release(small)
    block = a.allocate(16 * MIB)
    assert block is not None
    assert block.address == 40 * MIB


def test_neighbours_grow_together() -> None:
    a = Allocator()
    parts = [a.allocate(5 * MIB) for _ in range(4)]
    for i in (0, 2, 1, 3):
        a.release(parts[i])
    assert a.free_bytes() == [(0, 20 * MIB)]
    a.allocate(20 * MIB)
    assert a.reserved == 20 * MIB


def test_pools_do_not_help_each_other() -> None:
    a = Allocator()
    a.release(a.allocate(100 * MIB))
    a.allocate(512)
    assert a.reserved == 102 * MIB


def test_a_block_is_freed_once() -> None:
    a = Allocator()
    block = a.allocate(1)
    a.release(block)
    with pytest.raises(ValueError, match="twice"):
        a.release(block)


def test_peaks_stay() -> None:
    state, levels = replay([(0, 3 * MIB), (1, 600 * KIB), (0, -1), (1, -1)])
    assert (state.allocated, state.peak_allocated) == (0, 3 * MIB + 600 * KIB)
    assert [level.allocated for level in levels] == [3 * MIB, 3 * MIB + 600 * KIB, 600 * KIB, 0]
    assert state.peak_reserved == levels[-1].reserved == 22 * MIB


SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB), st.sampled_from([MIB, MIB + 1, 10 * MIB])
)
EVENTS = st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=120)  # a negative number frees the n-th live block


def _pairs(choices: list[int]) -> list[tuple[int, int]]:
    out, live = [], []
    for key, c in enumerate(choices):
        if c > 0:
            live.append(key)
            out.append((key, c))
        elif live:
            out.append((live.pop(c % len(live)), -1))
    return out


@given(EVENTS)
def test_allocated_never_exceeds_reserved(choices: list[int]) -> None:
    state, levels = replay(_pairs(choices))
    assert all(0 <= level.allocated <= level.reserved for level in levels)
    assert state.peak_allocated == max((level.allocated for level in levels), default=0)
    assert state.reserved == sum(size for _, size in state.segments)


@given(EVENTS)
def test_same_events_same_answer(choices: list[int]) -> None:
    assert replay(_pairs(choices))[1] == replay(_pairs(choices))[1]


@given(EVENTS)
def test_freeing_all_leaves_whole_segments(choices: list[int]) -> None:
    events = _pairs(choices)
    live = {k for k, n in events if n > 0} - {k for k, n in events if n < 0}
    state, _ = replay(events + [(k, -1) for k in sorted(live)])
    assert state.allocated == 0
    assert state.free_bytes() == sorted(state.segments)


class Reference:
    """The same rules, written to be seen right: one list of blocks, searched from end to end."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []  # segment, address, size, small, free
        self.end = 0
        self.count = 0

    def allocate(self, nbytes: int) -> int:
        size = rounded(nbytes)
        small = size <= MIB
        fits = [b for b in self.blocks if b[4] and b[3] == small and b[2] >= size]
        if not fits:
            length = segment_size(size)
            fits = [[self.count, self.end, length, int(small), 1]]
            self.blocks += fits
            self.end, self.count = self.end + length, self.count + 1
        best = min(fits, key=lambda b: (b[2], b[1]))
        rest = best[2] - size
        if (small and rest >= 512) or (not small and rest > MIB):
            best[2] = size
            self.blocks.append([best[0], best[1] + size, rest, best[3], 1])
        best[4] = 0
        return best[1]

    def release(self, address: int) -> None:
        next(b for b in self.blocks if b[1] == address)[4] = 1
        merged: list[list[int]] = []
        for b in sorted(self.blocks, key=lambda b: b[1]):
            if merged and merged[-1][4] and b[4] and merged[-1][0] == b[0]:
                merged[-1][2] += b[2]
            else:
                merged.append(b)
        self.blocks = merged

    @property
    def allocated(self) -> int:
        return sum(b[2] for b in self.blocks if not b[4])


@given(EVENTS)
def test_as_the_slow_reference_does(choices: list[int]) -> None:
    fast, slow = Allocator(), Reference()
    live: dict[int, MemoryBlock] = {}
    for key, nbytes in _pairs(choices):
        if nbytes < 0:
            block = live.pop(key)
            slow.release(block.address)
            fast.release(block)
        else:
            made = fast.allocate(nbytes)
            assert made is not None
            live[key] = made
            assert made.address == slow.allocate(nbytes)
        assert (fast.allocated, fast.reserved) == (slow.allocated, slow.end)
        spans = sorted((b.address, b.address + b.size) for b in live.values())
        assert all(left[1] <= right[0] for left, right in pairwise(spans))


def test_a_hundred_thousand_events_take_under_a_second() -> None:
    rng, events, live = Random(0), list[tuple[int, int]](), list[int]()
    for key in range(100_000):
        if live and rng.random() < 0.49:
            events.append((live.pop(rng.randrange(len(live))), -1))
        else:
            live.append(key)
            events.append((key, rng.choice((400, 20_000, 3 * MIB, 30 * MIB))))
    assert quickest(lambda: replay(events)) < 1.0
