"""Rich tables of a whole run. Knows no probability: it prints values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from presage.report.plain import plain_table
from presage.report.text import amount, percent, seconds
from presage.runs.failures import DAY
from presage.runs.outcome import CAUSES, Outcome
from presage.runs.whole import RunPrediction

__all__ = [
    "cause_table",
    "change_table",
    "class_table",
    "end_table",
    "headline",
    "interval_table",
    "remarks",
    "spare_table",
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


def headline(p: RunPrediction) -> str:
    """What was asked, then the answer in one sentence."""
    job, run = p.job.job, p.run
    what = f"[bold]{escape(job.name or job.model.name or 'job')}[/bold]"
    where = f"{run.gpus:,} x {job.platform.gpu.name} ({job.platform.key})"
    told = f"{run.steps:,} steps of {seconds(run.times.seconds)}, {_tokens(p)}, on {escape(where)}"
    o, late = p.outcome, f"p95 {span(p.outcome.quantile(0.95))}"
    if p.unsure:
        late += f" ({span(p.exact.quantile(0.95))} were the step time and the failure rates exact)"
    answer = f"p50 {span(o.quantile(0.5))}, {late}; {percent(float(o.goodput.mean()), 0)} goodput{_sure(p)}"
    return f"{what}: {told}\n{answer}"


def _tokens(p: RunPrediction) -> str:
    return amount(p.run.steps * p.job.job.tokens).replace("G", "B") + " tokens"


def _sure(p: RunPrediction) -> str:
    if p.deadline is None:
        return ""
    return f"; {percent(p.outcome.done_by(p.deadline), 0)} sure by {span(p.deadline)}"


def span(value: float) -> str:
    """Days, or hours, or minutes."""
    for scale, unit in ((DAY, "days"), (HOUR, "hours"), (60.0, "minutes")):
        if abs(value) >= scale:
            return f"{value / scale:,.3g} {unit}" if abs(value) < 1e3 * scale else f"{value / scale:,.0f} {unit}"
    return seconds(value)


def end_table(p: RunPrediction) -> Table:
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


def _cells(values: NDArray[np.float64], said: object) -> list[str]:
    assert callable(said)
    return [said(float(values.mean())), *(said(float(x)) for x in np.quantile(values, COLUMNS))]


def cause_table(p: RunPrediction) -> Table:
    """Where the wall-clock time goes, on average."""
    o: Outcome = p.exact
    total = float(o.wall.mean())
    table = plain_table("Where the time goes", "what", "time", "share", "p5", "p95", fold=False)
    for cause in CAUSES:
        part = o.parts[cause]
        if part.any():
            low, high = np.quantile(part, [0.05, 0.95])
            mean = float(part.mean())
            table.add_row(WORDS[cause], span(mean), percent(mean / total), span(float(low)), span(float(high)))
    table.add_row("the run", span(total), percent(1.0), style="bold")
    return table


def class_table(p: RunPrediction) -> Table:
    """Failures by class, those that cost most first."""
    o, risk = p.exact, p.run.risk
    table = plain_table("What stops it", "class", "per 1,000 node-days", "times", "p5-p95", "cost", "each", fold=False)
    rows = list(zip(p.run.reliability.failures, risk.rates, o.counts, o.costs, strict=False))
    rows.sort(key=lambda r: -float(r[3].mean()))
    for f, rate, count, cost in rows[:SHOWN]:
        low, high = np.quantile(count, [0.05, 0.95])
        each = float(cost.sum() / max(1.0, count.sum()))
        table.add_row(
            escape(f.name), f"{1e3 * rate * DAY / risk.nodes:.3g}", f"{count.mean():,.1f}",
            f"{low:,.0f}-{high:,.0f}", span(float(cost.mean())), span(each),
        )  # fmt: skip
    if len(rows) > SHOWN:
        rest = rows[SHOWN:]
        times, cost = (float(sum(r[i].mean() for r in rest)) for i in (2, 3))
        rate = 1e3 * sum(float(r[1]) for r in rest) * DAY / risk.nodes
        table.add_row(f"{len(rest)} others", f"{rate:.3g}", f"{times:,.1f}", "", span(cost), "")
    return table


def interval_table(p: RunPrediction) -> Table:
    title = f"Checkpoints: {seconds(p.run.checkpoints.save)} each ({p.run.checkpoints.said})"
    table = plain_table(title, "interval by", "time", "steps", "ETTR, exact", "by Meta's formula", fold=False)
    for i in p.intervals:
        style = "bold" if i.name == "this run" else None
        table.add_row(i.name, span(i.seconds), f"{i.steps:,}", percent(i.exact), percent(i.meta), style=style)
    return table


def change_table(p: RunPrediction) -> Table:
    """What to make better first."""
    table = plain_table("What would change its end", "change", "p50", "p95", "ETTR", fold=False)
    for c in p.changes:
        table.add_row(c.name, _moved(c.middle), _moved(c.late), percent(c.ettr))
    return table


def _moved(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{span(abs(value))}"


def spare_table(p: RunPrediction) -> Table:
    repair = span(p.run.reliability.repair)
    table = plain_table(f"Spare nodes (a repair takes {repair})", "spares", "p50", "p95", "waiting", fold=False)
    for s in p.spares:
        table.add_row(f"{s.spares:,}", span(s.middle), span(s.late), span(s.waits) if s.waits else "-")
    return table


def remarks(p: RunPrediction) -> list[str]:
    """What to know before trusting it."""
    risk, o, r = p.run.risk, p.outcome, p.run.reliability
    rate = f"{1e3 * risk.unplanned * DAY / risk.nodes:.3g} failures per 1,000 node-days"
    out = [f"failures: {r.name}; {rate}, one every {span(risk.mttf)} of this job" if risk.unplanned else "no failures"]
    out.append(
        f"standard errors of {p.draws:,} draws: p50 {span(o.quantile_error(0.5))}, p95 {span(o.quantile_error(0.95))}"
    )
    return out + [f"note: {note}" for note in p.job.notes]
