"""A Race: which layouts must still be priced before the best ones are certain.

A layout is set aside once it is proven that it can be none of: the best few, the best for what it chose of any knob, on
the front of time and memory. Its bound proves it: no step takes less.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from presage.search.layout import JobPlan, knob

__all__ = ["COMPARED", "PruningQueue", "pareto_front"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
COMPARED = ("gpus", "tp", "cp", "pp", "virtual", "schedule", "ep", "expert_tp", "micro_batch", "sharding", "recompute")


class PruningQueue:
    """Arrays over all layouts that fit. `value` is what is sought to be small; infinite until it is known."""

    def __init__(self, layouts: Sequence[JobPlan], bound: Floats, needed: Floats, top: int, prune: bool) -> None:
        self.bound, self.needed, self.top, self.prune = bound, needed, top, prune
        self.value = np.full(len(layouts), np.inf)
        self.order = np.argsort(bound, kind="stable")
        self.words = {name: _coded([knob(x, name) for x in layouts]) for name in COMPARED}

    def next(self, most: int) -> Ints:
        """The next to be priced, those with the least bounds first; none when all is certain."""
        left = self.order[~np.isfinite(self.value[self.order])]
        if self.prune and np.isfinite(self.value).any():
            left = left[~self._aside(left)]
        return np.asarray(left[:most])

    def _aside(self, of: Ints) -> NDArray[np.bool_]:
        bound, known = self.bound[of], np.flatnonzero(np.isfinite(self.value))
        aside = bound > self._nth_best()
        for words, codes in self.words.values():
            best = np.full(len(words), np.inf)
            np.minimum.at(best, codes[known], self.value[known])
            aside &= bound > best[codes[of]]
        return np.asarray(aside & (bound > self._least_within(self.needed[of])))

    def _nth_best(self) -> float:
        if self.top > len(self.value):
            return float("inf")
        return float(np.partition(self.value, self.top - 1)[self.top - 1])

    def _least_within(self, memory: Floats) -> Floats:
        """The least value known of layouts that need no more memory."""
        order = np.argsort(self.needed, kind="stable")
        least = np.append(np.inf, np.minimum.accumulate(self.value[order]))
        return np.asarray(least[np.searchsorted(self.needed[order], memory, side="right")])

    def ranked(self) -> Ints:
        """The priced ones, best first; of equals the one that needs less memory, then the one made first."""
        known = np.flatnonzero(np.isfinite(self.value))
        return np.asarray(known[np.lexsort((known, self.needed[known], self.value[known]))])

    def best_by_knob(self) -> dict[str, dict[str, int]]:
        """Of every knob, for each of its words the best layout's number; the best words first."""
        ranked = self.ranked()
        out: dict[str, dict[str, int]] = {}
        for name, (words, codes) in self.words.items():
            firsts, at = np.unique(codes[ranked], return_index=True)
            order = np.argsort(at, kind="stable")
            out[name] = {words[c]: int(ranked[i]) for c, i in zip(firsts[order], at[order], strict=True)}
        return out


def _coded(words: list[str]) -> tuple[list[str], Ints]:
    """The words there are, and each one's number."""
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int64)
    return list(numbers), codes


def pareto_front(needed: Floats, ranked: Ints) -> list[int]:
    """Of ranked ones those that no other beats in both, the fastest first."""
    out: list[int] = []
    for i in ranked.tolist():
        if not out or needed[i] < needed[out[-1]]:
            out.append(i)
    return out
