"""Bucketed transfers: what the compiled loops give is what the engine gives for the same transfers as a Program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from presage.engine import Lane, Program, Timeline, exposed_after, exposed_before, simulate

Floats = NDArray[np.float64]
SECONDS = st.floats(0, 10, allow_nan=False)


@st.composite
def cases(draw: Any) -> tuple[Floats, Floats, Floats, Floats]:
    """Transfers, buckets, times of tasks and how long tasks take, by [lane, task]."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    transfer, at, work = (draw(arrays(np.float64, shape, elements=SECONDS)) for _ in range(3))
    buckets = draw(arrays(np.int64, shape, elements=st.integers(1, 6))).astype(np.float64)
    return transfer, buckets, at + work, work


def pieces(transfer: Floats, buckets: Floats, order: Floats, release: tuple[Floats, Floats, Floats]) -> Timeline:
    """Each transfer as its first bucket, those between and its last, one after the other on its lane's own lane."""
    one = transfer / buckets
    middle = np.maximum(transfer - 2 * one, 0.0)
    parts = np.stack([one, middle, transfer - one - middle], axis=-1)
    by = np.argsort(order, axis=1, kind="stable")
    seconds, begin = (np.take_along_axis(x, by[:, :, None], 1) for x in (parts, np.stack(release, axis=-1)))
    lanes, tasks = order.shape
    program = Program.of(
        [Lane(f"transfers of {s}", s) for s in range(lanes)],
        np.repeat(np.arange(lanes), 3 * tasks),
        release=begin.ravel(),
    )
    return simulate(program, seconds.ravel())


@given(cases(), st.floats(0, 50))
def test_transfers_of_outputs_are_those_of_the_engine(case: tuple[Floats, ...], finish: float) -> None:
    transfer, buckets, end, work = case
    filled = end - work * (1 - 1 / buckets)  # the first bucket, in a task that fills them evenly
    one = transfer / buckets
    whole = np.where(buckets == 1, end, filled)
    last = np.where(buckets == 1, 0.0, end)
    line = pieces(transfer, buckets, end, (np.maximum(whole, 0.0), np.maximum(filled, 0.0), last))
    assert one.shape == end.shape
    expected = max(0.0, float(np.max(line.finish)) - finish)
    assert exposed_after(transfer, buckets, end, work, finish, True) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(cases())
def test_transfers_of_inputs_are_those_of_the_engine(case: tuple[Floats, ...]) -> None:
    transfer, buckets, start, work = case
    nothing = np.zeros_like(start)
    arrived = pieces(transfer, buckets, start, (nothing, nothing, nothing)).end.reshape(*start.shape, 3)
    by = np.argsort(start, axis=1, kind="stable")
    begin, took, count = (np.take_along_axis(x, by, 1) for x in (start, work, buckets))
    late = np.maximum(arrived[:, :, 0] - begin, np.where(count > 1, arrived[:, :, 1] - begin - took, 0.0))
    expected = max(0.0, float(late.max()))
    assert exposed_before(transfer, buckets, start, work, True) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_without_overlap_nothing_is_hidden() -> None:
    transfer, buckets, end = np.array([[1.0, 2.0], [4.0, 0.5]]), np.ones((2, 2)), np.array([[5.0, 6.0], [3.0, 1.0]])
    assert exposed_after(transfer, buckets, end, end, 6.0, False) == 3.0
    assert exposed_before(transfer, buckets, end, end, False) == 4.5
