"""Tables and sentences of a placement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from presage.placement import Evicted, Hot, LeftOut, Placed
from presage.report.plain import plain_table
from presage.text import percent, seconds

__all__ = ["evict_table", "headline", "hot_table", "left_table", "outcome_table", "remarks", "stage_table"]

SHOWN = 16  # stages
ALIKE = 1e-3


def headline(p: Placed) -> str:
    """What was asked, and the answer."""
    job, s = p.shape.job, p.shape
    spread = f"factors {p.fleet.factors.min():.3f} to {p.fleet.factors.max():.3f} of the median"
    what = f"[bold]{escape(job.name or job.model.name or 'job')}[/bold] on {job.gpus:,} of {len(p.fleet):,} GPUs"
    how = f"{s.replicas:,} replicas x {s.stages} stages x {s.together} GPUs that wait for each other in every layer"
    return f"{what}, {spread}\n{how}\n{_answer(p)}"


def _answer(p: Placed) -> str:
    best, worst = p.best.p95.value, p.worst.p95.value
    if worst < best * (1 + ALIKE):
        return f"p95 of a step {seconds(best)} wherever GPUs go: no place is better than another"
    below = (percent(max(0.0, 1 - best / other)) for other in (p.given.p95.value, p.randoms.p95))
    gain = "{} below the order given, {} below a random one".format(*below)
    near = "none can be noticeably better" if p.gap < ALIKE / 2 else f"none can be more than {percent(p.gap, 2)} better"
    return f"best placement: p95 of a step {seconds(best)}, {gain}; {near}"


def outcome_table(p: Placed) -> Table:
    """As given, random, best and worst, beside the step without noise."""
    table = plain_table("Placements", "placement", "p50", "p95", "over predicted", "against random")
    rows = [
        ("as given", p.given.p50.value, p.given.p95.value),
        (f"random, mean of {len(p.randoms.p95s)}", p.randoms.p50, p.randoms.p95),
        ("random, unlucky (1 in 20)", float("nan"), p.randoms.unlucky),
        ("best", p.best.p50.value, p.best.p95.value),
        ("no placement is below", float("nan"), p.bound),
        ("worst", p.worst.p50.value, p.worst.p95.value),
    ]
    for name, p50, p95 in rows:
        cells = [seconds(p50), seconds(p95), _signed(p95 / p.shape.seconds - 1), _signed(p95 / p.randoms.p95 - 1)]
        table.add_row(name, *cells, style="bold" if name == "best" else "")
    return table


def stage_table(p: Placed, responses: Sequence[float], slow: float) -> Table:
    """Who goes where: stages by how they respond, and which groups the best placement gives them."""
    response = f"response to x{slow:.3g}"
    table = plain_table(
        "Who goes where", "stage", response, "median group", "slowest group", "slowest GPU there", "its node"
    )
    best = p.best.placement
    for stage in _shown(p.shape.stages):
        factors = best.factors[:, stage]
        gpus = best.gpus[:, stage].ravel()
        gpu = int(gpus[p.fleet.factors[gpus].argmax()])
        cells = [_signed(responses[stage] - 1), f"{np.median(factors):.3f}", f"{factors.max():.3f}"]
        table.add_row(str(stage), *cells, escape(p.fleet.gpus[gpu]), escape(p.fleet.nodes[gpu] or "-"))
    return table


def _shown(stages: int) -> list[int]:
    last = stages - 1
    return list(range(stages)) if last < SHOWN else sorted({round(i * last / (SHOWN - 1)) for i in range(SHOWN)})


def hot_table(hot: Hot) -> Table:
    """By stage, with the best and the worst said."""
    best, worst = int(np.argmin(hot.costs)), int(np.argmax(hot.costs))
    table = plain_table(f"A hot node: its GPUs take {hot.factor:.3g} as long", "its stage", "p50", "p95", "cost", "")
    table.add_row("none hot", seconds(hot.without[0].value), seconds(hot.without[1].value), "-", "")
    for stage, (p50, p95) in enumerate(hot.stages):
        said = "best" if stage == best else "worst" if stage == worst else ""
        table.add_row(str(stage), seconds(p50.value), seconds(p95.value), _signed(hot.costs[stage]), said)
    return table


def evict_table(title: str, rows: Sequence[Evicted]) -> Table:
    """In the order to evict them."""
    columns = ("factor", "stage", "replica", "gain alone", "with those above", "p95 then", "GPU-hours a day")
    table = plain_table(title, "evict", *columns)
    for e in rows:
        table.add_row(
            escape(e.name), f"{e.factor:.3f}", str(e.stage), str(e.replica), percent(e.alone), percent(e.gain),
            seconds(e.p95), f"{e.gpu_hours:,.0f}",
        )  # fmt: skip
    return table


def left_table(rows: Sequence[LeftOut], p: Placed) -> Table:
    """The slowest GPUs that are left out."""
    count = len(p.best.placement.spares)
    table = plain_table(
        f"Left out: the slowest of {count} spare GPUs", "GPU", "node", "factor", "p95 with it", "cost", left=2
    )
    for x in rows:
        cost = _signed(x.p95 / p.best.p95.value - 1)
        table.add_row(escape(x.gpu), escape(x.node or "-"), f"{x.factor:.3f}", seconds(x.p95), cost)
    return table


def remarks(p: Placed, source: str) -> list[str]:
    """What the answer rests on."""
    kept = f"groups of {p.sizes.part} GPUs stay within a node" if p.sizes.part > 1 else "any GPUs may be grouped"
    return [
        f"Noise: {source}. GPUs' own speeds are the fleet's; {kept}; nodes are all as near to each other.",
        *p.fleet.notes,
    ]


def _signed(share: float) -> str:
    return "-" if np.isnan(share) else f"{100 * share:+.1f}%".replace("-0.0%", "+0.0%")
