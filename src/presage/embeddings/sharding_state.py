"""Sharding search state: shards on ranks, with per-rank sums that are updated when a shard moves.

What is made smaller is a soft form of the step: in place of the largest of the ranks, a norm of high power of all of
them, so that a change that helps the second-slowest rank counts too. All changes of a rank are looked through with the
embedding model's law times what its learned correction is for the ranks as they are; then exactly, from the best on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_cost import RankLoads, ShardCosts, SharedTableCosts, phase_seconds, shards_of
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, TablePlacement

Array = npt.NDArray[Any]
STEP = 1.05
OTHERS = 256  # parts of other ranks that swaps are tried with at a time
FARTHEST = 100.0  # times the scale: beyond it all is as bad, and the power still a number
FEW = 3  # changes of a rank that are looked at exactly


@dataclass(frozen=True)
class ShardMove:
    """Move one shard to another rank, or swap two; with the smoothed step time that results."""

    soft: float
    part: int
    rank: int = -1
    other: int = -1


class ShardingState:
    """Mutable assignment of shards to ranks; `to_plan` gives the ShardingPlan."""

    def __init__(self, plan: ShardingPlan, prices: ShardCosts) -> None:
        self.plan, self.prices, self.n = plan, prices, plan.ranks
        self.parts, self.rank, self.common = shards_of(plan, prices)
        p = self.parts
        self.small = np.stack([p.indices, p.output, p.memory]) if len(self.rank) else np.zeros((3, 0))
        self.total = np.zeros((self.n, len(prices.part(0).terms)))
        self.sums = np.zeros((3, self.n))
        self.without = np.zeros_like(p.terms)  # of each part its rank's total less itself
        self.values = np.zeros((4, self.n))  # forward, backward, bytes in, bytes out
        self.factor = np.ones((2, self.n))  # of the law, by rank
        self.power = 8
        self.refresh(range(self.n))
        self.weigh()

    def refresh(self, ranks: Any) -> None:
        """Recompute the sums of some ranks from their shards."""
        for r in ranks:
            own = np.flatnonzero(self.rank == r)
            terms = self.parts.terms[own]
            self.total[r] = terms.sum(axis=0) if len(own) else 0.0
            self.without[own] = (1.0 - np.eye(len(own))) @ terms
            self.sums[:, r] = self.small[:, own].sum(axis=1)
        changed = list(ranks)
        self.values[:, changed] = self._values(self.total[changed], self.sums[:, changed])
        added = np.array([self.common.forward, self.common.backward])[:, None]
        law = self._times(self.total[changed], corrected=False)
        self.factor[:, changed] = np.where(law > 0, (self.values[:2, changed] - added) / np.maximum(law, 1e-12), 1.0)

    def _times(self, total: Array, corrected: bool) -> Array:
        model = self.prices.model
        return np.stack([model.forward_of(total, corrected=corrected), model.backward_of(total, corrected=corrected)])

    def _values(self, total: Array, sums: Array, factor: Array | None = None) -> Array:
        """Times and bytes of ranks with these sums: exact, or by the uncorrected law times a factor."""
        times = self._times(total, True) if factor is None else self._times(total, False) * factor
        c = self.common
        return np.stack([times[0] + c.forward, times[1] + c.backward, sums[0] + c.indices, sums[1]])

    def weigh(self) -> None:
        """Set the weight of each value in seconds: of bytes by the slope of the exchange times."""
        into, out = (max(float(v), 1.0) for v in self.values[2:].max(axis=1))
        slope = [(float(f(STEP * m)) - float(f(m))) / ((STEP - 1) * m)
                 for f, m in ((self.prices.exchange, into), (self.prices.exchange, out))]  # fmt: skip
        self.weights = np.array([1.0, 1.0, slope[0], 2 * slope[1]])
        self.scale = np.maximum(self.values.max(axis=1), 1e-12)

    # ---- how good it is

    def load(self) -> RankLoads:
        forward, backward, indices, output = self.values
        return RankLoads(forward, backward, indices, output, self.sums[2] + self.common.memory)

    def seconds(self) -> float:
        """Exact step time."""
        return sum(phase_seconds(self.load(), self.common, self.prices).values())

    def fits(self) -> bool:
        return float(self.sums[2].max()) + self.common.memory <= self.prices.problem.limit

    def soft(self) -> float:
        return float(self.weights * self.scale @ self._raised(self.values).sum(axis=1) ** (1 / self.power))

    def _raised(self, values: Array) -> Array:
        """Values over their scale to the power, by squaring."""
        out: Array = np.minimum(values / self.scale.reshape(4, *[1] * (values.ndim - 1)), FARTHEST)
        for _ in range(self.power.bit_length() - 1):
            out = out * out
        return out

    def _soft_with(self, source: Array, target: Array, r: int, targets: Array) -> Array:
        """Smoothed step time where rank r has the values `source` and the other ranks `target`."""
        now = self._raised(self.values)
        shape = (4, *[1] * (target.ndim - 2), -1)
        base = now.sum(axis=1).reshape(4, *[1] * (target.ndim - 1)) - now[:, r].reshape(4, *[1] * (target.ndim - 1))
        sums = base - now[:, targets].reshape(shape) + self._raised(source) + self._raised(target)
        out: Array = np.tensordot(self.weights * self.scale, np.maximum(sums, 0.0) ** (1 / self.power), axes=1)
        return out

    # ---- changes

    def critical(self) -> list[int]:
        """Ranks that are slowest in at least one phase."""
        return list(dict.fromkeys(self.values.argmax(axis=1).tolist()))

    def moves(self, r: int) -> list[ShardMove]:
        """The best moves of shards of rank r."""
        own = np.flatnonzero(self.rank == r)
        if not len(own) or self.n == 1:
            return []
        small = self.small[:, own]
        source = self._values(self.without[own], self.sums[:, r, None] - small, self.factor[:, r, None])
        sums = self.sums[:, None, :] + small[:, :, None]
        totals = self.total[None] + self.parts.terms[own][:, None]
        target = self._values(totals, sums, self.factor[:, None, :])
        soft = self._soft_with(source[:, :, None], target, r, np.arange(self.n))
        soft[sums[2] + self.common.memory > self.prices.problem.limit] = np.inf
        soft[:, r] = np.inf
        return [ShardMove(float(soft[i, q]), int(own[i]), rank=q) for i, q in _least(soft)]

    def swaps(self, r: int, rng: np.random.Generator) -> list[ShardMove]:
        """The best swaps of shards of rank r with those of other ranks."""
        own, others = np.flatnonzero(self.rank == r), np.flatnonzero(self.rank != r)
        if not len(own) or not len(others):
            return []
        others = rng.choice(others, OTHERS, replace=False) if len(others) > OTHERS else others
        ranks, limit = self.rank[others], self.prices.problem.limit - self.common.memory
        differ = self.small[:, others][:, None, :] - self.small[:, own][:, :, None]
        to_r, to_q = self.sums[:, r, None, None] + differ, self.sums[:, ranks][:, None, :] - differ
        total_r = self.without[own][:, None] + self.parts.terms[others][None]
        total_q = self.without[others][None] + self.parts.terms[own][:, None]
        source = self._values(total_r, to_r, self.factor[:, r, None, None])
        target = self._values(total_q, to_q, self.factor[:, ranks][:, None, :])
        soft = self._soft_with(source, target, r, ranks)
        soft[(to_r[2] > limit) | (to_q[2] > limit)] = np.inf
        return [ShardMove(float(soft[i, j]), int(own[i]), other=int(others[j])) for i, j in _least(soft)]

    def try_change(self, change: ShardMove, below: float) -> bool:
        """Apply a change; undo it unless the smoothed step time falls below `below`."""
        here = int(self.rank[change.part])
        there = change.rank if change.other < 0 else int(self.rank[change.other])
        both = [here, there]
        own = np.flatnonzero((self.rank == here) | (self.rank == there))
        kept = [(a, a[..., both].copy()) for a in (self.sums, self.values, self.factor)]
        total, without = self.total[both].copy(), self.without[own].copy()
        self._put(change, here, there)
        self.refresh(both)
        if self.soft() < below:
            return True
        self._put(change, there, here)
        for array, old in kept:
            array[..., both] = old
        self.total[both], self.without[own] = total, without
        return False

    def _put(self, change: ShardMove, here: int, there: int) -> None:
        self.rank[change.part] = there
        if change.other >= 0:
            self.rank[change.other] = here

    # ---- what it is

    def ranks_of(self) -> dict[int, list[int]]:
        """The ranks of each table's parts."""
        out: dict[int, list[int]] = {}
        for t, r in zip(self.parts.table.tolist(), self.rank.tolist(), strict=True):
            out.setdefault(t, []).append(r)
        return out

    def to_plan(self) -> ShardingPlan:
        tables = list(self.plan.tables)
        for t, ranks in self.ranks_of().items():
            tables[t] = TablePlacement(TABLE if len(ranks) == 1 else COLUMN, tuple(ranks))
        return ShardingPlan(self.n, tuple(tables))

    def without_table(self, table: int) -> tuple[Array, Array]:
        """Sums of all ranks less a table's parts."""
        total, sums = self.total.copy(), self.sums.copy()
        gone = self.parts.table == table
        for r in dict.fromkeys(self.rank[gone].tolist()):
            stay = np.flatnonzero((self.rank == r) & ~gone)
            total[r], sums[:, r] = self.parts.terms[stay].sum(axis=0), self.small[:, stay].sum(axis=1)
        return total, sums

    def least_loaded(self, table: int, cut: int) -> list[int]:
        """Ranks for the shards of a table, each where the smoothed step time rises least."""
        part, out = self.prices.part(table, cut), []
        total, sums = self.without_table(table)
        more = np.array([part.indices, part.output, part.memory])
        for _ in range(cut):
            before = self._raised(self._values(total, sums, self.factor))
            after = self._raised(self._values(total + part.terms, sums + more[:, None], self.factor))
            norm = (before.sum(axis=1)[:, None] - before + after) ** (1 / self.power)
            rise = (self.weights * self.scale) @ norm
            rise[sums[2] + more[2] + self.common.memory > self.prices.problem.limit] = np.inf
            out.append(int(rise.argmin()))
            total[out[-1]] += part.terms
            sums[:, out[-1]] += more
        return out

    def seconds_with(self, table: int, placed: TablePlacement) -> float:
        """Step time with a table sharded differently; infinite if it does not fit."""
        total, sums = self.without_table(table)
        changed = set(self.rank[self.parts.table == table].tolist())
        if placed.ranks:
            part = self.prices.part(table, len(placed.ranks))
            for r in placed.ranks:
                total[r] += part.terms
                sums[:, r] += [part.indices, part.output, part.memory]
        common = self._common_with(table, placed)
        values, affected = self.values.copy(), sorted(changed | set(placed.ranks))
        if affected:
            values[:, affected] = self._values(total[affected], sums[:, affected])
        now = self.common
        values[:3] += np.array(
            [common.forward - now.forward, common.backward - now.backward, common.indices - now.indices]
        )[:, None]
        if float(sums[2].max()) + common.memory > self.prices.problem.limit:
            return np.inf
        load = RankLoads(values[0], values[1], values[2], values[3], sums[2] + common.memory)
        return sum(phase_seconds(load, common, self.prices).values())

    def _common_with(self, table: int, placed: TablePlacement) -> SharedTableCosts:
        if placed.sharding == self.plan.tables[table].sharding or not {
            placed.sharding,
            self.plan.tables[table].sharding,
        } & {ROW, DATA}:
            return self.common
        kinds = [p.sharding for p in self.plan.tables]
        kinds[table] = placed.sharding
        return self.prices.common(*([t for t, k in enumerate(kinds) if k == kind] for kind in (ROW, DATA)))


def _least(soft: Array) -> list[tuple[int, int]]:
    """Indices of the few smallest entries of a matrix."""
    flat = soft.ravel()
    few = min(FEW, len(flat))
    places = np.argpartition(flat, few - 1)[:few]
    return [(int(p) // soft.shape[1], int(p) % soft.shape[1]) for p in places]
