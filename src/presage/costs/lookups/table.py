"""Embedding tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.lookups.row_reuse import Lookups, Reuse
from presage.errors import PresageError

Array = npt.NDArray[Any]
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2}  # bytes of a weight

MOST_ROWS, MOST_WIDTH = 10**13, 10**6  # what no table has


@dataclass(frozen=True)
class Table:
    """One table, or the part of one that a rank holds."""

    name: str
    rows: int
    dim: int
    pooling: float  # mean lookups of a sample
    reuse: Reuse = field(default_factory=lambda: Reuse(alpha=0.0))
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise PresageError(f"table {self.name}: dtype {self.dtype!r}: choose from {', '.join(WIDTHS)}")
        if self.rows < 1 or self.dim < 1 or not self.pooling >= 0:
            raise PresageError(f"table {self.name}: rows and dim are at least 1, pooling at least 0")
        if self.rows > MOST_ROWS or self.dim > MOST_WIDTH or self.pooling > MOST_WIDTH:
            most = f"rows are at most {MOST_ROWS:,}, dim and pooling {MOST_WIDTH:,}"
            raise PresageError(f"table {self.name}: {most}")

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.dim * self.width

    def lookups(self, batch: float) -> Lookups:
        """Row uses of a batch of samples."""
        return self.reuse.at(self.pooling * batch, self.rows)

    def rows_part(self, n: int) -> Table:
        """One of n row shards with its share of the lookups: ids are spread evenly."""
        part = replace(self.reuse, parts=self.reuse.parts * n)
        return replace(self, rows=max(1, -(-self.rows // n)), pooling=self.pooling / n, reuse=part)

    def columns_part(self, n: int) -> Table:
        """One of n column shards: every lookup goes to each."""
        return replace(self, dim=max(1, -(-self.dim // n)))


@dataclass(frozen=True)
class TableArrays:
    """Tables and a batch of their lookups as arrays, one entry a table."""

    batch: Array
    size: Array  # rows of the table
    dim: Array
    width: Array  # bytes of a weight
    pooling: Array
    count: Array  # lookups
    distinct: Array
    rows: Array  # [tables, bins]
    uses: Array  # [tables, bins]

    def __len__(self) -> int:
        return len(self.size)


def table_arrays(tables: Sequence[Table], batch: float, lookups: Sequence[Lookups] | None = None) -> TableArrays:
    """Tables as arrays; their lookups as given, or those a batch makes."""
    each = lookups if lookups is not None else [t.lookups(batch) for t in tables]
    fixed = np.array([(t.rows, t.dim, t.width, t.pooling) for t in tables], float).reshape(-1, 4)
    counts = np.array([(k.count, k.distinct) for k in each], float).reshape(-1, 2)
    rows = np.array([k.rows for k in each], float).reshape(len(tables), -1)
    uses = np.array([k.uses for k in each], float).reshape(len(tables), -1)
    return TableArrays(np.full(len(tables), float(batch)), *(*fixed.T, *counts.T, rows, uses))


# ---- Random sharding tasks, as the research on sharding draws them, from a pool of made-up tables.

POOL, HEAVY = 856, 20.0
POOL_DIMS = (32, 64, 128, 256)
A_RANK, LEAST, MOST = 13, 0.7, 1.3
FULL = 0.8
TRIES = 100


@cache
def table_pool(size: int = POOL, seed: int = 0) -> tuple[Table, ...]:
    """Synthetic tables of 100 to 30 million rows and 1 to 200 lookups per sample, mostly few."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.uniform(np.log(100), np.log(30e6), size)).astype(int)
    pooling = np.clip(np.exp(rng.normal(np.log(8.0), 1.3, size)), 1.0, 200.0).round(2)
    alpha = rng.uniform(0.4, 1.3, size).round(3)
    dims = rng.choice(POOL_DIMS, size)
    columns = zip(rows.tolist(), dims.tolist(), pooling.tolist(), alpha.tolist(), strict=True)
    return tuple(Table(f"t{i}", e, d, p, Reuse(alpha=a)) for i, (e, d, p, a) in enumerate(columns))


def draw_task(
    ranks: int, memory: float, rng: np.random.Generator, *, heavy: bool = False, tables: int = 0
) -> tuple[Table, ...]:
    """Random tables that fit `ranks` ranks of `memory` bytes each; `tables`: their number, if given."""
    pool = [t for t in table_pool(max(POOL, 2 * tables)) if not heavy or t.pooling >= HEAVY]
    for _ in range(TRIES):
        count = tables or int(rng.integers(int(A_RANK * ranks * LEAST), int(A_RANK * ranks * MOST)))
        drawn = rng.choice(len(pool), min(count, len(pool)), replace=False)
        if sum(pool[i].weight_bytes for i in drawn) <= FULL * ranks * memory:
            return tuple(pool[i] for i in drawn.tolist())
    raise PresageError(f"no draw of tables fits {ranks} ranks of {memory / 1024**3:.4g} GiB")
