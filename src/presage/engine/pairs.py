"""The recursion for programs in which no task waits for more than two others: the engine's own, with less to look up.

Thousands of small programs a second (a pipeline schedule for each plan of a search) want no more than this. Tasks are
numbered so that those waited for come first; a meeting of two lanes is one task that waits for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from presage.engine.compiled import compiled, inlined

__all__ = ["Pairs", "forward_pairs", "holder"]

Array = NDArray[Any]


class Pairs(NamedTuple):
    """Task t waits for first[t], and for second[t] with its kind's delay; `len(first)` stands for nobody."""

    first: Array
    second: Array
    kind: Array  # what a task's seconds and the delay of its second wait are looked up by


@compiled
def forward_pairs(w: Pairs, seconds: Array, delay: Array, end: Array, begin: int, stop: int) -> None:
    """Fill `end` for tasks begin..stop; it has one place more than there are tasks: the end of nobody, 0."""
    end[len(w.first)] = 0.0
    for t in range(begin, stop):
        k = w.kind[t]
        a, b = end[w.first[t]], end[w.second[t]] + delay[k]
        end[t] = (a if a > b else b) + seconds[k]


@inlined
def holder(w: Pairs, delay: Array, end: Array, t: int, tie: float) -> int:
    """The task whose end let task t start; the first of its two where they differ by no more than `tie` seconds."""
    a, b = end[w.first[t]], end[w.second[t]] + delay[w.kind[t]]
    return int(w.first[t]) if a >= b - tie else int(w.second[t])
