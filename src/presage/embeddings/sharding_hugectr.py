"""The plan HugeCTR's planner makes for MLPerf: tables split by rows until the busiest GPU (or node) has least to do.

What a GPU has to do is its lookups of a sample plus, for every shard, what sending its pooled row costs in lookups. The
shard with most lookups is cut in two, again and again; after each cut all shards are placed, the busiest first, each on
the GPU with least so far that has none of that table; the best of all rounds is kept. With more than one node the same
is done for nodes, and a node's tables are split by rows over all of its GPUs. Source: sharding/planner.py and
generate_plan.py of NVIDIA's MLPerf Training submissions (plans auto and hier_auto).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_plan import DATA, TABLE, TABLE_ROW, ShardingPlan, ShardingProblem, TablePlacement
from presage.errors import PresageError

ROUNDS = 20
BYTES = 8  # of a weight with Adagrad's state
WORK = 4.0  # bytes through memory for each byte sent: mem_comm_work_ratio
CAPACITY = 60e9  # bytes of a GPU for tables: memory_cap_for_embedding
GIGA = 1e9


def hugectr_plan(problem: ShardingProblem, replicate: float) -> ShardingPlan:
    """The planner's plan; tables below `replicate` GB, with their optimizer state, are on all ranks."""
    node = min(problem.platform.domain, problem.ranks)
    nodes = problem.ranks // node
    buckets, each = (nodes, node) if nodes > 1 else (problem.ranks, 1)
    sizes = np.array([float(t.rows * t.dim * BYTES) for t in problem.tables])
    held = {t for t, n in enumerate(sizes) if n < replicate * GIGA}
    capacity = (min(CAPACITY, problem.limit)) * each - sum(sizes[t] for t in held)
    spread = [t for t in range(len(sizes)) if t not in held]
    lookups = np.array([problem.tables[t].pooling for t in spread])
    groups = place_row_shards(lookups, sizes[spread], buckets, _shard_cost(problem, nodes), capacity)
    return ShardingPlan(problem.ranks, tuple(_placements(problem, spread, groups, each, held)))


def _shard_cost(problem: ShardingProblem, nodes: int) -> float:
    """Lookups that sending a shard's pooled row is worth: bandwidths of memory and link, and bytes of both."""
    links = problem.platform.links
    link = links[-1] if nodes > 1 else links[0]
    return float(problem.platform.gpu.memory_bandwidth / link.bandwidth / WORK)


def _placements(
    problem: ShardingProblem, spread: Sequence[int], groups: Sequence[Sequence[int]], each: int, held: set[int]
) -> list[TablePlacement]:
    out = [TablePlacement(DATA)] * len(problem.tables)
    for place, t in enumerate(spread):
        ranks = tuple(g * each + r for g in groups[place] for r in range(each))
        out[t] = TablePlacement(TABLE if len(ranks) == 1 else TABLE_ROW, ranks)
    assert all(t in held or out[t].sharding != DATA for t in range(len(out)))
    return out


def place_row_shards(
    lookups: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], buckets: int, shard: float, capacity: float
) -> list[list[int]]:
    """Buckets of each table's row shards, by the best of the planner's rounds."""
    cuts = np.ones(len(lookups), int)
    everywhere = [list(range(buckets)) for _ in lookups]
    best, least = everywhere, float((lookups / buckets).sum() + shard * len(lookups))
    if sizes.sum() / buckets > capacity:
        raise PresageError("the tables do not fit: no rank has memory left even with every table split over all ranks")
    for _ in range(ROUNDS):
        groups, cost, full = _placed(lookups, sizes, cuts, buckets, shard, capacity)
        if full is None:
            if cost < least:
                best, least = groups, cost
            hot = [t for t in np.argsort(-(lookups / cuts), kind="stable").tolist() if 2 * cuts[t] <= buckets]
            if not hot:
                break
            cuts[hot[0]] *= 2
        elif 2 * cuts[full] <= buckets:
            cuts[full] *= 2
        else:
            break
    return best


def _placed(
    lookups: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], cuts: npt.NDArray[np.int_], buckets: int,
    shard: float, capacity: float,
) -> tuple[list[list[int]], float, int | None]:  # fmt: skip
    """Shards placed greedily; the table that found no room, if one did not."""
    load, used = np.zeros(buckets), np.zeros(buckets)
    groups: list[list[int]] = [[] for _ in lookups]
    order = sorted(((lookups[t] / cuts[t], t) for t in range(len(cuts)) for _ in range(cuts[t])), reverse=True)
    for hot, t in order:
        free = [b for b in np.argsort(load, kind="stable").tolist() if b not in groups[t]]
        room = [b for b in free if used[b] + sizes[t] / cuts[t] <= capacity]
        if not room:
            return groups, np.inf, t
        groups[t].append(room[0])
        load[room[0]] += hot + shard
        used[room[0]] += sizes[t] / cuts[t]
    return [sorted(g) for g in groups], float(load.max()), None
