"""Tables of sharding plans."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table as RichTable

from presage.embeddings.sharding_cost import ShardingCost
from presage.embeddings.sharding_search import ShardingResult
from presage.report.plain import plain_table
from presage.text import percent, seconds, size

__all__ = ["alternative_table", "headline", "load_table", "phase_table"]

SHOWN = 16


def headline(found: ShardingResult, tables: int, batch: int, platform: str) -> str:
    ways = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in found.plan.counts().items())
    least = percent(1 - found.bound / found.cost.seconds)
    cut = "" if found.complete else " (the time to search ran out)"
    return (
        f"{tables} tables on {found.plan.ranks} ranks of {platform}, batch {batch}: {ways}\n"
        f"{seconds(found.cost.seconds)} a step for embeddings{cut}; no other placing of the same parts saves more "
        f"than {least}"
    )


def phase_table(cost: ShardingCost) -> RichTable:
    table = plain_table("Phases", "phase", "time", "share")
    for name, took in cost.phases.items():
        table.add_row(name, seconds(took), percent(took / cost.seconds))
    table.add_row("total", seconds(cost.seconds), percent(1.0), style="bold")
    return table


def load_table(cost: ShardingCost) -> RichTable:
    """By rank; of many the busiest ones, then the mean."""
    load = cost.load
    table = plain_table("Ranks", "rank", "forward", "backward", "indices in", "pooled out", "memory")
    busy = load.forward + load.backward
    order = range(len(busy)) if len(busy) <= SHOWN else np.argsort(-busy, kind="stable")[:SHOWN].tolist()
    columns = (load.forward, load.backward, load.indices, load.output, load.memory)
    for r in order:
        table.add_row(str(r), *_cells([c[r] for c in columns]))
    if len(busy) > SHOWN:
        table.add_row(f"(the busiest {SHOWN} of {len(busy)})")
    table.add_row("mean", *_cells([c.mean() for c in columns]), style="bold")
    return table


def _cells(values: list[Any]) -> list[str]:
    return [seconds(float(v)) for v in values[:2]] + [size(float(v)) for v in values[2:]]


def alternative_table(found: ShardingResult) -> RichTable:
    table = plain_table("Alternatives", "plan", "step", "worse by", "slowest lookup", "slowest update", "fullest rank")
    table.add_row("found", *_row(found.cost, found.cost.seconds), style="bold")
    for a in sorted(found.alternatives, key=lambda a: a.cost.seconds if a.cost else np.inf):
        if a.cost is None:
            table.add_row(a.name, "no rank has room")
        else:
            table.add_row(a.name, *_row(a.cost, found.cost.seconds))
    return table


def _row(cost: ShardingCost, best: float) -> list[str]:
    over = f" ({size(cost.over)} too much)" if cost.over else ""
    slow = [seconds(cost.phases[k]) for k in ("lookup", "update")]
    worse = percent(cost.seconds / best - 1) if cost.seconds != best else "-"
    return [seconds(cost.seconds), worse, *slow, size(float(cost.load.memory.max())) + over]
