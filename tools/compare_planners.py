"""TorchRec's planner beside presage's, on the tasks of tables that were measured on an H200.

    python tools/compare_planners.py ../shared/h200/tbe_sharding.json [--json OUT.json]

Needs torchrec and fbgemm-gpu-cpu (the extra `torchrec`). TorchRec's own EmbeddingShardingPlanner runs as it is, told
the H200's memory, bandwidth and NVLink, each table's pooling factor and the batch. What is compared:

    pick       of the ten placements that were measured, the one its estimator finds fastest: how far it is from best
    plan       the plan it makes with whole tables: the busiest rank's lookups and updates, by either one's model
    measured   the ranks of a plan whose very set of tables was timed, with that time
    free       the plan it makes with all shardings, by presage's model of the embedding part of the step
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from presage.embeddings import Reuse, Table
from presage.embeddings.sharding_cost import ShardCosts, ShardingCost, sharding_cost
from presage.embeddings.sharding_plan import COLUMN, DATA, ROW, TABLE, ShardingPlan, ShardingProblem, TablePlacement
from presage.embeddings.sharding_search import search
from presage.files import write_whole
from presage.hardware import platform

PLACE = "dgx-h200"
DTYPES = {"fp32": "float32", "fp16": "float16"}
FREE = (TABLE, COLUMN, ROW, DATA)
NVLINK = 450e9  # bytes/s of an H200 in one direction
MS = 1e3  # TorchRec counts milliseconds


@dataclass(frozen=True)
class PlannerTask:
    """What both planners made of one task; seconds of the busiest rank unless said otherwise."""

    task: int
    tables: int
    ranks: int
    best: float  # measured, of the ten placements
    picks: dict[str, float]  # measured time of the placement that an estimator picks, over the best
    by_presage: dict[str, float]  # of each planner's plan of whole tables, by presage's model
    by_torchrec: dict[str, float]  # and by TorchRec's estimator
    timed: dict[str, list[tuple[float, float]]]  # of each plan's ranks that were timed: predicted by presage, measured
    free: dict[str, float]  # the embedding part of the step, of plans with all shardings, by presage's model
    seconds: dict[str, float]  # that each took to plan whole tables


def compare(task: Mapping[str, Any]) -> PlannerTask:
    """Both planners on one task."""
    problem = _problem(task)
    prices = ShardCosts(problem)
    costs = estimated(problem)
    began = time.perf_counter()
    theirs = planned(problem, (TABLE,))
    middle = time.perf_counter()
    ours = search(problem, prices=prices, seconds=60, whole=True).plan
    took = {"torchrec": middle - began, "presage": time.perf_counter() - middle}
    plans = {"torchrec": theirs, "presage": ours}
    free = {"torchrec": planned(problem, FREE), "presage": search(problem, prices=prices, seconds=60).plan}
    measured = {p["name"]: p["max_total_ms"] / MS for p in task["placements"]}
    best = min(measured.values())
    whole = {p["name"]: ShardingPlan.table_wise(problem.ranks, p["assign"]) for p in task["placements"]}
    picks = {
        "torchrec": min(whole, key=lambda n: _summed(whole[n], costs)),
        "presage": min(whole, key=lambda n: _busiest(sharding_cost(whole[n], prices))),
    }
    return PlannerTask(
        task["task"], len(problem.tables), problem.ranks, best,
        {who: measured[name] / best - 1 for who, name in picks.items()},
        {who: _busiest(sharding_cost(plan, prices)) for who, plan in plans.items()},
        {who: _summed(plan, costs) for who, plan in plans.items()},
        {who: _timed(plan, task, prices) for who, plan in plans.items()},
        {who: sharding_cost(plan, prices).seconds for who, plan in free.items()},
        took,
    )  # fmt: skip


def _problem(task: Mapping[str, Any]) -> ShardingProblem:
    tables = tuple(
        Table(
            f"t{i}", t["E"], t["D"], t["L"],
            Reuse(t["alpha"], tuple(t["hist"]), t["lookups"], t["distinct"], t["top"]), DTYPES[task["dtype"]],
        )
        for i, t in enumerate(task["tables"])
    )  # fmt: skip
    return ShardingProblem(tables, task["B"], task["N"], platform(PLACE), 0.0, task["opt"], task["lengths"])


def _busiest(found: ShardingCost) -> float:
    return float((found.load.forward + found.load.backward).max())


def _ranks(plan: ShardingPlan) -> list[int]:
    return [p.ranks[0] for p in plan.tables]


def _summed(plan: ShardingPlan, costs: Sequence[float]) -> float:
    """The busiest rank by costs of tables that add up."""
    return float(np.bincount(_ranks(plan), costs, plan.ranks).max())


def _timed(plan: ShardingPlan, task: Mapping[str, Any], prices: ShardCosts) -> list[tuple[float, float]]:
    """Ranks of a plan whose set of tables was measured: predicted and measured seconds."""
    known: dict[frozenset[int], float] = {}
    for p in task["placements"]:
        for rank in range(task["N"]):
            held = frozenset(t for t, r in enumerate(p["assign"]) if r == rank)
            known[held] = (p["fwd_ms"][rank] + p["bwd_ms"][rank]) / MS
    load = sharding_cost(plan, prices).load
    out = []
    for rank in range(plan.ranks):
        held = frozenset(t for t, r in enumerate(_ranks(plan)) if r == rank)
        if held in known and held:
            out.append((float(load.forward[rank] + load.backward[rank]), known[held]))
    return out


# ---- TorchRec


def _torchrec(problem: ShardingProblem, kinds: Sequence[str]) -> tuple[Any, Any, Any]:
    """Its topology, constraints and module of a problem."""
    import torch
    from torchrec.distributed.planner import ParameterConstraints, Topology
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    chip = problem.platform.gpu
    topology = Topology(
        world_size=problem.ranks, compute_device="cuda", local_world_size=problem.ranks, hbm_cap=int(chip.memory),
        hbm_mem_bw=chip.memory_bandwidth / MS, intra_host_bw=NVLINK / MS,
    )  # fmt: skip
    types = {"float32": DataType.FP32, "float16": DataType.FP16}
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[f"f_{t.name}"],
                data_type=types[t.dtype],
            )
            for t in problem.tables
        ],
    )  # fmt: skip
    limits = {
        t.name: ParameterConstraints(
            sharding_types=list(kinds), pooling_factors=[t.pooling], compute_kernels=["fused", "dense"]
        )
        for t in problem.tables
    }
    return topology, limits, module


def planned(problem: ShardingProblem, kinds: Sequence[str]) -> ShardingPlan:
    """The plan of TorchRec's planner, with its own estimator."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    topology, limits, module = _torchrec(problem, kinds)
    planner = EmbeddingShardingPlanner(
        topology, problem.batch // problem.ranks, constraints=limits, debug=False,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.2),
    )  # fmt: skip
    (by_name,) = planner.plan(module, [EmbeddingBagCollectionSharder()]).plan.values()
    placed = []
    for t in problem.tables:
        kind, ranks = by_name[t.name].sharding_type, tuple(by_name[t.name].ranks)
        placed.append(TablePlacement(kind, ranks if kind in (TABLE, COLUMN) else ()))
    return ShardingPlan(problem.ranks, tuple(placed))


def estimated(problem: ShardingProblem) -> list[float]:
    """TorchRec's seconds of each table whole on a rank, lookup and update."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    topology, limits, module = _torchrec(problem, (TABLE,))
    enumerator = EmbeddingEnumerator(topology, problem.batch // problem.ranks, limits)
    options = enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    found = {o.name: o.shards[0].perf for o in options if o.compute_kernel == "fused"}
    return [(found[t.name].fwd_compute + found[t.name].bwd_compute) / MS for t in problem.tables]


# ---- what is printed


def summary(rows: Sequence[PlannerTask]) -> list[str]:
    """The table of docs/sharding.md."""
    out = ["| on 12 measured tasks | TorchRec's planner | presage |".replace("12", str(len(rows))), "|---|---|---|"]

    def line(what: str, of: Any, form: str) -> None:
        out.append(f"| {what} | " + " | ".join(format(of(who), form) for who in ("torchrec", "presage")) + " |")

    line("picks the fastest of ten measured placements", lambda w: mean(r.picks[w] < 1e-9 for r in rows), ".0%")
    line("its pick is within 10% of the fastest", lambda w: mean(r.picks[w] <= 0.1 for r in rows), ".0%")
    line("its pick, over the fastest, on average", lambda w: mean(r.picks[w] for r in rows), ".1%")
    line("at worst", lambda w: max(r.picks[w] for r in rows), ".1%")
    both = [{w: r.by_presage[w] / min(r.by_presage.values()) - 1 for w in r.by_presage} for r in rows]
    own = [{w: r.by_torchrec[w] / min(r.by_torchrec.values()) - 1 for w in r.by_torchrec} for r in rows]
    line("its plan of whole tables, over the better one, by presage's model", lambda w: mean(b[w] for b in both), ".1%")
    line("the same by TorchRec's estimator", lambda w: mean(b[w] for b in own), ".1%")
    free = [{w: r.free[w] / min(r.free.values()) - 1 for w in r.free} for r in rows]
    line("its plan with all shardings, by presage's model of the step", lambda w: mean(b[w] for b in free), ".1%")
    line("ranks of its plans that were timed", lambda w: sum(len(r.timed[w]) for r in rows), "d")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    tasks = json.loads(given.tasks.read_text())["tasks"]
    rows = []
    for task in tasks:
        rows.append(compare(task))
        r = rows[-1]
        cells = (f"{w}: pick +{r.picks[w]:.1%}, plan {r.by_presage[w] * MS:.3f} ms" for w in ("torchrec", "presage"))
        print(f"task {r.task}: {'; '.join(cells)}", file=sys.stderr)
    print("\n".join(summary(rows)))
    took = ", ".join(f"{w} {mean(r.seconds[w] for r in rows):.1f} s" for w in ("torchrec", "presage"))
    timed = {w: [pair for r in rows for pair in r.timed[w]] for w in ("torchrec", "presage")}
    print(f"\nto plan whole tables on one core: {took}")
    for who, pairs in timed.items():
        for predicted, measured in pairs:
            print(f"{who}: predicted {predicted * MS:.3f} ms, measured {measured * MS:.3f} ms")
    if given.json is not None:
        value = [{k: getattr(r, k) for k in r.__dataclass_fields__} for r in rows]
        write_whole(given.json, json.dumps(value, indent=1).encode())


if __name__ == "__main__":
    main()
