"""Spare nodes: how long a run waits for a node when all spares are in repair."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Spares"]

Floats = NDArray[np.float64]


class Spares:
    """Of many draws of a run at once: when each node that failed will be back.

    A run needs all its nodes. With n spares it goes on while at most n nodes are in repair; one more, and it waits for
    the first of these n + 1. None: there is always a spare.
    """

    def __init__(self, spares: int | None, draws: int) -> None:
        self.back = None if spares is None else np.full((draws, spares + 1), -np.inf)

    def only(self, keep: NDArray[np.bool_]) -> Spares:
        """Of some of the draws."""
        out = Spares(None, 0)
        out.back = None if self.back is None else self.back[keep]
        return out

    def wait(self, lost: NDArray[np.bool_], now: Floats, repair: Floats) -> Floats:
        """Seconds that draws wait which lose a node now."""
        waits = np.zeros(len(now))
        rows = np.flatnonzero(lost)
        if self.back is None or not len(rows):
            return waits
        self.back[rows, self.back[rows].argmin(axis=1)] = now[rows] + repair[rows]
        waits[rows] = np.maximum(0.0, self.back[rows].min(axis=1) - now[rows])
        return waits
