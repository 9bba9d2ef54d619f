"""Durations: seconds per task, each a number or an array of draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine.recursion import Seconds


@dataclass(frozen=True, eq=False)
class Durations:
    """Seconds per task. Tasks with `row` >= 0 take their draws from that row of `draws`; several may share a row."""

    base: NDArray[np.float64]
    row: NDArray[np.int32]
    draws: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name, kind in (("base", np.float64), ("row", np.int32), ("draws", np.float64)):
            # one type and draws side by side, or the recursion is compiled anew and runs slowly
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), kind))
        # The compiled recursion reads draws[row] unchecked and adds blindly: nothing wrong may get past here.
        if self.base.shape != self.row.shape or self.base.ndim != 1 or self.draws.ndim != 2:
            shapes = f"{self.base.shape}, {self.row.shape} and {self.draws.shape}"
            raise ValueError(f"durations need (tasks), (tasks) and (rows, draws), not {shapes}")
        if not self.draws.shape[1]:
            raise ValueError(f"durations with 0 draws: {self.draws.shape}")
        if len(self.row) and self.row.max() >= len(self.draws):
            raise ValueError(f"a duration names row {self.row.max()} of {len(self.draws)}")
        _check_seconds(self.draws)
        if not _fine(self.base):
            _check_seconds(self.base[self.row < 0])

    @staticmethod
    def of(values: ArrayLike | Durations, draws: Mapping[int, ArrayLike] | None = None) -> Durations:
        """From one number a task, or a (tasks, draws) array; `draws` replaces single tasks' numbers by arrays.

        Durations.of([1.0, 2.0])                            two tasks, one draw
        Durations.of([1.0, 2.0], {1: [1.9, 2.0, 2.4]})      the second one varies
        """
        if isinstance(values, Durations):
            return values
        table = np.ascontiguousarray(values, np.float64)
        if table.ndim == 2 and not draws:
            base = table[:, 0].copy() if table.shape[1] else np.zeros(len(table))
            return Durations(base, np.arange(len(table), dtype=np.int32), table)
        if table.ndim != 1:
            raise ValueError(f"durations of shape {table.shape}{' and draws by task' if draws else ''}")
        row = np.full(len(table), -1, np.int32)
        if not draws:
            return Durations(table, row, np.empty((0, 1)))
        for i, task in enumerate(draws):
            if not 0 <= task < len(table):
                raise ValueError(f"draws for task {task}, but there are {len(table)} tasks")
            row[task] = i
        return Durations(table, row, _stacked(draws))

    @property
    def count(self) -> int:
        """The number of draws."""
        return int(self.draws.shape[1])

    @property
    def seconds(self) -> Seconds:
        """The same as the recursion takes it."""
        return Seconds(self.base, self.row, self.draws)

    def __len__(self) -> int:
        return len(self.base)

    def repeated(self, times: int) -> Durations:
        return Durations(np.tile(self.base, times), np.tile(self.row, times), self.draws)


def _stacked(draws: Mapping[int, ArrayLike]) -> NDArray[np.float64]:
    rows = [np.asarray(v, np.float64) for v in draws.values()]
    for task, values in zip(draws, rows, strict=True):
        if values.ndim != 1 or len(values) != rows[0].size:
            raise ValueError(f"draws of task {task} have shape {values.shape}, others {rows[0].shape}")
    return np.array(rows)


def _fine(seconds: NDArray[np.float64]) -> bool:
    return not seconds.size or bool(seconds.min() >= 0 and seconds.max() < np.inf)


def _check_seconds(seconds: NDArray[np.float64]) -> None:
    if not _fine(seconds):
        bad = seconds[~((seconds >= 0) & (seconds < np.inf))][0]
        raise ValueError(f"a duration is negative or not finite: {bad}")
