"""An embedding table as its lookups see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.row_reuse import Lookups, Reuse
from presage.errors import PresageError

__all__ = ["WIDTHS", "Table", "TableArrays", "table_arrays"]

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
        """What a batch of so many samples asks for."""
        return self.reuse.at(self.pooling * batch, self.rows)

    def rows_part(self, n: int) -> Table:
        """One of n parts of the rows, with its share of the lookups: ids are spread evenly over parts."""
        part = replace(self.reuse, parts=self.reuse.parts * n)
        return replace(self, rows=max(1, -(-self.rows // n)), pooling=self.pooling / n, reuse=part)

    def columns_part(self, n: int) -> Table:
        """One of n parts of the columns: every lookup goes to each."""
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


def table_arrays(tables: Sequence[Table], batch: float, found: Sequence[Lookups] | None = None) -> TableArrays:
    """Tables as arrays; their lookups as given, or those a batch makes."""
    asked = found if found is not None else [t.lookups(batch) for t in tables]
    fixed = np.array([(t.rows, t.dim, t.width, t.pooling) for t in tables], float).reshape(-1, 4)
    counts = np.array([(k.count, k.distinct) for k in asked], float).reshape(-1, 2)
    rows = np.array([k.rows for k in asked], float).reshape(len(tables), -1)
    uses = np.array([k.uses for k in asked], float).reshape(len(tables), -1)
    return TableArrays(np.full(len(tables), float(batch)), *(*fixed.T, *counts.T, rows, uses))
