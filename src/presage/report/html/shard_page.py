"""The page of `presage shard`: which rank holds which embedding table, how even that is, and what else was tried."""

from __future__ import annotations

import numpy as np

from presage.embeddings.sharding_cost import ShardingCost
from presage.embeddings.sharding_memory import memory_by_rank
from presage.embeddings.sharding_problem import ShardingProblem
from presage.embeddings.sharding_search import ShardingResult
from presage.report import shard_tables as tables
from presage.report.html.charts.bars import parts_figure
from presage.report.html.charts.grid import grid_figure
from presage.report.html.charts.stacks import GIB, stacks_figure
from presage.report.html.charts.units import time_unit
from presage.report.html.page import Fact, Page, Section, Table, plain, table_of
from presage.text import percent, seconds, size

__all__ = ["shard_page"]

SHOWN = 60  # tables
RANKS = 256
WORDS = {
    "input": "indices to their tables", "lookup": "lookups", "output": "pooled rows back", "gradient": "gradients out",
    "update": "updates", "replicas": "tables that all hold",
}  # fmt: skip
CLOSE = 0.02


def shard_page(problem: ShardingProblem, found: ShardingResult, command: str = "") -> Page:
    """All there is to see of a plan."""
    said = plain(tables.headline(found, len(problem.tables), problem.batch, problem.platform.name)).split("\n")[0]
    sections = (
        _phases(found.cost),
        _load(found.cost),
        _memory(problem, found.cost),
        _where(problem, found),
        _others(found),
    )
    return Page(
        title=f"{len(problem.tables)} tables on {problem.ranks} ranks",
        question=f"Which rank should hold which table? {said}",
        answer=answer(problem, found),
        facts=facts(problem, found),
        sections=sections,
        notes=() if found.complete else ("The time to search ran out: --seconds gives it more.",),
        command=command,
    )


def answer(problem: ShardingProblem, found: ShardingResult) -> str:
    """The one sentence."""
    step = f"With this plan the embeddings take {seconds(found.cost.seconds)} of a step on {problem.ranks:,} GPUs"
    name, other = _best_other(found)
    than = f", {percent(1 - found.cost.seconds / other)} less than {other_words(name)}" if name else ""
    left = found.gap / (1 + found.gap)
    near = (
        "none can be noticeably better"
        if left < CLOSE
        else f"no placing of the same parts saves more than {percent(left)}"
    )
    room = problem.limit - float(found.cost.load.memory.max())
    fits = f"the fullest GPU has {size(room)} left" if room >= 0 else f"the fullest GPU needs {size(-room)} too much"
    return f"{step}{than}: {near}, and {fits}."


def other_words(name: str) -> str:
    return f"the best heuristic ({name})"


def _best_other(found: ShardingResult) -> tuple[str, float]:
    fit = [(a.cost.seconds, a.name) for a in found.alternatives if a.cost is not None and not a.cost.over]
    took, name = min(fit, default=(0.0, ""))
    return name, took


def facts(problem: ShardingProblem, found: ShardingResult) -> tuple[Fact, ...]:
    c, load = found.cost, found.cost.load
    busy = load.forward + load.backward
    uneven = float(busy.max() / busy.mean()) - 1 if busy.mean() else 0.0
    name, other = _best_other(found)
    out = [
        Fact("Embeddings of a step", seconds(c.seconds), f"at least {seconds(found.bound)} for these parts"),
        Fact("Busiest GPU", f"+{percent(uneven)}", "over the mean GPU", "warn" if uneven > 0.1 else "good"),
        Fact("Fullest GPU", size(float(load.memory.max())), f"of {size(problem.limit)}", "bad" if c.over else "good"),
        Fact("Tables", f"{len(problem.tables):,}", _ways(found)),
    ]
    if name:
        out.append(Fact("Best heuristic", seconds(other), name))
    return tuple(out)


def _ways(found: ShardingResult) -> str:
    return ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in found.plan.counts().items())


# ---- sections


def _phases(cost: ShardingCost) -> Section:
    parts = [(WORDS.get(k, k), took) for k, took in cost.phases.items()]
    name, took = max(parts, key=lambda p: p[1])
    lead = f"Each phase takes as long as its slowest rank. Most goes to {name}, {percent(took / cost.seconds)}."
    return Section(
        "Where the time goes", (table_of(tables.phase_table(cost)),), parts_figure(parts, cost.seconds), lead
    )


def _load(cost: ShardingCost) -> Section:
    load = cost.load
    shown = slice(0, RANKS)
    names = [str(r) for r in range(len(load.forward))][shown]
    parts = {"lookups": load.forward[shown].tolist(), "updates": load.backward[shown].tolist()}
    busy = load.forward + load.backward
    slow = int(busy.argmax())
    lead = (
        f"Work of each rank: the step waits for the slowest. Rank {slow} has most, {seconds(float(busy[slow]))}; the "
        f"mean rank has {seconds(float(busy.mean()))}, and waits for {seconds(cost.imbalance)}.{_cut(len(busy))}"
    )
    figure = stacks_figure(names, parts, "rank", time_unit(float(busy.max(initial=0.0))))
    return Section("Load of the ranks", (_rank_table(cost),), figure, lead)


def _cut(ranks: int) -> str:
    return f" The first {RANKS} of {ranks:,} ranks." if ranks > RANKS else ""


def _rank_table(cost: ShardingCost) -> Table:
    """Of every rank, where the terminal shows the busiest."""
    load = cost.load
    columns = zip(load.forward, load.backward, load.indices, load.output, load.memory, strict=True)
    rows = (
        (str(r), seconds(float(f)), seconds(float(b)), size(float(i)), size(float(o)), size(float(m)))
        for r, (f, b, i, o, m) in enumerate(columns)
    )
    return Table(("rank", "lookups", "updates", "indices in", "pooled out", "memory"), tuple(rows), "Ranks")


def _memory(problem: ShardingProblem, cost: ShardingCost) -> Section:
    held = cost.load.memory[:RANKS]
    names = [str(r) for r in range(len(held))]
    limit = (f"{size(problem.limit)} for tables", problem.limit)
    figure = stacks_figure(names, {"tables, their state and buffers": held.tolist()}, "rank", GIB, limit)
    full = int(cost.load.memory.argmax())
    most, least = float(cost.load.memory.max()), float(cost.load.memory.min())
    lead = f"Rank {full} holds most, {size(most)} of {size(problem.limit)}; the emptiest holds {size(least)}."
    rows = tuple((str(r), size(float(m)), percent(m / problem.limit)) for r, m in enumerate(cost.load.memory))
    return Section("Memory of the ranks", (Table(("rank", "memory", "of its limit"), rows),), figure, lead)


def _where(problem: ShardingProblem, found: ShardingResult) -> Section:
    """The largest tables against ranks."""
    held = memory_by_rank(problem, found.plan)
    order = np.argsort(-np.nansum(held, axis=1), kind="stable")
    some = order[:SHOWN]
    names = [problem.tables[t].name or f"table {t}" for t in some]
    figure = grid_figure(names, [str(r) for r in range(min(RANKS, problem.ranks))], held[some, :RANKS], GIB, "rank")
    cut = f" The {SHOWN} largest of {len(order)} are drawn." if len(order) > SHOWN else ""
    lead = (
        "Tables against ranks, the largest on top; the stronger the colour, the larger. A row with several "
        f"cells is cut, or on all ranks.{cut}"
    )
    return Section("Which table is where", (_placed_table(problem, found, order.tolist(), held),), figure, lead)


def _placed_table(problem: ShardingProblem, found: ShardingResult, order: list[int], held: np.ndarray) -> Table:
    rows = []
    for t in order:
        table, placed = problem.tables[t], found.plan.tables[t]
        ranks = ", ".join(map(str, placed.ranks)) or "all"
        sizes = (f"{table.rows:,}", str(table.dim), f"{table.pooling:.4g}", size(float(np.nansum(held[t]))))
        rows.append((table.name or f"table {t}", placed.sharding.replace("_", "-"), ranks, *sizes))
    columns = ("table", "sharding", "ranks", "rows", "dim", "pooling", "memory, all ranks")
    return Table(columns, tuple(rows), "Tables", frozenset({0, 1, 2}))


def _others(found: ShardingResult) -> Section:
    """Plans of the usual heuristics beside it, by phase."""
    plans = [("found", found.cost), *((a.name, a.cost) for a in found.alternatives if a.cost is not None)]
    plans.sort(key=lambda p: p[1].seconds)
    parts = {w: [c.phases.get(k, 0.0) for _, c in plans] for k, w in WORDS.items()}
    parts = {w: v for w, v in parts.items() if any(v)}
    bound = ("no placing of these parts is below", found.bound)
    figure = stacks_figure([n for n, _ in plans], parts, "plan", time_unit(found.cost.seconds), bound)
    lead = (
        "The plan beside those of the usual heuristics, phase by phase; some of them may not fit in memory. The dashed "
        f"line: no placing of the found plan's parts is below {seconds(found.bound)}."
    )
    return Section("Against other plans", (table_of(tables.alternative_table(found)),), figure, lead)
