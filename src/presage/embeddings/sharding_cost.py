"""Predicted cost of a sharding plan: shard costs, phases by rank, memory, a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.collectives import Collectives, RankGroup
from presage.costs.lookups.row_reuse import missed_rows
from presage.embeddings import EmbeddingModel, Table, embedding_model
from presage.embeddings.sharding_plan import DATA, PLACED, ROW, TABLE_ROW, ShardingPlan, ShardingProblem

Array = npt.NDArray[Any]
PHASES = ("input", "lookup", "output", "gradient", "update", "replicas")


@dataclass(frozen=True, eq=False)
class RankLoads:
    """Load of each rank: seconds, bytes of indices in, bytes of pooled rows out, memory."""

    forward: Array
    backward: Array
    indices: Array
    output: Array
    memory: Array
    outer: Array | None = None  # bytes of pooled rows that leave the rank's node, where rows are summed in it first
    fetch: float = 0.0  # seconds that the slowest rank exchanges rows with its host's memory


@dataclass(frozen=True)
class ShardingCost:
    """Seconds of a step's embeddings."""

    phases: dict[str, float]
    load: RankLoads
    over: float  # bytes of the fullest rank beyond its memory, or 0

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def imbalance(self) -> float:
        """Seconds that the mean rank waits for the slowest in lookups and updates."""
        return sum(float(x.max() - x.mean()) for x in (self.load.forward, self.load.backward))


def shards_of(plan: ShardingPlan, prices: ShardCosts) -> tuple[ShardArrays, Array, SharedTableCosts]:
    """Shards with a rank of their own, their ranks, and the costs all ranks share."""
    tables: list[int] = []
    shards: list[Shard] = []
    ranks: list[int] = []
    for t, placed in enumerate(plan.tables):
        if placed.sharding in PLACED:
            cut = len(placed.ranks)
            tables += [t] * cut
            shards += [prices.placed_part(t, cut, placed.sharding)] * cut
            ranks += placed.ranks
    by_rows, held = ([t for t, p in enumerate(plan.tables) if p.sharding == kind] for kind in (ROW, DATA))
    width = len(prices.part(0).terms)
    return ShardArrays.of(tables, shards, width), np.array(ranks, int), prices.common(by_rows, held)


def rank_loads(parts: ShardArrays, ranks: Array, common: SharedTableCosts, prices: ShardCosts) -> RankLoads:
    n = prices.problem.ranks

    def summed(values: Array, extra: float) -> Array:
        return np.bincount(ranks, values, minlength=n) + extra

    if len(ranks):
        total = np.zeros((n, parts.terms.shape[1]))
        np.add.at(total, ranks, parts.terms)
        forward, backward = prices.model.forward_of(total), prices.model.backward_of(total)
    else:
        forward = backward = np.zeros(n)
    rest = summed(parts.indices, common.indices), summed(parts.output, 0.0), summed(parts.memory, common.memory)
    outer = _leaving(parts, ranks, prices) if prices.problem.two_tier and len(ranks) else None
    fetch = summed(parts.fetch, 0.0)
    forward = forward + common.forward + (0.0 if prices.problem.prefetched else fetch)
    return RankLoads(forward, backward + common.backward, *rest, outer, float(fetch.max()) + common.fetch)


def _leaving(parts: ShardArrays, ranks: Array, prices: ShardCosts) -> Array:
    """Bytes of pooled rows that leave each rank's node: partial rows of one table are summed in the node."""
    near = prices.group.per_domain
    nodes = ranks // near
    pairs = np.unique(np.stack([parts.table, nodes]), axis=1)
    sums = np.zeros(-(-prices.problem.ranks // near))
    for k in range(pairs.shape[1]):
        same = (parts.table == pairs[0, k]) & (nodes == pairs[1, k])
        by_rows = prices.problem.batch * prices.problem.tables[pairs[0, k]].dim * prices.problem.wire
        sums[pairs[1, k]] += min(float(parts.output[same].sum()), float(by_rows))
    return np.asarray(np.repeat(sums / near, near)[: prices.problem.ranks])


def phase_seconds(load: RankLoads, common: SharedTableCosts, prices: ShardCosts) -> dict[str, float]:
    """Each phase is as long as its slowest rank needs."""
    if prices.problem.ranks == 1:
        inward = outward = 0.0
    else:
        inward, outward = float(prices.input(load.indices.max())), prices.pooled(load)
    scatter, gather, reduce = prices.between(common)
    return {
        "input": inward,
        "lookup": float(load.forward.max()),
        "output": outward + scatter,
        "gradient": outward + gather,
        "update": float(load.backward.max()),
        "replicas": reduce + common.dense,
    }


def sharding_cost(plan: ShardingPlan, prices: ShardCosts) -> ShardingCost:
    """Predicted step cost of a plan."""
    parts, ranks, common = shards_of(plan, prices)
    load = rank_loads(parts, ranks, common, prices)
    over = max(0.0, float(load.memory.max()) - prices.problem.limit)
    return ShardingCost(phase_seconds(load, common, prices), load, over)


# ---- What parts of tables cost a rank: terms of its lookups, bytes to send, memory; and the times of a whole plan.

SIZES = 24.0  # bytes to each rank that tell how much will come: three numbers
STATE = {"rowwise_adagrad": 4.0, "sgd": 0.0}  # optimizer's bytes a row
DENSE_STATE = {"rowwise_adagrad": 1.0, "sgd": 0.0}  # of a table that all hold: of its weights' bytes
NARROWEST = 32  # columns that a part keeps
REACHED = 0.85  # of the memory bandwidth, by dense updates
DENSE_PASSES = 5.0  # over weights: gradients zeroed, read, weights read and written, state


@dataclass(frozen=True, eq=False)
class Shard:
    """Cost terms of one shard of a table on its rank."""

    terms: Array
    indices: float  # bytes in
    output: float  # bytes out
    memory: float
    fetch: float = 0.0  # seconds to exchange rows with the host's memory, where a cache lacks them


@dataclass(frozen=True, eq=False)
class ShardArrays:
    """Parts as arrays, one entry each."""

    table: Array
    terms: Array
    indices: Array
    output: Array
    memory: Array
    fetch: Array

    @staticmethod
    def of(tables: Sequence[int], parts: Sequence[Shard], width: int = 0) -> ShardArrays:
        """`width`: terms of a part, where there may be none."""
        rest = [np.array([getattr(p, n) for p in parts], float) for n in ("indices", "output", "memory", "fetch")]
        width = len(parts[0].terms) if parts else width
        return ShardArrays(np.array(tables, int), np.array([p.terms for p in parts]).reshape(len(parts), width), *rest)


@dataclass(frozen=True)
class SharedTableCosts:
    """Costs that row-wise and data-parallel tables add to every rank: seconds and bytes."""

    by_rows: tuple[float, float] = (0.0, 0.0)  # forward, backward of tables cut by rows
    replicated: tuple[float, float] = (0.0, 0.0)  # of tables that all ranks hold
    indices: float = 0.0
    output: float = 0.0  # bytes of the reduce-scatter
    replicas: float = 0.0  # bytes of the all-reduce
    dense: float = 0.0  # seconds of dense updates
    memory: float = 0.0
    fetch: float = 0.0  # seconds to exchange rows with the host's memory

    @property
    def forward(self) -> float:
        return self.by_rows[0] + self.replicated[0]

    @property
    def backward(self) -> float:
        return self.by_rows[1] + self.replicated[1]


class ShardCosts:
    """Shards of one problem and their costs, computed on first use."""

    def __init__(self, problem: ShardingProblem, model: EmbeddingModel | None = None) -> None:
        self.problem = problem
        self.model = model or embedding_model(problem.platform.gpu)
        self.collectives = Collectives.of(problem.platform)
        self.group = RankGroup.of(problem.platform, problem.ranks)
        self._parts: dict[tuple[int, int], Shard] = {}
        self._everywhere: dict[tuple[int, str], Shard] = {}
        for i, terms in enumerate(self._terms(problem.tables, problem.batch)):
            self._parts[i, 1] = self._part(problem.tables[i], terms)
        self.received = 2 * problem.batch / problem.ranks * sum(t.dim for t in problem.tables) * problem.wire

    def _terms(self, tables: Sequence[Table], batch: float) -> Array:
        return self.model.terms(tables, batch, optimizer=self.problem.optimizer, lengths=self.problem.lengths)

    def _part(self, table: Table, terms: Array) -> Shard:
        batch = self.problem.batch
        indices, output = (table.pooling + 1) * batch * self.problem.index, batch * table.dim * self.problem.wire
        held, fetch = self._held(table)
        return Shard(terms, indices, output, held + 2 * indices + 2 * output, fetch)

    def _held(self, table: Table) -> tuple[float, float]:
        """Bytes of weights and state in the GPU's memory, and seconds a step to fetch the rows that its cache lacks and
        to write back those they replace."""
        each, share = table.dim * table.width + STATE[self.problem.optimizer], self.problem.cached
        if share >= 1:
            return table.rows * each, 0.0
        reuse, parts = table.reuse, table.reuse.parts
        rows, lookups = table.rows * parts, table.pooling * self.problem.batch * parts
        missed = missed_rows(reuse.skew(rows), rows, lookups, share * rows) / parts
        return share * table.rows * each, 2 * missed * each / self.problem.platform.gpu.pcie

    def cuts(self, table: int) -> list[int]:
        """Into how many parts of columns a table may be cut."""
        dim = self.problem.tables[table].dim
        return [
            k for k in (2, 4, 8, 16, 32) if dim % (4 * k) == 0 and dim // k >= NARROWEST and k <= self.problem.ranks
        ]

    def part(self, table: int, cut: int = 1) -> Shard:
        """One of `cut` parts of its columns."""
        if (table, cut) not in self._parts:
            one = self.problem.tables[table].columns_part(cut)
            self._parts[table, cut] = self._part(one, self._terms([one], self.problem.batch)[0])
        return self._parts[table, cut]

    def placed_part(self, table: int, cut: int, sharding: str) -> Shard:
        """One of `cut` parts with ranks of their own: of its rows where it is table-row-wise, else of its columns."""
        if sharding != TABLE_ROW:
            return self.part(table, cut)
        if (table, -cut) not in self._parts:
            self._parts[table, -cut] = self._row_part(self.problem.tables[table], cut)
        return self._parts[table, -cut]

    def everywhere(self, table: int, kind: str) -> Shard:
        """A rank's share of a table that is cut by rows, or that all ranks hold."""
        if (table, kind) not in self._everywhere:
            one, n = self.problem.tables[table], self.problem.ranks
            self._everywhere[table, kind] = self._row_part(one, n) if kind == ROW else self._replica(one)
        return self._everywhere[table, kind]

    def _row_part(self, table: Table, cut: int) -> Shard:
        batch, one = self.problem.batch, table.rows_part(cut)
        indices, output = (one.pooling + 1) * batch * self.problem.index, batch * table.dim * self.problem.wire
        held, fetch = self._held(one)
        return Shard(self._terms([one], batch)[0], indices, output, held + 2 * indices + 2 * output, fetch)

    def _replica(self, table: Table) -> Shard:
        copies = 2 + DENSE_STATE[self.problem.optimizer]  # weights, gradients
        return Shard(self._terms([table], self.problem.batch / self.problem.ranks)[0], 0.0, 0.0,
                    copies * table.weight_bytes)  # fmt: skip

    def common(self, by_rows: Sequence[int], replicated: Sequence[int]) -> SharedTableCosts:
        """Costs of these tables on every rank."""
        rows = ShardArrays.of(by_rows, [self.everywhere(t, ROW) for t in by_rows])
        held = ShardArrays.of(replicated, [self.everywhere(t, DATA) for t in replicated])
        weights = float(sum(self.problem.tables[t].weight_bytes for t in replicated))
        dense = DENSE_PASSES * weights / (REACHED * self.problem.platform.gpu.memory_bandwidth)
        memory = float(rows.memory.sum() + held.memory.sum()) + self.received
        sizes = float(rows.indices.sum()), float(rows.output.sum())
        (there, back), fetch = self._group(rows), float(rows.fetch.sum())
        there += 0.0 if self.problem.prefetched else fetch
        return SharedTableCosts((there, back), self._group(held), *sizes, weights, dense, memory, fetch)

    def _group(self, parts: ShardArrays) -> tuple[float, float]:
        """Forward and backward of parts that are one group."""
        if not len(parts.table):
            return 0.0, 0.0
        total = parts.terms.sum(axis=0)
        return float(self.model.forward_of(total)), float(self.model.backward_of(total))

    def exchange(self, most: Any) -> Any:
        """Seconds of an all-to-all in which the busiest rank sends or receives `most` bytes, its own included.

        It sends to all others evenly; ranks of its domain get their share over the inner links at the same time.
        """
        most = np.asarray(most, float)
        seconds = self.collectives.seconds("all_to_all", most, self.group)
        near = self.group.per_domain
        if near in (1, self.group.ranks):
            return seconds
        within = self.collectives.seconds("all_to_all", most * near / self.group.ranks, RankGroup(near, near))
        return np.maximum(seconds, within)

    def pooled(self, load: RankLoads) -> float:
        """Seconds of the exchange of pooled rows, or of their gradients."""
        near, ranks = self.group.per_domain, self.group.ranks
        if not self.problem.two_tier or near in (1, ranks) or load.outer is None:
            return float(self.exchange(load.output.max()))
        within = self.collectives.seconds("all_to_all", float(load.output.max()), RankGroup(near, near))
        between = self.collectives.seconds("all_to_all", float(load.outer.max()), RankGroup(ranks // near, 1))
        return float(within + between)

    def input(self, most: Any) -> Any:
        """The sizes first, then lengths, then indices; of lengths only the start counts, their bytes are in `most`."""
        return np.where(np.asarray(most) > 0, 2 * self.announce() + self.exchange(most), 0.0)

    def announce(self) -> float:
        """Seconds of an exchange of sizes."""
        return float(self.exchange(SIZES * self.problem.ranks))

    def between(self, common: SharedTableCosts) -> tuple[float, float, float]:
        """Seconds of the reduce-scatter, the all-gather and the all-reduce."""
        sent = [("reduce_scatter", common.output), ("all_gather", common.output), ("all_reduce", common.replicas)]
        scatter, gather, reduce = (float(self.collectives.seconds(op, b, self.group)) for op, b in sent)
        return scatter, gather, reduce


# ---- What each table puts on each rank: the memory of its parts.


def memory_by_rank(problem: ShardingProblem, plan: ShardingPlan) -> npt.NDArray[Any]:
    """[table, rank]: bytes; nan where a rank has nothing of a table. What ranks receive from others is not in it."""
    prices = ShardCosts(problem)
    out = np.full((len(plan.tables), plan.ranks), np.nan)
    for t, placed in enumerate(plan.tables):
        if placed.sharding in PLACED:
            one = prices.placed_part(t, len(placed.ranks), placed.sharding).memory
            for rank in placed.ranks:
                out[t, rank] = np.nan_to_num(out[t, rank]) + one
        else:
            out[t] = prices.everywhere(t, placed.sharding).memory
    return out


# ---- What no placing of the same parts can beat, and what one table adds to a rank.


def marginal(parts: ShardArrays, prices: ShardCosts, ranks: float = 1.0) -> tuple[Array, Array]:
    """Seconds that each part adds to the forward and the backward of a rank with an even share of all parts.

    With one rank it is the group of all. The kernel depends on the widest table of a group: the least over the groups
    of all tables up to each width that could hold the shard.
    """
    dims = np.array([prices.problem.tables[t].dim for t in parts.table], float)
    widths = [w for w in (32, 64, 128, np.inf) if (dims <= w).any()]
    out = []
    for of in (prices.model.forward_of, prices.model.backward_of):
        least = np.full(len(dims), np.inf)
        for w in widths:
            narrow = dims <= w
            total = parts.terms[narrow].sum(axis=0) / ranks
            more = of(total + parts.terms[narrow]) - of(total)
            least[narrow] = np.minimum(least[narrow], more)
        out.append(np.maximum(least, 0.0))
    return out[0], out[1]


def lower_bound(plan: ShardingPlan, prices: ShardCosts) -> float:
    """Seconds that the parts of a plan take at least, wherever they are."""
    parts, ranks, common = shards_of(plan, prices)
    load = rank_loads(parts, ranks, common, prices)
    if not len(ranks):
        return sum(phase_seconds(load, common, prices).values())
    n = prices.problem.ranks
    added = [np.minimum(a, b) for a, b in zip(marginal(parts, prices), marginal(parts, prices, n), strict=True)]
    alone = prices.model.forward_of(parts.terms), prices.model.backward_of(parts.terms)
    spread = []
    for least, single, extra in zip(added, alone, (common.forward, common.backward), strict=True):
        first = max(0.0, float((single - least).min()))
        spread.append(max(float(least.sum()) / n + first, float(single.max())) + extra)
    for sizes, extra in ((parts.indices, common.indices), (parts.output, 0.0)):
        spread.append(max(float(sizes.sum()) / n, float(sizes.max())) + extra)
    one = [np.array([v]) for v in spread]
    ideal = RankLoads(one[0], one[1], one[2], one[3], load.memory)
    return min(sum(phase_seconds(x, common, prices).values()) for x in (ideal, load))
