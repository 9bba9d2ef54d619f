"""A host thread's time as stretches, and the handovers between threads.

When a thread is silent and another works, then falls silent just as the first wakes, the first was waiting for the
second: so `loss.backward()` waits for the autograd thread, and that thread waits for the next `backward()`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.traces import calltree
from presage.traces.trace import HostEvents, HostKind

__all__ = ["Handover", "Stretches", "handovers", "stretches"]

# A silence shorter than this is the host's own time between ops, not a wait.
LEAST_SILENCE = 20_000
# The other thread's work must fill this share of the silence, and end within this share of its end.
LEAST_FILLED = 0.5
LARGEST_REST = 0.25


@dataclass(frozen=True, eq=False)
class Stretches:
    """Consecutive pieces of every thread's time, by thread; `owner` is the innermost host event there, or -1."""

    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    owner: NDArray[np.int32]
    thread: NDArray[np.int32]
    first: NDArray[np.int32]  # the first stretch within each host event
    longest: NDArray[np.int32]  # the longest stretch each host event owns, or -1

    def __len__(self) -> int:
        return len(self.lo)


@dataclass(frozen=True)
class Handover:
    """Stretch `after` began when another thread had finished stretch `before`; `silence` is the wait's own stretch."""

    before: int
    after: int
    silence: int  # -1 when `after` is its thread's first


def stretches(host: HostEvents) -> Stretches:
    """All threads' time, piece by piece."""
    lo, hi, owner = calltree.stretches(host.thread, host.start, host.end, host.parent)
    thread = np.empty(len(lo), np.int32)
    # a silence between two events belongs to the thread of the next one
    own = owner >= 0
    following = np.flatnonzero(own)[np.searchsorted(np.flatnonzero(own), np.arange(len(lo)))] if own.any() else owner
    thread[:] = host.thread[owner[following]] if own.any() else 0
    first = np.full(len(host), -1, np.int32)
    pieces = np.flatnonzero(own)[::-1]
    first[owner[pieces]] = pieces
    longest = np.full(len(host), -1, np.int32)
    by_length = pieces[np.argsort((hi - lo)[pieces], kind="stable")]
    longest[owner[by_length]] = by_length
    return Stretches(lo, hi, owner, thread, _inherited(host, first), longest)


def _inherited(host: HostEvents, first: NDArray[np.int32]) -> NDArray[np.int32]:
    """An event wholly covered by its children starts where its first child does."""
    for i in range(len(host) - 1, -1, -1):
        p = host.parent[i]
        if p >= 0 and (first[p] < 0 or first[i] < first[p]):
            first[p] = first[i]
    return first


def handovers(host: HostEvents, s: Stretches) -> list[Handover]:
    """Which silences were waits for another thread."""
    silent = s.owner < 0
    silent |= np.where(s.owner >= 0, host.kind[s.owner] == HostKind.ANNOTATION, False)
    quiet = {int(t): _quiet(s, silent, np.flatnonzero(s.thread == t)) for t in np.unique(s.thread)}
    # a thread that only polls the runtime (a watchdog) hands nothing over
    working = {t: q for t, q in quiet.items() if (host.kind[host.thread == t] == HostKind.OP).any()}
    found: list[Handover] = []
    for thread, q in quiet.items():
        for k in np.flatnonzero((q.following >= 0) & (q.hi - q.lo >= LEAST_SILENCE)):
            lo, hi = int(q.lo[k]), int(q.hi[k])
            fell = [f for other, theirs in working.items() if other != thread and (f := theirs.fell_within(lo, hi))]
            if fell:
                found.append(Handover(max(fell)[1], int(q.following[k]), int(q.index[k])))
    return found


@dataclass(frozen=True, eq=False)
class _Quiet:
    """One thread's silences in order, the times before its first event and after its last among them."""

    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    index: NDArray[np.int64]  # the silence's own stretch, or -1
    before: NDArray[np.int64]  # the stretch before it, or -1
    following: NDArray[np.int64]  # the stretch after it, or -1

    def fell_within(self, lo: int, hi: int) -> tuple[int, int] | None:
        """The (time, last stretch) at which the thread fell silent within (lo, hi], if it still is at hi."""
        k = int(np.searchsorted(self.lo, hi, side="right")) - 1
        if k < 0 or self.lo[k] <= lo or self.hi[k] < hi or self.before[k] < 0:
            return None
        fell, since = int(self.lo[k]), max(lo, int(self.hi[0]))
        length = hi - since
        around = int(np.searchsorted(self.lo, since, side="right")) - 1  # the silence it may be in at `since`
        woke = max(since, int(self.hi[around]))
        if fell - woke < LEAST_FILLED * length or hi - fell > LARGEST_REST * length:
            return None
        return fell, int(self.before[k])


def _quiet(s: Stretches, silent: NDArray[np.bool_], on: NDArray[np.int64]) -> _Quiet:
    first, last, quiet = on[:1], on[-1:], on[silent[on]]
    none = np.array([-1])
    long_ago, forever = np.array([-1 << 62]), np.array([1 << 62])
    return _Quiet(
        lo=np.concatenate([long_ago, s.lo[quiet], s.hi[last]]),
        hi=np.concatenate([s.lo[first], s.hi[quiet], forever]),
        index=np.concatenate([none, quiet, none]),
        before=np.concatenate([none, np.where(quiet > first, quiet - 1, -1), last]),
        following=np.concatenate([first, np.where(quiet < last, quiet + 1, -1), none]),
    )
