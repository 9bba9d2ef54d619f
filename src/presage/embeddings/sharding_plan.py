"""A sharding plan: how each table is sharded, and which ranks hold the shards. Sharding types are TorchRec's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from presage.embeddings import Table
from presage.errors import PresageError
from presage.hardware import Platform

TABLE, COLUMN, ROW, DATA = "table_wise", "column_wise", "row_wise", "data_parallel"
TABLE_ROW = "table_row_wise"
KINDS = (TABLE, COLUMN, TABLE_ROW, ROW, DATA)
PLACED = (TABLE, COLUMN, TABLE_ROW)  # whose parts have ranks of their own


@dataclass(frozen=True)
class TablePlacement:
    """Placement of one table: whole, by columns or by rows over some ranks, by rows over all, or on all."""

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
            if (t.sharding in PLACED and not t.ranks) or (t.sharding == TABLE and len(t.ranks) != 1):
                raise PresageError(f"table {i} of the plan is {t.sharding} and on {len(t.ranks)} ranks")

    @staticmethod
    def table_wise(ranks: int, of: Sequence[int]) -> ShardingPlan:
        """Whole tables, by the rank of each."""
        return ShardingPlan(ranks, tuple(TablePlacement(TABLE, (int(r),)) for r in of))

    def counts(self) -> dict[str, int]:
        """Number of tables by sharding type."""
        return {k: n for k in KINDS if (n := sum(t.sharding == k for t in self.tables))}


# ---- A problem of sharding: tables, the batch of all ranks, the ranks and their memory.

USABLE = 0.8  # of a GPU's memory, for tables and their buffers; dense layers and the framework need the rest
MOST_PLACES, MOST_BATCH = 10_000_000, 10**12  # ranks x tables: a search keeps a few numbers of each


@dataclass(frozen=True)
class ShardingProblem:
    tables: tuple[Table, ...]
    batch: int  # samples of a step, of all ranks together
    ranks: int
    platform: Platform
    memory: float = 0.0  # bytes of a rank for tables; 0: four fifths of the GPU's
    optimizer: str = "rowwise_adagrad"
    lengths: str = "fixed"
    index: int = 8  # bytes of an index or a length: int64
    wire: int = 4  # bytes of a pooled number, or its gradient, as they are sent
    two_tier: bool = False  # pooled rows are exchanged inside the node first, then between nodes
    cached: float = 1.0  # the share of a table's rows in the GPU's memory; below 1 the weights are the host's
    prefetched: bool = False  # rows that the cache lacks are fetched while the batch before is computed

    def __post_init__(self) -> None:
        if not self.tables:
            raise PresageError("there are no tables to place")
        if self.ranks < 1 or self.batch < self.ranks:
            raise PresageError(f"a batch of {self.batch} over {self.ranks} ranks leaves some without a sample")
        if self.ranks * len(self.tables) > MOST_PLACES:
            most = max(1, MOST_PLACES // len(self.tables))
            raise PresageError(
                f"{self.ranks:,} ranks for {len(self.tables):,} tables: plans of up to {most:,} are searched"
            )
        if self.batch > MOST_BATCH:
            raise PresageError(f"a batch of {self.batch:,} is more than {MOST_BATCH:,}, the most that is counted with")

    @property
    def limit(self) -> float:
        return self.memory or USABLE * self.platform.gpu.memory
