"""How good and how fast the search for sharding plans is: `python bench/sharding.py [TBE_SHARDING.json]`.

Twenty random tasks (ten for 4 GPUs, ten for 8), the regret of every heuristic against the best plan found; 1,000 tables
on 128 ranks; and with measured placements (tbe_sharding.json) whether the search finds better ones.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from presage.costs.lookups.table import draw_task
from presage.embeddings import Reuse, Table
from presage.embeddings.sharding_cost import ShardCosts, ShardingCost, sharding_cost
from presage.embeddings.sharding_heuristics import HEURISTICS
from presage.embeddings.sharding_plan import ShardingPlan, ShardingProblem
from presage.embeddings.sharding_search import search
from presage.hardware import platform

DTYPES = {"fp32": "float32", "fp16": "float16"}


def tasks() -> None:
    regret: dict[str, list[float]] = {name: [] for name in HEURISTICS}
    gaps, took, whole = [], [], []
    for k in range(20):
        ranks, heavy = (4, 8)[k >= 10], k % 10 < 5
        place = platform("dgx-h200")
        tables = draw_task(ranks, float(place.gpu.memory), np.random.default_rng(k), heavy=heavy)
        problem = ShardingProblem(tables, 4096 * ranks, ranks, place)
        prices = ShardCosts(problem)
        found = search(problem, prices=prices, seconds=60)
        plain = search(problem, prices=prices, seconds=60, whole=True)
        whole.append(plain.cost.seconds / found.cost.seconds - 1)
        gaps.append(plain.gap)
        took.append(found.seconds)
        for a in found.alternatives:
            if a.cost is not None:
                regret[a.name].append(a.cost.seconds / min(found.cost.seconds, plain.cost.seconds) - 1)
    print("20 random tasks, predicted step of the embeddings: worse than the best found by")
    for name, values in regret.items():
        print(f"  {name:20s} mean {np.mean(values):6.1%}  worst {np.max(values):6.1%}")
    print(f"  {'found, whole tables':20s} mean {np.mean(whole):6.1%}  worst {np.max(whole):6.1%}")
    print(f"  whole tables: above the lower bound by {np.mean(gaps):.1%} on average, {np.max(gaps):.1%} at most")
    print(f"  {np.mean(took):.1f} s a search")


def large() -> None:
    place = platform("dgx-h200")
    tables = draw_task(128, float(place.gpu.memory), np.random.default_rng(0), tables=1000)
    start = time.perf_counter()
    found = search(ShardingProblem(tables, 1024 * 128, 128, place), seconds=120)
    spent = time.perf_counter() - start
    print(f"1,000 tables on 128 ranks: {spent:.1f} s, {found.cost.seconds * 1e3:.2f} ms, gap {found.gap:.1%}")
    print(f"  {found.plan.counts()}; ended by itself: {found.complete}")
    for a in found.alternatives:
        if a.cost is not None:
            print(f"  {a.name:20s} {a.cost.seconds / found.cost.seconds - 1:6.1%}")


def measured(path: Path) -> None:
    print("measured tasks: predicted max over ranks of forward + backward, us")
    better = step_better = 0
    rows = json.loads(path.read_text())["tasks"]
    for task in rows:
        problem = _problem(task)
        prices = ShardCosts(problem)
        plans = {p["name"]: ShardingPlan.table_wise(problem.ranks, p["assign"]) for p in task["placements"]}
        costs = {name: sharding_cost(plan, prices) for name, plan in plans.items()}
        found = search(problem, prices=prices, seconds=60, whole=True)
        best = min(costs, key=lambda n: _busiest(costs[n]))
        real = min(task["placements"], key=lambda p: p["max_total_ms"])
        least = min(c.seconds for c in costs.values())
        step_better += found.cost.seconds < least
        better += _busiest(found.cost) < _busiest(costs[best])
        mine, theirs = (_busiest(c) * 1e6 for c in (found.cost, costs[best]))
        print(
            f"  task {task['task']:2d}: found {mine:8.1f}  best of ten {theirs:8.1f} ({best}; measured "
            f"{real['max_total_ms'] * 1e3:8.1f}, {real['name']})  step {found.cost.seconds / least - 1:+.1%}  "
            f"gap {found.gap:.1%}"
        )
    print(f"  better than all ten: {better} of {len(rows)} by lookups and updates, {step_better} by the whole step")


def _busiest(found: ShardingCost) -> float:
    return float((found.load.forward + found.load.backward).max())


def _problem(task: dict[str, Any]) -> ShardingProblem:
    tables = tuple(
        Table(
            str(i), t["E"], t["D"], t["L"],
            Reuse(t["alpha"], tuple(t["hist"]), t["lookups"], t["distinct"], t["top"]), DTYPES[task["dtype"]],
        )
        for i, t in enumerate(task["tables"])
    )  # fmt: skip
    return ShardingProblem(tables, task["B"], task["N"], platform("dgx-h200"), 0.0, task["opt"], task["lengths"])


if __name__ == "__main__":
    tasks()
    large()
    if len(sys.argv) > 1:
        measured(Path(sys.argv[1]))
