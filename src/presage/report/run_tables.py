"""Rich tables of a whole run. Knows no probability: it prints values."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from presage.report.plain import plain_table
from presage.runs.failures import DAY
from presage.runs.outcome import CAUSES, RunOutcome, quantiles
from presage.runs.whole import RunResult
from presage.text import amount, percent, seconds

__all__ = [
    "cause_table",
    "change_table",
    "class_table",
    "end_table",
    "headline",
    "interval_table",
    "remarks",
    "spare_table",
    "surely",
]

HOUR = 3600.0
WORDS = {
    "steps": "steps that count",
    "stalls": "stalls of single steps",
    "slow": "slow episodes",
    "checkpoints": "writing checkpoints",
    "lost": "steps done again",
    "detection": "noticing failures",
    "spares": "waiting for a node",
    "restart": "restarts",
}
SHOWN = 8
COLUMNS = (0.05, 0.5, 0.9, 0.95, 0.99)


def headline(p: RunResult) -> str:
    """What was asked, then the answer in one sentence."""
    job, run = p.job.job, p.run
    what = f"[bold]{escape(job.name or job.model.name or 'job')}[/bold]"
    where = f"{run.gpus:,} x {job.platform.gpu.name} ({job.platform.key})"
    told = f"{run.steps:,} steps of {seconds(run.times.seconds)}, {_tokens(p)}, on {escape(where)}"
    exact = f"\nwere the step time and the failure rates exact: {_answer(p, p.exact)}" if p.unsure else ""
    return f"{what}: {told}\n{_answer(p, p.outcome)}{exact}"


def _answer(p: RunResult, o: RunOutcome) -> str:
    days = f"p50 {span(o.quantile(0.5))}, p95 {span(o.quantile(0.95))}"
    sure = "" if p.deadline is None else f"; {surely(o.done_by(p.deadline))} sure by {span(p.deadline)}"
    return f"{days}; {percent(float(o.goodput.mean()), 0)} goodput{sure}"


def _tokens(p: RunResult) -> str:
    return amount(p.run.steps * p.job.job.tokens).replace("G", "B") + " tokens"


def surely(share: float) -> str:
    """No share of draws is a certainty."""
    return "over 99%" if share > 0.99 else "under 1%" if share < 0.01 else percent(share, 0)


def span(value: float) -> str:
    """Days, or hours, or minutes."""
    if not isfinite(value):
        return "never" if value > 0 else "-"
    for scale, unit in ((DAY, "days"), (HOUR, "hours"), (60.0, "minutes")):
        if abs(value) >= scale:
            many = f"{value / scale:,.3g}" if abs(value) < 1e3 * scale else f"{value / scale:,.0f}"
            return f"{many} {unit if many != '1' else unit[:-1]}"
    return seconds(value)


def end_table(p: RunResult) -> Table:
    """Of a step, of the run, and of what it takes."""
    table = plain_table("How long", "", "mean", *(f"p{100 * q:.0f}" for q in COLUMNS), fold=False)
    table.add_row("a step", *_cells(p.steps, seconds))
    table.add_row("the average step of a run", *_cells(p.exact.step, seconds))
    table.add_row("the run", *_cells(p.exact.wall, span))
    if p.unsure:
        table.add_row("and presage's own error with it", *_cells(p.outcome.wall, span))
    table.add_row("ETTR: steps that counted", *_cells(p.outcome.ettr, percent))
    table.add_row("failures", *_cells(p.outcome.failures, _count))
    if p.cost is not None:
        table.add_row("cost", *_cells(p.cost, amount))
    table.add_row("energy, MWh", *_cells(p.kwh / 1e3, lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.3g}"))
    return table


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _cells(values: NDArray[np.float64], said: Callable[[float], str]) -> list[str]:
    return [_told(float(values.mean()), said), *(_told(float(x), said) for x in quantiles(values, COLUMNS))]


def _told(value: float, said: Callable[[float], str]) -> str:
    return "never" if value == inf else said(value)


def cause_table(p: RunResult) -> Table:
    """Where the wall-clock time goes, on average."""
    o: RunOutcome = p.exact
    total = float(o.wall.mean())
    table = plain_table("Where the time goes", "what", "time", "share", "p5", "p95", fold=False)
    for cause in CAUSES:
        part = o.parts[cause]
        if part.any():
            low, high = quantiles(part, [0.05, 0.95])
            mean = float(part.mean())
            table.add_row(WORDS[cause], span(mean), percent(mean / total), span(float(low)), span(float(high)))
    table.add_row("the run", span(total), percent(1.0), style="bold")
    return table


def class_table(p: RunResult, most: int = SHOWN) -> Table:
    """Stops by class, those that cost most first."""
    table = plain_table("What stops it", "class", "per 1,000 node-days", "times", "p5-p95", "cost", "each", fold=False)
    rows = sorted((s for s in p.exact.stops() if s.per_node_day), key=lambda s: -s.seconds)
    for s in rows[:most]:
        times = f"{s.count:,.1f}", f"{s.low:,.0f}-{s.high:,.0f}"
        table.add_row(escape(s.name), f"{1e3 * s.per_node_day:.3g}", *times, span(s.seconds), span(s.each))
    rest = rows[most:]
    if any(s.count for s in rest):
        rate, count, cost = (sum(getattr(s, k) for s in rest) for k in ("per_node_day", "count", "seconds"))
        table.add_row(f"{len(rest)} others", f"{1e3 * rate:.3g}", f"{count:,.1f}", "", span(cost), span(cost / count))
    return table


def interval_table(p: RunResult) -> Table:
    """Ways to choose the time between checkpoints."""
    title = f"Checkpoints: {seconds(p.run.checkpoints.save)} each ({p.run.checkpoints.said})"
    table = plain_table(title, "interval by", "time", "steps", "ETTR, exact", "by Meta's formula", fold=False)
    for i in p.intervals:
        style = "bold" if i.name == "this run" else None
        table.add_row(i.name, span(i.seconds), f"{i.steps:,}", percent(i.exact), percent(i.meta), style=style)
    return table


def change_table(p: RunResult) -> Table:
    """What to make better first."""
    table = plain_table("What would change its end", "change", "p50", "p95", "ETTR", fold=False)
    for c in p.changes:
        table.add_row(c.name, _moved(c.middle), _moved(c.late), percent(c.ettr))
    return table


def _moved(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{span(abs(value))}"


def spare_table(p: RunResult) -> Table:
    """What more and fewer spare nodes would do."""
    repair = span(p.run.reliability.repair)
    table = plain_table(f"Spare nodes (a repair takes {repair})", "spares", "p50", "p95", "waiting", fold=False)
    for s in p.spares:
        table.add_row(f"{s.spares:,}", span(s.middle), span(s.late), span(s.waits) if s.waits else "-")
    return table


def remarks(p: RunResult) -> list[str]:
    """What to know before trusting it."""
    risk, o, r = p.run.risk, p.outcome, p.run.reliability
    rate = f"{1e3 * risk.unplanned * DAY / risk.nodes:.3g} failures per 1,000 node-days"
    out = [f"failures: {r.name}; {rate}, one every {span(risk.mttf)} of this job" if risk.unplanned else "no failures"]
    out.append(
        f"standard errors of {p.draws:,} draws: p50 {span(o.quantile_error(0.5))}, p95 {span(o.quantile_error(0.95))}"
    )
    out.append(f"steps differ: {p.noise}")
    fits = [] if p.job.memory.fits else ["note: the job does NOT fit in memory: see presage job"]
    return out + fits + [f"note: {note}" for note in p.job.notes]
