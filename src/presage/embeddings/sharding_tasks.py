"""Random sharding tasks, as the research on sharding draws them, from a pool of made-up tables.

A task for n ranks has between 0.7 and 1.3 times 13 n tables, drawn from a pool without replacement; heavy ones only
from tables with 20 lookups a sample or more; widths of 32, 64, 128 or 256 columns are drawn once for the pool; a
task whose weights fill more than four fifths of the ranks' memory is drawn again. The public pools are 856 and 788
tables of recorded indices; ours has as many, with sizes, lookups and skews drawn so that they spread as far.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from presage.embeddings import Reuse, Table
from presage.errors import PresageError

__all__ = ["HEAVY", "draw_task", "table_pool"]

POOL, HEAVY = 856, 20.0
WIDTHS = (32, 64, 128, 256)
A_RANK, LEAST, MOST = 13, 0.7, 1.3
FULL = 0.8
TRIES = 100


@cache
def table_pool(size: int = POOL, seed: int = 0) -> tuple[Table, ...]:
    """Tables of 100 to 30 million rows and 1 to 200 lookups a sample, most of them few."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.uniform(np.log(100), np.log(30e6), size)).astype(int)
    pooling = np.clip(np.exp(rng.normal(np.log(8.0), 1.3, size)), 1.0, 200.0).round(2)
    alpha = rng.uniform(0.4, 1.3, size).round(3)
    dims = rng.choice(WIDTHS, size)
    columns = zip(rows.tolist(), dims.tolist(), pooling.tolist(), alpha.tolist(), strict=True)
    return tuple(Table(f"t{i}", e, d, p, Reuse(alpha=a)) for i, (e, d, p, a) in enumerate(columns))


def draw_task(
    ranks: int, memory: float, rng: np.random.Generator, *, heavy: bool = False, tables: int = 0
) -> tuple[Table, ...]:
    """Tables of one task for so many ranks with so many bytes each; `tables` where their number is given."""
    some = [t for t in table_pool(max(POOL, 2 * tables)) if not heavy or t.pooling >= HEAVY]
    for _ in range(TRIES):
        count = tables or int(rng.integers(int(A_RANK * ranks * LEAST), int(A_RANK * ranks * MOST)))
        drawn = rng.choice(len(some), min(count, len(some)), replace=False)
        if sum(some[i].weight_bytes for i in drawn) <= FULL * ranks * memory:
            return tuple(some[i] for i in drawn.tolist())
    raise PresageError(f"no draw of tables fits {ranks} ranks of {memory / 1024**3:.4g} GiB")
