"""A problem of sharding: tables, the batch of all ranks, the ranks and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from presage.embeddings import Table
from presage.errors import PresageError
from presage.hardware import Platform

__all__ = ["ShardingProblem"]

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
