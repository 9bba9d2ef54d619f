"""What the indices of a table tell: pooling, distinct rows, how often rows are used, the skew that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.row_reuse import BINS, STEEPEST, Reuse, zipf
from presage.embeddings.table import Table
from presage.errors import PresageError

__all__ = ["Bags", "TableCounts", "count_lookups", "likely_alpha"]

Array = npt.NDArray[Any]
GOLDEN, STEPS = 0.6180339887, 22


@dataclass(frozen=True)
class Bags:
    """The lookups of one table: indices of all samples one after the other, and how many each sample has."""

    name: str
    indices: Array
    lengths: Array

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != len(self.indices) or (len(self.lengths) and self.lengths.min() < 0):
            raise PresageError(f"table {self.name}: lengths add up to {int(self.lengths.sum())}, not to "
                               f"{len(self.indices)} indices")  # fmt: skip
        if len(self.indices) and self.indices.min() < 0:
            raise PresageError(f"table {self.name}: an index is negative")


@dataclass(frozen=True)
class TableCounts:
    """One table in one batch."""

    name: str
    rows: int  # the largest index and one, unless it was told
    dim: int
    dtype: str
    pooling: float  # of all samples
    lookups: int  # of the batch, as are the rest
    distinct: int
    top: int
    hist: tuple[float, ...]
    alpha: float

    def table(self) -> Table:
        reuse = Reuse(self.alpha, self.hist, self.lookups, self.distinct, self.top)
        return Table(self.name, self.rows, self.dim, self.pooling, reuse, self.dtype)


def count_lookups(
    tables: Iterable[Bags], batch: int | None = None, dim: int = 128, dtype: str = "float32", rows: int | None = None
) -> Iterator[TableCounts]:
    """Each table in its first batch of so many samples, or in all of them."""
    for bags in tables:
        samples = min(len(bags.lengths), batch or len(bags.lengths))
        used = bags.indices[: int(bags.lengths[:samples].sum())]
        uses = np.unique(used, return_counts=True)[1]
        size = max(rows or 0, int(bags.indices.max()) + 1 if len(bags.indices) else 1)
        bins = np.bincount(np.minimum(np.log2(np.maximum(1, uses)).astype(int), BINS - 1), minlength=BINS)
        hist = tuple((bins / max(1, len(uses))).tolist())
        pooling = float(bags.lengths.mean()) if len(bags.lengths) else 0.0
        alpha = likely_alpha(tuple(bins.tolist()), len(used), size)
        top = int(uses.max()) if len(uses) else 0
        yield TableCounts(bags.name, size, dim, dtype, pooling, len(used), len(uses), top, hist, alpha)


@lru_cache(4096)
def likely_alpha(bins: tuple[int, ...], lookups: int, rows: int) -> float:
    """The skew under which so many rows in each bin of use counts, unused ones too, are most likely (Poisson)."""
    if not lookups:
        return 0.0
    found = np.array([rows - sum(bins), *bins], float)

    def unlikely(alpha: float) -> float:
        expected = zipf(alpha, rows, float(lookups)).rows
        all_ = np.maximum(1e-3, np.array([rows - expected.sum(), *expected]))
        return float((all_ - found * np.log(all_)).sum())

    low, high = 0.0, STEEPEST
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    cost = {x: unlikely(x) for x in (left, right)}
    for _ in range(STEPS):
        if cost[left] <= cost[right]:
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
        cost |= {x: unlikely(x) for x in (left, right) if x not in cost}
    best = min([*cost, 0.0], key=lambda x: cost.get(x, unlikely(x)))
    return round(best, 4)
