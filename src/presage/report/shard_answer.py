"""The answers of `presage shard`, `dlrm` and `indices`: embedding tables, which rank holds them, and their step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from presage.embeddings.dlrm_ranks import DlrmRanks, evaluation_seconds
from presage.embeddings.dlrm_system import SOURCES
from presage.embeddings.indices import TableCounts
from presage.embeddings.sharding_cost import ShardingCost, memory_by_rank
from presage.embeddings.sharding_plan import ShardingProblem
from presage.embeddings.sharding_search import ShardingResult
from presage.embeddings.table_files import plan_json
from presage.prediction.step import StepResult
from presage.report.answer import Answer, DataTable, Fact, Section, data_table, share_table
from presage.report.html.charts.bars import GIB, parts_figure, stacks_figure, time_unit
from presage.report.html.charts.heat import grid_figure
from presage.report.predict_answer import families_section, predict_answer, step_table
from presage.report.terms import signed
from presage.text import percent, seconds, size

RANKS_LISTED = 16
TABLES_DRAWN, RANKS_DRAWN = 60, 256
PHASES = {
    "input": "index all-to-all", "lookup": "lookups", "output": "output all-to-all", "gradient": "gradient all-to-all",
    "update": "updates", "replicas": "replicated tables",
}  # fmt: skip
NEAR = 0.02
MS = 1e3


def shard_answer(problem: ShardingProblem, found: ShardingResult) -> Answer:
    """Everything `presage shard` shows."""
    tables, ranks = len(problem.tables), found.plan.ranks
    return Answer(
        title=f"{tables} tables on {ranks} ranks",
        question="Which rank should hold which table?",
        subject=f"{tables} tables on {ranks} ranks of {problem.platform.name}, batch {problem.batch}: {_ways(found)}",
        headline=headline(problem, found),
        facts=facts(problem, found),
        sections=(
            _phases_section(found.cost), _load_section(found.cost), _memory_section(problem, found.cost),
            _where_section(problem, found), _alternatives_section(found),
        ),
        notes=() if found.complete else ("the search ran out of time: --seconds gives it more",),
        to_data=partial(shard_data, problem, found),
    )  # fmt: skip


def shard_data(problem: ShardingProblem, found: ShardingResult) -> dict[str, Any]:
    """The JSON."""
    names = ("forward_ms", "backward_ms", "indices_bytes", "output_bytes", "memory_bytes")
    loads = zip(*(x.tolist() for x in _loads(found.cost)), strict=True)
    best = found.cost.seconds
    return {
        "kind": "shard",
        "platform": problem.platform.key,
        "ranks": problem.ranks,
        "batch": problem.batch,
        "step_ms": best * MS,
        "phases_ms": {k: v * MS for k, v in found.cost.phases.items()},
        "bound_ms": found.bound * MS,
        "gap": found.gap,
        "complete": found.complete,
        "memory_limit_bytes": problem.limit,
        "load": [{n: v * (MS if n.endswith("_ms") else 1) for n, v in zip(names, row, strict=True)} for row in loads],
        "alternatives": [
            {
                "name": a.name,
                "step_ms": a.cost.seconds * MS if a.cost else None,
                "worse": a.cost.seconds / best - 1 if a.cost else None,
                "fits": a.cost is not None and not a.cost.over,
            }
            for a in found.alternatives
        ],
        "plan": plan_json(found.plan, problem.tables),
    }


def headline(problem: ShardingProblem, found: ShardingResult) -> str:
    name, other = _best_heuristic(found)
    than = f", {percent(1 - found.cost.seconds / other)} less than the best heuristic ({name})" if name else ""
    left = found.gap / (1 + found.gap)
    near = (
        "near-optimal for these parts" if left < NEAR else f"within {percent(left)} of the lower bound for these parts"
    )
    room = problem.limit - float(found.cost.load.memory.max())
    fits = f"{size(room)} free on the fullest GPU" if room >= 0 else f"{size(-room)} too much on the fullest GPU"
    return f"{seconds(found.cost.seconds)}/step for embeddings on {problem.ranks:,} GPUs{than}: {near}, {fits}."


def _best_heuristic(found: ShardingResult) -> tuple[str, float]:
    fit = [(a.cost.seconds, a.name) for a in found.alternatives if a.cost is not None and not a.cost.over]
    best, name = min(fit, default=(0.0, ""))
    return name, best


def facts(problem: ShardingProblem, found: ShardingResult) -> tuple[Fact, ...]:
    c, load = found.cost, found.cost.load
    busy = load.forward + load.backward
    uneven = float(busy.max() / busy.mean()) - 1 if busy.mean() else 0.0
    name, other = _best_heuristic(found)
    return (
        Fact("Embeddings per step", seconds(c.seconds), f"lower bound {seconds(found.bound)}"),
        Fact("Busiest GPU", signed(uneven), "over the mean GPU", "warn" if uneven > 0.1 else "good"),
        Fact("Fullest GPU", size(float(load.memory.max())), f"of {size(problem.limit)}", "bad" if c.over else "good"),
        Fact("Tables", f"{len(problem.tables):,}", _ways(found)),
        *([Fact("Best heuristic", seconds(other), name)] if name else []),
    )


def _ways(found: ShardingResult) -> str:
    return ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in found.plan.counts().items())


# ---- sections


def _phases_section(cost: ShardingCost) -> Section:
    parts = [(PHASES.get(k, k), t) for k, t in cost.phases.items()]
    name, most = max(parts, key=lambda p: p[1])
    text = f"Each phase lasts as long as its slowest rank. Most goes to {name}, {percent(most / cost.seconds)}."
    return Section("Where the time goes", (phase_table(cost),), partial(parts_figure, parts, cost.seconds), text)


def phase_table(cost: ShardingCost) -> DataTable:
    total = ("total", cost.seconds)
    return share_table("Phases", ("phase", "time", "share"), cost.phases.items(), total, seconds, wrap=True)


def _load_section(cost: ShardingCost) -> Section:
    load = cost.load
    names = [str(r) for r in range(len(load.forward))][:RANKS_DRAWN]
    parts = {"lookups": load.forward[:RANKS_DRAWN].tolist(), "updates": load.backward[:RANKS_DRAWN].tolist()}
    busy = load.forward + load.backward
    slow = int(busy.argmax())
    cut = f" The first {RANKS_DRAWN} of {len(busy):,} ranks." if len(busy) > RANKS_DRAWN else ""
    text = (
        f"The step waits for the slowest rank. Rank {slow} has {seconds(float(busy[slow]))} of work, the mean rank "
        f"{seconds(float(busy.mean()))}: imbalance costs {seconds(cost.imbalance)}.{cut}"
    )
    chart = partial(stacks_figure, names, parts, "rank", time_unit(float(busy.max(initial=0.0))))
    return Section("Load of the ranks", (load_table(cost), _rank_table(cost)), chart, text)


def load_table(cost: ShardingCost) -> DataTable:
    """The busiest ranks and the mean: for the terminal."""
    rows = _rank_rows(cost)
    busy = cost.load.forward + cost.load.backward
    if len(rows) > RANKS_LISTED:
        rows = [rows[r] for r in np.argsort(-busy, kind="stable")[:RANKS_LISTED].tolist()]
        rows.append((f"(the busiest {RANKS_LISTED} of {len(busy)})",))
    rows.append(("mean", *_load_cells([c.mean() for c in _loads(cost)])))
    return data_table("Ranks", RANK_COLUMNS, rows, bold=(-1,), wrap=True, where="terminal")


RANK_COLUMNS = ("rank", "lookups", "updates", "indices in", "pooled out", "memory")


def _rank_table(cost: ShardingCost) -> DataTable:
    """Every rank: for the page."""
    return data_table("Ranks", RANK_COLUMNS, _rank_rows(cost), where="page")


def _rank_rows(cost: ShardingCost) -> list[tuple[str, ...]]:
    return [(str(r), *_load_cells(values)) for r, values in enumerate(zip(*_loads(cost), strict=True))]


def _loads(cost: ShardingCost) -> tuple[Any, ...]:
    load = cost.load
    return load.forward, load.backward, load.indices, load.output, load.memory


def _load_cells(values: Sequence[Any]) -> list[str]:
    return [seconds(float(v)) for v in values[:2]] + [size(float(v)) for v in values[2:]]


def _memory_section(problem: ShardingProblem, cost: ShardingCost) -> Section:
    held = cost.load.memory
    names = [str(r) for r in range(len(held[:RANKS_DRAWN]))]
    limit, full = (f"{size(problem.limit)} for tables", problem.limit), int(held.argmax())
    parts = {"tables, optimizer state, buffers": held[:RANKS_DRAWN].tolist()}
    most, least = size(float(held.max())), size(float(held.min()))
    text = f"Rank {full} holds most, {most} of {size(problem.limit)}; the least is {least}."
    rows = [(str(r), size(float(m)), percent(m / problem.limit)) for r, m in enumerate(held)]
    table = data_table("", ("rank", "memory", "of its limit"), rows)
    return Section(
        "Memory of the ranks", (table,), partial(stacks_figure, names, parts, "rank", GIB, limit), text, "page"
    )


def _where_section(problem: ShardingProblem, found: ShardingResult) -> Section:
    """The largest tables against ranks."""
    held = memory_by_rank(problem, found.plan)
    order = np.argsort(-np.nansum(held, axis=1), kind="stable").tolist()
    drawn = order[:TABLES_DRAWN]
    names = [problem.tables[t].name or f"table {t}" for t in drawn]
    ranks = [str(r) for r in range(min(RANKS_DRAWN, problem.ranks))]
    chart = partial(grid_figure, names, ranks, held[drawn, :RANKS_DRAWN], GIB, "rank")
    cut = f" The {TABLES_DRAWN} largest of {len(order)} are drawn." if len(order) > TABLES_DRAWN else ""
    text = f"Tables against ranks, the largest on top; darker is larger. Several cells: sharded or replicated.{cut}"
    rows = []
    for t in order:
        table, placed = problem.tables[t], found.plan.tables[t]
        sizes = (f"{table.rows:,}", str(table.dim), f"{table.pooling:.4g}", size(float(np.nansum(held[t]))))
        ranks_text = ", ".join(map(str, placed.ranks)) or "all"
        rows.append((table.name or f"table {t}", placed.sharding.replace("_", "-"), ranks_text, *sizes))
    columns = ("table", "sharding", "ranks", "rows", "dim", "pooling", "memory, all ranks")
    return Section("Which table is where", (data_table("Tables", columns, rows, text=3),), chart, text, "page")


def _alternatives_section(found: ShardingResult) -> Section:
    """Plans of common heuristics, by phase."""
    plans = [("found", found.cost), *((a.name, a.cost) for a in found.alternatives if a.cost is not None)]
    plans.sort(key=lambda p: p[1].seconds)
    parts = {w: [c.phases.get(k, 0.0) for _, c in plans] for k, w in PHASES.items()}
    parts = {w: v for w, v in parts.items() if any(v)}
    bound, unit = ("lower bound for these parts", found.bound), time_unit(found.cost.seconds)
    chart = partial(stacks_figure, [n for n, _ in plans], parts, "plan", unit, bound)
    text = (
        "The plan against those of common heuristics, by phase; some of them may not fit in memory. Dashed: the lower "
        f"bound for the found plan's parts, {seconds(found.bound)}."
    )
    return Section("Against other plans", (alternative_table(found),), chart, text)


def alternative_table(found: ShardingResult) -> DataTable:
    rows: list[Sequence[str]] = [("found", *_plan_cells(found.cost, found.cost.seconds))]
    for a in sorted(found.alternatives, key=lambda a: a.cost.seconds if a.cost else np.inf):
        cells = ["does not fit"] if a.cost is None else _plan_cells(a.cost, found.cost.seconds)
        rows.append((a.name, *cells))
    columns = ("plan", "step", "worse by", "slowest lookup", "slowest update", "fullest rank")
    return data_table("Alternatives", columns, rows, bold=(0,), wrap=True)


def _plan_cells(cost: ShardingCost, best: float) -> list[str]:
    over = f" ({size(cost.over)} too much)" if cost.over else ""
    slow = [seconds(cost.phases[k]) for k in ("lookup", "update")]
    worse = percent(cost.seconds / best - 1) if cost.seconds != best else "-"
    return [seconds(cost.seconds), worse, *slow, size(float(cost.load.memory.max())) + over]


# ---- dlrm and indices


def dlrm_answer(team: DlrmRanks, p: StepResult) -> Answer:
    """Everything `presage dlrm` shows."""
    base = predict_answer(p)
    step, *rest = base.sections
    embeddings = Section("Embeddings", (phase_table(team.cost), load_table(team.cost), _system_table(team)))
    sections = (
        replace(step, title="Step", tables=(step_table(p),), chart=None),
        *(s for s in rest if s.title != "By module"),
        embeddings,
        families_section(p),
    )
    to_data = partial(dlrm_data, team, p)
    notes = (*base.notes, *_evaluation_notes(team, p))
    return replace(base, question="How long will a step take?", sections=sections, to_data=to_data, notes=notes)


def _system_table(team: DlrmRanks) -> DataTable:
    """What the framework does, and where each option is described."""
    options = {k: v for k, v in asdict(team.job.system).items() if k in SOURCES}
    rows = [(k, str(v).lower() if isinstance(v, bool) else str(v), SOURCES[k]) for k, v in options.items()]
    return data_table(f"System ({team.job.system.framework})", ("option", "value", "source"), rows, text=3, wrap=True)


def _evaluation_notes(team: DlrmRanks, p: StepResult) -> tuple[str, ...]:
    if team.job.evaluation is None:
        return ()
    more = evaluation_seconds(team)
    return (f"with its share of evaluation a step takes {seconds(p.step.p50 + more)}: published throughputs hold it",)


def dlrm_data(team: DlrmRanks, p: StepResult) -> dict[str, Any]:
    """The JSON."""
    return p.to_json() | {
        "kind": "dlrm",
        "system": asdict(team.job.system),
        "evaluation_ms": evaluation_seconds(team) * MS,
        "batch": team.job.batch,
        "embeddings_ms": {k: v * MS for k, v in team.cost.phases.items()},
        "imbalance_ms": team.cost.imbalance * MS,
        "plan": plan_json(team.plan, team.job.tables),
    }


def indices_answer(tables: Sequence[TableCounts], batch: int, samples: int) -> Answer:
    """Lookup statistics of tables; of the histogram the rows used once, and those used 32 times or more."""
    names = ("table", "rows", "pooling", "lookups", "distinct", "used once", "used 32x", "most used", "alpha")
    rows = [
        (
            t.name, f"{t.rows:,}", f"{t.pooling:.2f}", f"{t.lookups:,}", f"{t.distinct:,}", percent(t.hist[0], 1),
            percent(sum(t.hist[5:]), 2), f"{t.top:,}", f"{t.alpha:.2f}",
        )
        for t in tables
    ]  # fmt: skip
    table = data_table(f"Lookups in a batch of {batch}", names, rows, wrap=True)
    brief = f"{len(tables)} tables, {batch:,} of {samples:,} samples counted"
    data = {"kind": "tables", "batch": batch, "samples": samples, "tables": [asdict(t) for t in tables]}
    return Answer("embedding tables", sections=(Section("Tables", (table,)),), to_data=lambda: data, brief=brief)
