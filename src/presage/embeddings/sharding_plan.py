"""A sharding plan: how each table is cut, and which ranks hold the parts. The ways are TorchRec's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from presage.errors import PresageError

__all__ = ["COLUMN", "DATA", "KINDS", "ROW", "TABLE", "ShardingPlan", "TablePlacement"]

TABLE, COLUMN, ROW, DATA = "table_wise", "column_wise", "row_wise", "data_parallel"
KINDS = (TABLE, COLUMN, ROW, DATA)


@dataclass(frozen=True)
class TablePlacement:
    """One table: whole on a rank, cut by columns over some, by rows over all, or whole on all."""

    sharding: str
    ranks: tuple[int, ...] = ()  # of the parts, in order; all ranks where it is cut by rows or held by all


@dataclass(frozen=True)
class ShardingPlan:
    """Tables in the order of the problem's."""

    ranks: int
    tables: tuple[TablePlacement, ...]

    def __post_init__(self) -> None:
        for i, t in enumerate(self.tables):
            if t.sharding not in KINDS:
                raise PresageError(f"table {i} of the plan is {t.sharding!r}: choose from {', '.join(KINDS)}")
            if any(not 0 <= r < self.ranks for r in t.ranks):
                raise PresageError(f"table {i} of the plan is on ranks {t.ranks}, and there are {self.ranks}")
            if (t.sharding in (TABLE, COLUMN) and not t.ranks) or (t.sharding == TABLE and len(t.ranks) != 1):
                raise PresageError(f"table {i} of the plan is {t.sharding} and on {len(t.ranks)} ranks")

    @staticmethod
    def table_wise(ranks: int, of: Sequence[int]) -> ShardingPlan:
        """Whole tables, by the rank of each."""
        return ShardingPlan(ranks, tuple(TablePlacement(TABLE, (int(r),)) for r in of))

    def counts(self) -> dict[str, int]:
        """How many tables are cut in which way."""
        return {k: n for k in KINDS if (n := sum(t.sharding == k for t in self.tables))}
