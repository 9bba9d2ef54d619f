"""Durations: seconds per task, each a number or an array of draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Durations"]


@dataclass(frozen=True, eq=False)
class Durations:
    """Seconds per task. Tasks with `row` >= 0 take their draws from that row of `draws`; several may share a row."""

    base: NDArray[np.float64]
    row: NDArray[np.int32]
    draws: NDArray[np.float64]

    @staticmethod
    def of(values: ArrayLike | Durations, draws: Mapping[int, ArrayLike] | None = None) -> Durations:
        """From one number a task, or a (tasks, draws) array; `draws` replaces single tasks' numbers by arrays.

        Durations.of([1.0, 2.0])                            two tasks, one draw
        Durations.of([1.0, 2.0], {1: [1.9, 2.0, 2.4]})      the second one varies
        """
        if isinstance(values, Durations):
            return values
        table = np.asarray(values, np.float64)
        if table.ndim == 2:
            return _checked(Durations(table[:, 0].copy(), np.arange(len(table), dtype=np.int32), np.ascontiguousarray(table)))
        base = np.ascontiguousarray(table.reshape(-1))
        row = np.full(len(base), -1, np.int32)
        if not draws:
            return _checked(Durations(base, row, np.empty((0, 1))))
        row[list(draws)] = np.arange(len(draws))
        return _checked(Durations(base, row, np.array([np.asarray(v, np.float64) for v in draws.values()])))

    @property
    def count(self) -> int:
        """The number of draws."""
        return self.draws.shape[1]

    def __len__(self) -> int:
        return len(self.base)

    def repeated(self, times: int) -> Durations:
        return Durations(np.tile(self.base, times), np.tile(self.row, times), self.draws)


def _checked(d: Durations) -> Durations:
    used = d.base[d.row < 0]
    for values in (used, d.draws):
        if values.size and not (np.isfinite(values).all() and values.min() >= 0):
            raise ValueError(f"a duration is negative or not finite: {values.min()}")
    return d
