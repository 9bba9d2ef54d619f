"""Sets of time against counting unit cells."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_sketches import law
from presage.engine.timeline import Intervals, intersect, length, subtract, union

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(-2, 6)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)
Spans = list[tuple[int, int]]


def cells(spans: Spans) -> set[int]:
    return {x for start, end in spans for x in range(start, end)}


def covered(a: Intervals) -> set[int]:
    return cells([(int(s), int(e)) for s, e in a])


def joined(spans: Spans) -> Intervals:
    start, end = np.array(spans, float).reshape(-1, 2).T
    return union(start, end)


def is_tidy(a: Intervals) -> bool:
    """Sorted, none empty, none touching the next."""
    return bool((a[:, 1] > a[:, 0]).all() and (a[1:, 0] > a[:-1, 1]).all())


@law()
@given(SPANS, SPANS)
def test_sets_of_time(a: Spans, b: Spans) -> None:
    one, two = joined(a), joined(b)
    expected = {
        "union": (one, cells(a)),
        "intersect": (intersect(one, two), cells(a) & cells(b)),
        "subtract": (subtract(one, two), cells(a) - cells(b)),
    }
    for name, (got, want) in expected.items():
        assert covered(got) == want, name
        assert length(got) == len(want), name
        assert is_tidy(got), name


@law()
@given(SPANS, SPANS)
def test_parts_add_up(a: Spans, b: Spans) -> None:
    one, two = joined(a), joined(b)
    assert length(one) == length(intersect(one, two)) + length(subtract(one, two))


def test_far_from_zero() -> None:
    at = 1e17
    one, two = union(np.array([at]), np.array([at + 64])), union(np.array([at + 32]), np.array([at + 48]))
    assert length(subtract(one, two)) == 48
    assert length(subtract(two, one)) == 0
