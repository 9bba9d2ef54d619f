"""TorchRec's EmbeddingShardingPlanner with presage's times.

    from presage.adapters.torchrec import PresageEstimator

    estimator = PresageEstimator(topology, constraints, platform="dgx-h100", tables={"t0": Table(...)})
    storage = EmbeddingStorageEstimator(topology, constraints)
    enumerator = EmbeddingEnumerator(topology, batch, constraints, estimator=[estimator, storage])
    planner = EmbeddingShardingPlanner(topology, batch, enumerator=enumerator, constraints=constraints)

A planner adds up what shards cost a rank, so each is given what it adds to a rank that holds an even share of all
tables. `tables` says how their rows repeat (see `presage indices`); without it lookups are taken to be uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from presage.costs.collectives import Collectives, RankGroup
from presage.embeddings import Reuse, Table, embedding_model
from presage.embeddings.sharding_cost import DENSE_PASSES, REACHED
from presage.errors import PresageError
from presage.hardware import Platform
from presage.hardware import platform as _platform


class TorchRecMissingError(PresageError, ImportError):
    """TorchRec is not installed: this module cannot be imported."""


try:
    from torchrec.distributed.planner.types import Perf, ShardEstimator
except ImportError as e:
    raise TorchRecMissingError(f"torchrec cannot be imported ({e}): pip install 'presage[torchrec]'") from e

MS = 1e3  # TorchRec counts milliseconds
INDEX, OUTPUT = 8, 4  # bytes of an index, of a pooled number
BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
DTYPES = {2: "float16", 4: "float32"}


class PresageEstimator(ShardEstimator):  # type: ignore[misc]
    """A perf estimator for TorchRec's enumerator."""

    def __init__(
        self,
        topology: Any,
        constraints: Mapping[str, Any] | None = None,
        *,
        platform: str | Platform = "dgx-h100",
        tables: Mapping[str, Table] | None = None,
        optimizer: str = "rowwise_adagrad",
        lengths: str = "fixed",
    ) -> None:
        self.topology, self.constraints, self.tables = topology, constraints, dict(tables or {})
        self.platform = _platform(platform) if isinstance(platform, str) else platform
        self.model = embedding_model(self.platform.gpu)
        self.collectives = Collectives.of(self.platform)
        self.ranks = int(topology.world_size)
        near = min(int(getattr(topology, "local_world_size", self.ranks) or self.ranks), self.ranks)
        self.group, self.near = RankGroup(self.ranks, min(near, self.platform.domain)), RankGroup(near, near)
        self.optimizer, self.lengths = optimizer, lengths

    def estimate(self, sharding_options: Sequence[Any], sharder_data_map: Any = None) -> None:  # noqa: ARG002
        """Fill in every shard's perf."""
        whole = {o.name: (self._table(o), o.batch_size * self.ranks) for o in sharding_options}
        totals = [self._terms(t, batch) for t, batch in whole.values()]
        background = np.sum(totals, axis=0) / self.ranks
        for option in sharding_options:
            known: dict[tuple[int, ...], Any] = {}
            for shard in option.shards:
                key = tuple(shard.size)
                if key not in known:
                    known[key] = self._perf(option, key, background)
                shard.perf = known[key]

    def _terms(self, table: Table, samples: float) -> Any:
        return self.model.terms([table], samples, optimizer=self.optimizer, lengths=self.lengths)[0]

    def _table(self, option: Any) -> Table:
        """The table of an option, with the reuse that was told."""
        rows, dim = option.tensor.shape
        told = self.tables.get(option.name)
        return Table(
            option.name, int(rows), int(dim), float(sum(option.input_lengths)),
            told.reuse if told is not None else Reuse(alpha=0.0), DTYPES.get(option.tensor.element_size(), "float32"),
        )  # fmt: skip

    def _perf(self, option: Any, size: tuple[int, ...], background: Any) -> Any:
        """What one shard adds to a rank."""
        table, kind = self._table(option), option.sharding_type
        samples = option.batch_size * (1 if kind == "data_parallel" else self.ranks)
        parts = max(1, round(table.rows / max(1, size[0])))
        part = replace(table, dim=int(size[1])).rows_part(parts) if kind != "data_parallel" else table
        total = background + self._terms(part, samples)
        forward = float(self.model.forward_of(total) - self.model.forward_of(background))
        backward = float(self.model.backward_of(total) - self.model.backward_of(background))
        sent, back = self._comms(kind, part, table, samples)
        return Perf(
            fwd_compute=max(0.0, forward) * MS,
            fwd_comms=sent * MS,
            bwd_compute=max(0.0, backward + self._dense(kind, table)) * MS,
            bwd_comms=back * MS,
            input_dist_comms=self._moved((part.pooling + 1) * samples * INDEX) * MS if kind != "data_parallel" else 0.0,
        )

    def _comms(self, kind: str, part: Table, table: Table, samples: float) -> tuple[float, float]:
        """Forward and backward, of the pooled rows or of the gradients of a table that all hold."""
        if kind == "data_parallel":
            return 0.0, float(self.collectives.seconds("all_reduce", float(table.weight_bytes), self.group))
        pooled = float(samples * part.dim * OUTPUT)
        if kind == "row_wise":
            ops = ("reduce_scatter", "all_gather")
            scatter, gather = (float(self.collectives.seconds(op, pooled, self.group)) for op in ops)
            return scatter / self.ranks, gather / self.ranks  # one of them for all shards of a rank
        if kind in BY_ROWS:
            inside = float(self.collectives.seconds("reduce_scatter", pooled, self.near)) / self.near.ranks
            return inside + self._moved(pooled / self.near.ranks), inside + self._moved(pooled / self.near.ranks)
        return self._moved(pooled), self._moved(pooled)

    def _moved(self, nbytes: float) -> float:
        """Seconds of so many bytes of a rank in an all-to-all that has much to do."""
        much = max(nbytes, 64e6)
        return float(self.collectives.seconds("all_to_all", much, self.group)) * nbytes / much

    def _dense(self, kind: str, table: Table) -> float:
        """The update of a table that all ranks hold."""
        rate = REACHED * self.platform.gpu.memory_bandwidth
        return DENSE_PASSES * table.weight_bytes / rate if kind == "data_parallel" else 0.0
