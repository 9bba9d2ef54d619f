"""Shapley shares: what each of several causes adds, on average over all orders in which they could be added.

One at a time, what is removed does not add up: two stragglers that each would be the slowest alone cost nothing to
remove one by one. Shares do add up to the whole. Up to `EXACT` causes all subsets are asked; beyond, orders are drawn,
each with its reverse, and how pairs differ gives the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import factorial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Value = Callable[[frozenset[str]], Floats]
EXACT = 6  # causes: 64 subsets
PAIRS = 12  # of orders


class Shapley(NamedTuple):
    """[cause, ...]: what each adds to each number that a subset's value has, and the error by drawn orders."""

    added: Floats
    error: Floats
    exact: bool
    asked: int  # subsets


def shapley(causes: Sequence[str], value: Value, seed: int = 0, exact: int = EXACT, pairs: int = PAIRS) -> Shapley:
    """Shapley shares of causes, from the values of their subsets: arrays of one shape."""
    known: dict[frozenset[str], Floats] = {}

    def kept(some: frozenset[str]) -> Floats:
        if some not in known:
            known[some] = np.asarray(value(some), np.float64)
        return known[some]

    if len(causes) <= exact:
        added = np.array([_exact(causes, c, kept) for c in causes])
        return Shapley(added, np.zeros_like(added), True, len(known))
    each = np.array(list(_pairs(causes, kept, np.random.default_rng(seed), pairs)))
    return Shapley(each.mean(axis=0), each.std(axis=0, ddof=1) / np.sqrt(pairs), False, len(known))


def subsets(causes: Sequence[str], seed: int = 0, exact: int = EXACT, pairs: int = PAIRS) -> list[frozenset[str]]:
    """The subsets whose values `shapley` needs."""
    asked: list[frozenset[str]] = []

    def value(some: frozenset[str]) -> Floats:
        asked.append(some)
        return np.zeros(1)

    shapley(causes, value, seed, exact, pairs)
    return asked


def _exact(causes: Sequence[str], cause: str, value: Value) -> Floats:
    others, n = [c for c in causes if c != cause], len(causes)
    total: Floats = np.zeros_like(value(frozenset()))
    for size in range(n):
        weight = factorial(size) * factorial(n - size - 1) / factorial(n)
        for some in map(frozenset, combinations(others, size)):
            total = total + weight * (value(some | {cause}) - value(some))
    return total


def _pairs(causes: Sequence[str], value: Value, rng: np.random.Generator, pairs: int) -> Iterator[Floats]:
    """[cause, ...] of an order and its reverse, together."""
    for _ in range(pairs):
        order = rng.permutation(len(causes))
        yield (_one(causes, order, value) + _one(causes, order[::-1], value)) / 2


def _one(causes: Sequence[str], order: NDArray[np.int64], value: Value) -> Floats:
    some: frozenset[str] = frozenset()
    before = value(some)
    out = np.zeros((len(causes), *before.shape))
    for i in order:
        some |= {causes[i]}
        out[i] = value(some) - before
        before = value(some)
    return out
