"""Plans compared by the whole step: dense layers, exchange and pipeline included, not the embeddings alone.

Candidates are the plan that the search finds, those of the heuristics and of HugeCTR's planner, and the found plan with
single tables sharded in other ways: by rows over all ranks, by rows over a node, on all ranks. Each is run through the
engine; the costliest tables of the best plan so far are tried first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_ranks import DlrmRanks, dlrm_ranks, predict_dlrm
from presage.embeddings.sharding_cost import sharding_cost
from presage.embeddings.sharding_heuristics import HEURISTICS, heuristic_plan
from presage.embeddings.sharding_hugectr import hugectr_plan
from presage.embeddings.sharding_plan import DATA, ROW, TABLE_ROW, ShardingPlan, TablePlacement
from presage.errors import PresageError

Tell = Callable[[float, float], None]
TRIED = 6  # tables of the best plan that are sharded in other ways, in each round
ROUNDS, ENOUGH = 3, 0.995
LARGE = 1e9  # bytes of a table that is not tried on all ranks: its gradients would take longer than any step


@dataclass(frozen=True)
class StepPlan:
    """A plan, and the seconds of the whole step with it and of its embeddings by themselves."""

    name: str
    plan: ShardingPlan
    step: float
    embeddings: float


def step_plans(job: DlrmJob, *, seconds: float = 20.0, tell: Tell = lambda _done, _best: None) -> list[StepPlan]:
    """Plans that fit, the shortest step first."""
    team = dlrm_ranks(replace(job, plan="auto"), seconds=seconds)
    out = [_measured("found", team)]
    others = list(_named(team))
    for k, (name, plan) in enumerate(others):
        out += _tried(job, name, plan, team)
        tell(0.5 * (k + 1) / len(others), min(p.step for p in out))
    for k in range(ROUNDS):
        best = min(out, key=lambda p: p.step)
        before = "" if best.name == "found" or k == 0 else f"{best.name}, "
        for name, plan in _changed(best.plan, team):
            out += _tried(job, before + name, plan, team)
        tell(0.5 + 0.5 * (k + 1) / ROUNDS, min(p.step for p in out))
        if min(p.step for p in out) > ENOUGH * best.step:
            break
    return sorted(out, key=lambda p: p.step)


def _measured(name: str, team: DlrmRanks) -> StepPlan:
    return StepPlan(name, team.plan, predict_dlrm(team, draws=1).step.p50, team.cost.seconds)


def _tried(job: DlrmJob, name: str, plan: ShardingPlan, team: DlrmRanks) -> list[StepPlan]:
    if sharding_cost(plan, team.prices).over:
        return []
    return [_measured(name, dlrm_ranks(job, place=team.prices.problem.platform, given=plan))]


def _named(team: DlrmRanks) -> Iterator[tuple[str, ShardingPlan]]:
    for name in HEURISTICS:
        plan = heuristic_plan(name, team.prices)
        if plan is not None:
            yield name, plan
    try:
        yield "hugectr", hugectr_plan(team.prices.problem, team.job.system.replicate_GB)
    except PresageError:
        return


def _changed(plan: ShardingPlan, team: DlrmRanks) -> Iterator[tuple[str, ShardingPlan]]:
    """The plan with one of its costliest tables sharded in another way."""
    tables, near = team.job.tables, team.prices.group.per_domain
    order = np.argsort([-t.dim * t.pooling for t in tables], kind="stable").tolist()
    for t in order[:TRIED]:
        node = plan.tables[t].ranks[0] // near if plan.tables[t].ranks else 0
        ranks = tuple(r for r in range(node * near, (node + 1) * near) if r < plan.ranks)
        for placed in (TablePlacement(ROW), TablePlacement(TABLE_ROW, ranks), TablePlacement(DATA)):
            refused = {TABLE_ROW: len(ranks) < 2, DATA: tables[t].weight_bytes > LARGE}
            if placed.sharding != plan.tables[t].sharding and not refused.get(placed.sharding, False):
                changed = (*plan.tables[:t], placed, *plan.tables[t + 1 :])
                yield f"{tables[t].name} {placed.sharding}", replace(plan, tables=changed)
