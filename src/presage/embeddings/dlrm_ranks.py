"""A recommendation job on its ranks: the plan, each rank's own lookups, and the step of all through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.costs.kernel_model import OpTime
from presage.embeddings import EmbeddingModel
from presage.embeddings.dlrm_fused import FusedStep
from presage.embeddings.dlrm_graph import SPARSE, EmbeddingCounts, dlrm_graph
from presage.embeddings.dlrm_job import INDICES, WIRES, DlrmJob
from presage.embeddings.sharding_cost import ShardCosts, ShardingCost, SharedTableCosts, sharding_cost, shards_of
from presage.embeddings.sharding_heuristics import HEURISTICS, heuristic_plan
from presage.embeddings.sharding_hugectr import hugectr_plan
from presage.embeddings.sharding_plan import DATA, KINDS, PLACED, ROW, TABLE_ROW, ShardingPlan, ShardingProblem
from presage.embeddings.sharding_search import search
from presage.embeddings.table_files import read_plan
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.hardware import Platform
from presage.hardware import platform as _platform
from presage.memory.step_memory import memory_profile
from presage.parallel.ddp import ddp
from presage.parallel.rank_layout import FoldedRank, RankLayout, fold_ranks
from presage.parallel.strategy import strategy
from presage.prediction.machine import Machine, kernel_times, machine
from presage.prediction.overlap_contention import apply_contention, overlap_slowdown
from presage.prediction.rank_program import Member, rank_program
from presage.prediction.rank_results import collective_times, groups_of
from presage.prediction.rank_set import SIMULATED, RankOverride, RankSet, predict_rank_set
from presage.prediction.step import DRAWS, STEPS, StepProgram, StepResult, step_program, with_model_error
from presage.prediction.step_program import STREAM

NAME = "sharded embeddings + ddp"
Tell = Callable[[float, float], None]
GRAPHED = 1e-3  # of the usual host time per op, inside a CUDA graph


@dataclass(frozen=True, eq=False)
class DlrmRanks:
    """Ranks of a job for the engine, its sharding plan and the plan's cost."""

    job: DlrmJob
    prices: ShardCosts
    plan: ShardingPlan
    cost: ShardingCost
    team: RankSet
    where: Machine
    pace: float = 1.0  # of the hosts


def dlrm_ranks(
    job: DlrmJob,
    *,
    place: Platform | None = None,
    model: EmbeddingModel | None = None,
    seconds: float = 20.0,
    tell: Tell = lambda _done, _best: None,
    pace: float = 1.0,
    given: ShardingPlan | None = None,
    train: bool = True,
) -> DlrmRanks:
    """The ranks of a job; `place` where the platform is not one that ships, `given` where the plan is known.

    `pace`: how many times as long as usual the hosts take. `train`: whether a step is more than its forward pass.
    """
    where = place or _platform(job.platform)
    prices = ShardCosts(_problem(job, where), model)
    plan = given or _plan(job, prices, seconds, tell)
    cost = sharding_cost(plan, prices)
    if cost.over:
        fullest = int(cost.load.memory.argmax())
        raise PresageError(
            f"the plan {job.plan} needs {cost.over / 1024**3:.4g} GiB more than a rank has for tables: rank {fullest} "
            "is the fullest; move or cut a table there, or keep rows in the host's memory (cache_load_factor)"
        )
    host, pace = machine(where.gpu.key), pace * (GRAPHED if job.system.cuda_graph else 1.0)
    return DlrmRanks(job, prices, plan, cost, _ranks(job, prices, plan, cost, host, pace, train), host, pace)


def evaluation_seconds(ranks: DlrmRanks) -> float:
    """Seconds of evaluation that a training step bears its share of; 0 where the job has none."""
    e = ranks.job.evaluation
    if e is None:
        return 0.0
    job = replace(ranks.job, batch=max(e.batch, ranks.job.ranks))
    prices = ShardCosts(_problem(job, ranks.prices.problem.platform), ranks.prices.model)
    cost = sharding_cost(ranks.plan, prices)
    team = _ranks(job, prices, ranks.plan, cost, ranks.where, ranks.pace, train=False)
    forward = predict_rank_set(team, ranks.where, draws=1, steps=STEPS).step.p50
    return -(-e.samples // e.batch) * forward * ranks.job.batch / e.every


def _problem(job: DlrmJob, where: Platform) -> ShardingProblem:
    return ShardingProblem(
        job.tables, job.batch, job.ranks, where, job.memory, job.embedding_optimizer, job.lengths, INDICES[job.index],
        WIRES[job.wire], job.system.exchange == "two_tier", job.system.cache_load_factor, job.system.prefetch,
    )  # fmt: skip


def _plan(job: DlrmJob, prices: ShardCosts, seconds: float, tell: Tell) -> ShardingPlan:
    if job.plan == "auto":
        return search(prices.problem, seconds=seconds, tell=tell, prices=prices).plan
    if job.plan == "hugectr":
        return hugectr_plan(prices.problem, job.system.replicate_GB)
    if job.plan in HEURISTICS:
        heuristic = heuristic_plan(job.plan, prices)
        if heuristic is None:
            raise PresageError(f"{job.plan} finds no rank with memory left for a table; try plan = 'auto'")
        return heuristic
    if not job.plan.endswith(".json"):
        raise PresageError(
            f"unknown plan {job.plan!r}: choose from auto, hugectr, {', '.join(HEURISTICS)}, or a .json file"
        )
    plan = read_plan(job.plan, job.tables)
    if plan.ranks != job.ranks:
        raise PresageError(f"{job.plan} is a plan for {plan.ranks} ranks, and the job has {job.ranks}")
    return plan


def _ranks(
    job: DlrmJob, prices: ShardCosts, plan: ShardingPlan, cost: ShardingCost, where: Machine, pace: float,
    train: bool = True,
) -> RankSet:  # fmt: skip
    _, ranks, common = shards_of(plan, prices)
    sparse = _embedding_counts(job, plan, prices)
    graph = _graph(job, sparse, train)
    layout = RankLayout((("dp", job.ranks),))
    groups = groups_of(layout, prices.problem.platform)
    common_times = _common_times(prices, cost, common, _batch_bytes(job))
    times = collective_times(graph, kernel_times(graph, where), prices.problem.platform, groups)
    times = [_op_seconds(graph, i, t, common_times) for i, t in enumerate(times)]
    step = step_program(graph, times, where.host)
    own = np.stack([cost.load.forward - common.forward, cost.load.backward - common.backward], axis=1)
    folds = (
        fold_ranks(layout, [tuple(row) for row in own.round(9).tolist()]) if job.ranks > 1 else [FoldedRank(0, 1, {})]
    )
    members = [Member(f, _rank_step(step, graph, own[f.rank])).paced(1.0, pace) for f in folds]
    slow = overlap_slowdown(graph, times, prices.problem.platform, groups)
    held = np.bincount(ranks, minlength=job.ranks)
    overrides = tuple(RankOverride(arguments=(("tables", str(held[f.rank])),)) for f in folds)
    many = apply_contention(rank_program(members, SIMULATED), [slow] * len(members))
    named = replace(strategy("ddp"), name=NAME)
    return RankSet(prices.problem.platform, named, layout, overrides, (step,), (tuple(times),), many)


def _graph(job: DlrmJob, sparse: EmbeddingCounts, train: bool) -> Graph:
    """One rank's step in the way of the job's framework."""
    if job.system.fused_dense:
        return FusedStep(job, sparse).graph(train=train)
    step = dlrm_graph(job, sparse, train=train)
    return ddp(step, job.ranks) if train else step


def _embedding_counts(job: DlrmJob, plan: ShardingPlan, prices: ShardCosts) -> EmbeddingCounts:
    """Columns, bags and lookups that a rank's samples send and receive."""
    width, bags, lookups = dict.fromkeys(KINDS, 0), 0.0, 0.0
    for table, placed in zip(job.tables, plan.tables, strict=True):
        width[placed.sharding] += table.dim
        if placed.sharding != DATA:  # to each part of the columns all of it, to each part of the rows its lookups
            by_rows = placed.sharding in (ROW, TABLE_ROW)
            bags += job.ranks if placed.sharding == ROW else len(placed.ranks)
            lookups += table.pooling * (1 if by_rows else len(placed.ranks))
    samples = job.batch / job.ranks
    weights = sum(t.rows * t.dim for t, p in zip(job.tables, plan.tables, strict=True) if p.sharding == DATA)
    columns = sum(width[k] for k in PLACED), width[ROW], width[DATA]
    received, summed = _received(job, plan, prices)
    return EmbeddingCounts(
        *columns, round(bags * samples), round(lookups * samples), weights, received, round(summed * samples)
    )


def _received(job: DlrmJob, plan: ShardingPlan, prices: ShardCosts) -> tuple[int, float]:
    """Columns of pooled rows that a sample gets, and those that its rank sums for its node first."""
    near = prices.group.per_domain
    tiers = prices.problem.two_tier and near < job.ranks
    received, summed = 0, 0.0
    for table, placed in zip(job.tables, plan.tables, strict=True):
        nodes = len({r // near for r in placed.ranks})
        if placed.sharding == TABLE_ROW:
            received += table.dim * (nodes if tiers else len(placed.ranks))
            summed += table.dim * len(placed.ranks) if tiers else 0.0
        elif placed.sharding in PLACED or placed.sharding == ROW:
            received += table.dim
    return received, summed


def _batch_bytes(job: DlrmJob) -> float:
    """A rank's samples as they come from its host."""
    each = sum(t.pooling + 1 for t in job.tables) * INDICES[job.index] + (job.dense + 1) * 4
    return each * job.batch / job.ranks


def _common_times(prices: ShardCosts, cost: ShardingCost, common: SharedTableCosts, copied: float) -> dict[str, float]:
    """Seconds of the embedding ops, those of the mean rank where ranks differ."""
    load = cost.load
    scatter, gather, reduce = prices.between(common)
    exchange = prices.pooled(load)
    return {
        "copy": copied / prices.problem.platform.gpu.pcie,
        "cache": load.fetch,
        "sizes": prices.announce(),
        "lengths": prices.announce(),
        "indices": float(prices.exchange(load.indices.max())),
        "placed.forward": float(load.forward.mean() - common.forward),
        "placed.backward": float(load.backward.mean() - common.backward),
        "rows.forward": common.by_rows[0],
        "rows.backward": common.by_rows[1],
        "replicas.forward": common.replicated[0],
        "replicas.backward": common.replicated[1],
        "output": exchange,
        "gradient": exchange,
        "scatter": scatter,
        "gather": gather,
        "replicas": reduce,
        "replicas.update": common.dense,
    }


def _op_seconds(graph: Graph, place: int, time: OpTime, known: dict[str, float]) -> OpTime:
    """The planned time of an embedding op, in place of the kernel model's."""
    which = graph.ops[place].module
    if not which.startswith(SPARSE):
        return time
    kind = "copy and cast" if which.endswith("copy") else time.family
    return OpTime(known[which.removeprefix(SPARSE)], 1, kind, "model")


def _rank_step(step: StepProgram, graph: Graph, own: NDArray[np.float64]) -> StepProgram:
    """The step with a rank's own lookups."""
    tasks, seconds = step.tasks, step.tasks.seconds.copy()
    gap = step.host.calls.kernel_gap_us * 1e-6
    for i, op in enumerate(graph.ops):
        for which, lookup_seconds in (("placed.forward", own[0]), ("placed.backward", own[1])):
            if op.module == SPARSE + which:
                seconds[(tasks.op == i) & (tasks.lane >= STREAM)] = lookup_seconds + gap
    return replace(step, tasks=replace(tasks, seconds=seconds))


def predict_dlrm(ranks: DlrmRanks, *, draws: int = DRAWS, steps: int = STEPS, seed: int = 0) -> StepResult:
    """How long the job's step takes; memory of each rank with its tables."""
    result = predict_rank_set(ranks.team, ranks.where, draws=draws, steps=steps, seed=seed)
    peak = memory_profile(ranks.team.steps[0].graph, chip=ranks.prices.problem.platform.gpu).peak_allocated
    memory = (ranks.cost.load.memory - ranks.prices.received + peak).astype(int)
    many = result.many
    if many is not None:
        kinds = (replace(k, peak_memory=int(memory[k.rank]), host=k.host * ranks.pace) for k in many.kinds)
        many = replace(many, kinds=tuple(kinds))
    host, inside = result.host * ranks.pace, ranks.prices.problem.platform.links[0]
    kind = "recommendation_pcie" if inside.fabric == "pcie" and ranks.job.ranks > 1 else "recommendation"
    return with_model_error(replace(result, many=many, peak_memory=int(memory.max()), host=host), kind)
