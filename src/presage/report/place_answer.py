"""The answer of `presage place`: which GPU goes where, what a hot node costs, and which nodes to evict."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from presage.placement import Eviction, HotNode, PlacementFindings, PlacementResult, SpareGpu
from presage.report.answer import Answer, DataTable, Fact, Section, data_table
from presage.report.html.charts.bars import NO_CHANGE, AxisUnit, Swing, tornado_figure
from presage.report.html.charts.distribution import distribution_section
from presage.report.html.charts.heat import heat_figure, heat_table, notable_rows
from presage.report.terms import TAIL_HELP, signed
from presage.text import percent, seconds

STAGES_SHOWN = 16
EQUAL = 1e-3
HEAT_STAGES, HEAT_REPLICAS = 60, 32
TIMES = AxisUnit("x", 1.0)


def place_answer(f: PlacementFindings) -> Answer:
    """Everything `presage place` shows."""
    p, s = f.placed, f.placed.shape
    name = s.job.name or s.job.model.name or "job"
    speeds = f"relative times {p.fleet.factors.min():.3f} to {p.fleet.factors.max():.3f}"
    titles = {"given": "Nodes to evict, as given", "best": "Nodes to evict, after the best placement"}
    tables = [
        *([stage_table(p, f.responses, f.slow)] if f.responses else []),
        *(evict_table(titles[k], rows) for k, rows in f.evicted.items() if rows),
        *([left_table(f.left, p)] if f.left else []),
        *([hot_table(f.hot)] if f.hot is not None else []),
    ]
    return Answer(
        title=name,
        question="Which GPU goes where?",
        subject=f"{name} on {s.job.gpus:,} of {len(p.fleet):,} GPUs, {speeds}; {s.replicas:,} replicas x "
        f"{s.stages} stages x {s.together} GPUs in lockstep",
        headline=headline(p),
        facts=_facts(p),
        sections=(
            _outcome_section(p),
            _groups_section(p),
            *(Section(t.title, (t,)) for t in tables),
            _steps_section(p),
        ),
        notes=notes(p, f.source),
        to_data=f.to_json,
    )


def headline(p: PlacementResult) -> str:
    best, worst = p.best.p95.value, p.worst.p95.value
    if worst < best * (1 + EQUAL):
        return f"p95 step {seconds(best)} with any placement: placement does not matter here."
    given, random = (percent(max(0.0, 1 - best / other)) for other in (p.given.p95.value, p.randoms.p95))
    return (
        f"Best placement: p95 step {seconds(best)}, {given} faster than as given, {random} faster than random, within "
        f"{percent(p.gap, 2)} of optimal."
    )


def notes(p: PlacementResult, source: str) -> tuple[str, ...]:
    kept = f"groups of {p.sizes.part} GPUs stay within a node" if p.sizes.part > 1 else "any GPUs may be grouped"
    return (f"noise: {source}; GPU speeds are the fleet's; {kept}; all nodes are equally near", *p.fleet.notes)


def _facts(p: PlacementResult) -> tuple[Fact, ...]:
    best, worst = p.best.p95.value, p.worst.p95.value
    return (
        Fact("p95, best placement", seconds(best), f"p50 {seconds(p.best.p50.value)}"),
        Fact("p95, as given", seconds(p.given.p95.value), f"best: {signed(best / p.given.p95.value - 1)}"),
        Fact("p95, random placement", seconds(p.randoms.p95), f"mean of {len(p.randoms.p95s)}"),
        Fact("p95, worst placement", seconds(worst), f"{signed(worst / best - 1)} over the best"),
        Fact("Slowest GPU", f"{p.fleet.factors.max():.3f}", "times the median GPU's time"),
    )


# ---- sections


def _outcome_section(p: PlacementResult) -> Section:
    rows = _outcomes(p)
    swings = [Swing(name, (p95 / p.randoms.p95 - 1,)) for name, _, p95 in rows if not name.startswith("random, mean")]
    chart = partial(tornado_figure, swings, ("p95",), "p95 relative to a random placement", apart=True)
    return Section("Placements", (outcome_table(p),), chart, "p95 step relative to random placements: left is better.")


def _outcomes(p: PlacementResult) -> list[tuple[str, float, float]]:
    return [
        ("as given", p.given.p50.value, p.given.p95.value),
        (f"random, mean of {len(p.randoms.p95s)}", p.randoms.p50, p.randoms.p95),
        ("random, unlucky (1 in 20)", NO_CHANGE, p.randoms.unlucky),
        ("best", p.best.p50.value, p.best.p95.value),
        ("lower bound", NO_CHANGE, p.bound),
        ("worst", p.worst.p50.value, p.worst.p95.value),
    ]


def outcome_table(p: PlacementResult) -> DataTable:
    """p50 and p95 by placement."""
    rows = [
        (name, seconds(p50), seconds(p95), signed(p95 / p.shape.seconds - 1), signed(p95 / p.randoms.p95 - 1))
        for name, p50, p95 in _outcomes(p)
    ]
    columns = ("placement", "p50", "p95", "over no noise", "against random")
    return data_table("Step by placement", columns, rows, bold=(3,), wrap=True)


def stage_table(p: PlacementResult, responses: Sequence[float], slow: float) -> DataTable:
    """The step's response to a slow GPU in each stage, and what the best placement puts there."""
    last = p.shape.stages - 1
    few = sorted({round(i * last / (STAGES_SHOWN - 1)) for i in range(STAGES_SHOWN)})
    rows, best = [], p.best.placement
    for stage in range(last + 1) if last < STAGES_SHOWN else few:
        factors, gpus = best.factors[:, stage], best.gpus[:, stage].ravel()
        gpu = int(gpus[p.fleet.factors[gpus].argmax()])
        cells = (signed(responses[stage] - 1), f"{np.median(factors):.3f}", f"{factors.max():.3f}")
        rows.append((str(stage), *cells, p.fleet.gpus[gpu], p.fleet.nodes[gpu] or "-"))
    columns = ("stage", f"response to x{slow:.3g}", "median group", "slowest group", "slowest GPU", "node")
    return data_table("Stages of the best placement", columns, rows, wrap=True)


def hot_table(hot: HotNode) -> DataTable:
    """The cost of a hot node, by the stage it serves."""
    best, worst = int(np.argmin(hot.costs)), int(np.argmax(hot.costs))
    rows = [("none hot", seconds(hot.without[0].value), seconds(hot.without[1].value), "-", "")]
    for stage, (p50, p95) in enumerate(hot.stages):
        mark = "best" if stage == best else "worst" if stage == worst else ""
        rows.append((str(stage), seconds(p50.value), seconds(p95.value), signed(hot.costs[stage]), mark))
    title = f"Hot node: its GPUs take x{hot.factor:.3g} as long"
    return data_table(title, ("stage", "p50", "p95", "cost", ""), rows, wrap=True)


def evict_table(title: str, evicted: Sequence[Eviction]) -> DataTable:
    """Nodes in the order to evict them."""
    columns = ("evict", "factor", "stage", "replica", "gain alone", "cumulative", "p95 then", "GPU-hours/day")
    rows = [
        (
            e.name, f"{e.factor:.3f}", str(e.stage), str(e.replica), percent(e.alone), percent(e.gain), seconds(e.p95),
            f"{e.gpu_hours:,.0f}",
        )
        for e in evicted
    ]  # fmt: skip
    return data_table(title, columns, rows, wrap=True)


def left_table(left: Sequence[SpareGpu], p: PlacementResult) -> DataTable:
    """The slowest GPUs that are left out."""
    title = f"Left out: the slowest of {len(p.best.placement.spares)} spare GPUs"
    rows = [
        (x.gpu, x.node or "-", f"{x.factor:.3f}", seconds(x.p95), signed(x.p95 / p.best.p95.value - 1)) for x in left
    ]
    return data_table(title, ("GPU", "node", "factor", "p95 with it", "cost"), rows, text=2, wrap=True)


def _groups_section(p: PlacementResult) -> Section:
    """Replicas against stages."""
    factors = p.best.placement.factors[:, :HEAT_STAGES]
    kept = notable_rows(factors, HEAT_REPLICAS)
    rows, columns = [f"replica {r}" for r in kept], [f"stage {k}" for k in range(factors.shape[1])]
    slow = np.unravel_index(int(factors.argmax()), factors.shape)
    text = (
        "Relative time of the slowest GPU of each group in the best placement. The slowest group is in replica "
        f"{slow[0]}, stage {slow[1]}: {factors.max():.3f}."
    )
    if len(kept) < len(factors):
        text += f" Of {len(factors):,} replicas, the {HEAT_REPLICAS} that differ most."
    values = factors[kept]
    table = heat_table("replica", rows, columns, values, TIMES)
    return Section(
        "Groups of the best placement", (table,), partial(heat_figure, rows, columns, values, TIMES), text, "page"
    )


def _steps_section(p: PlacementResult) -> Section:
    text = f"Steps drawn with the best placement. {TAIL_HELP}"
    return distribution_section(p.best.draws.seconds.ravel(), text)
