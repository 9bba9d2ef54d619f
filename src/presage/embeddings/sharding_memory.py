"""What each table puts on each rank: the memory of its parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.sharding_plan import COLUMN, TABLE, ShardingPlan
from presage.embeddings.sharding_prices import ShardCosts
from presage.embeddings.sharding_problem import ShardingProblem

__all__ = ["memory_by_rank"]


def memory_by_rank(problem: ShardingProblem, plan: ShardingPlan) -> npt.NDArray[Any]:
    """[table, rank]: bytes; nan where a rank has nothing of a table. What ranks receive from others is not in it."""
    prices = ShardCosts(problem)
    out = np.full((len(plan.tables), plan.ranks), np.nan)
    for t, placed in enumerate(plan.tables):
        if placed.sharding in (TABLE, COLUMN):
            one = prices.part(t, len(placed.ranks)).memory
            for rank in placed.ranks:
                out[t, rank] = np.nan_to_num(out[t, rank]) + one
        else:
            out[t] = prices.everywhere(t, placed.sharding).memory
    return out
