"""The answer of `presage run`: when a whole training run will be done, how sure that is, and what would change it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from presage.report.answer import Answer, DataTable, Fact, Section, Tone, data_table, sections_of
from presage.report.html.charts.bars import (
    Swing,
    grouped_figure,
    parts_figure,
    time_unit,
    tornado_figure,
    tornado_table,
)
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.policy_sections import policies_section, policy_notes
from presage.report.terms import TAIL_HELP, count_text, gpu_basis, interval, span, span_known, step_time, verdict
from presage.runs.failures import DAY
from presage.runs.outcome import CAUSES, RunOutcome, quantiles
from presage.runs.whole import RunResult
from presage.text import amount, percent, seconds

HOUR = 3600.0
CAUSE_NAMES = {
    "steps": "useful steps",
    "stalls": "stalls of single steps",
    "slow": "slow episodes",
    "degraded": "replicas missing",
    "checkpoints": "writing checkpoints",
    "lost": "steps repeated",
    "detection": "detecting failures",
    "spares": "waiting for a node",
    "restart": "restarts",
}
CLASSES_SHOWN = 8
LEVELS = (0.05, 0.5, 0.9, 0.95, 0.99)
LIKELY, EVEN = 0.9, 0.5  # chances of meeting a deadline
FEWEST = 20  # draws: fewer have no shape


def run_answer(p: RunResult) -> Answer:
    """Everything `presage run` shows."""
    job, run = p.job.job, p.run
    name = job.name or job.model.name or "run"
    where = f"{run.gpus:,} x {job.platform.gpu.name} ({job.platform.key})"
    tokens = count_text(run.steps * job.tokens)
    sections = sections_of(
        policies_section(p), _duration_section(p), _causes_section(p), _stops_section(p), _checkpoints_section(p),
        _changes_section(p), _spares_section(p),
    )  # fmt: skip
    return Answer(
        title=name,
        question="When will the run be done?",
        subject=f"{name}: {tokens} tokens, {run.steps:,} steps of {step_time(p.step)}, on {where}",
        headline=headline(p),
        verdict=verdict(p),
        verdict_tone="good" if p.fits else "bad",
        facts=facts(p),
        sections=sections,
        notes=notes(p),
        to_data=p.to_json,
        basis=gpu_basis(p.job.job.platform.gpu),
    )


def headline(p: RunResult) -> str:
    o = p.outcome
    chance = "" if p.deadline is None else f"; {chance_text(o.done_by(p.deadline))} chance by {span(p.deadline)}"
    ends = interval(o.quantile(0.05), o.quantile(0.95), span_known)
    hold = "" if p.fits else ", if it fitted"
    good = percent(float(o.goodput.mean()), 0)
    return f"{span_known(o.quantile(0.5))} (90% interval {ends}){hold}; {good} goodput{chance}."


def chance_text(share: float) -> str:
    """A share of draws is never certainty."""
    return "over 99%" if share > 0.99 else "under 1%" if share < 0.01 else percent(share, 0)


def facts(p: RunResult) -> tuple[Fact, ...]:
    o = p.outcome
    ends = interval(o.quantile(0.05), o.quantile(0.95), span_known)
    out = [Fact("Duration", span_known(o.quantile(0.5)), f"90% interval {ends}", "" if p.fits else "bad")]
    if p.deadline:
        share = o.done_by(p.deadline)
        tone: Tone = "good" if share >= LIKELY else "warn" if share >= EVEN else "bad"
        out.append(Fact(f"Done within {span(p.deadline)}", chance_text(share), "of the drawn runs", tone))
    failures, often = float(o.failures.mean()), "none expected"
    if p.run.risk.unplanned:
        often = f"one every {span(o.quantile(0.5) / failures)}" if failures else f"one every {span(p.run.risk.mttf)}"
    out += [
        Fact("Goodput", percent(float(o.goodput.mean())), "of wall-clock time is useful training"),
        Fact("Failures", _count(failures), often),
        Fact("Energy", f"{float(p.kwh.mean()) / 1e3:,.0f} MWh", "on average"),
    ]
    if p.cost is not None:
        out.append(Fact("Cost", amount(float(p.cost.mean())), f"{p.job.terms.price:g} per GPU-hour"))
    return tuple(out)


def notes(p: RunResult) -> tuple[str, ...]:
    """What to know before trusting it."""
    risk, o = p.run.risk, p.outcome
    rate = f"{1e3 * risk.unplanned * DAY / risk.nodes:.3g} per 1,000 node-days"
    failures = f"failures: {p.run.reliability.name}; {rate}"
    errors = f"p50 {span(o.quantile_error(0.5))}, p95 {span(o.quantile_error(0.95))}"
    exact = (
        f"with exact step time and failure rates: p50 {span(p.exact.quantile(0.5))}, p95 {span(p.exact.quantile(0.95))}"
    )
    out = [
        *([exact] if p.has_model_error else []),
        failures if risk.unplanned else "no failures",
        f"standard errors of {p.draw_count:,} draws: {errors}",
    ]
    return (*policy_notes(p), *out, f"step-time noise: {p.noise}", p.job.model_error.note, *p.job.notes)


# ---- duration


def _duration_section(p: RunResult) -> Section:
    o, unit = p.outcome, time_unit(p.outcome.quantile(0.5))
    marks = {"deadline": p.deadline} if p.deadline else {}
    chart = partial(distribution_figure, o.wall, what="runs", marks=marks, unit=unit) if o.draws >= FEWEST else None
    own = ", including presage's own error of step time and failure rates" if p.has_model_error else ""
    late = f" {percent(1 - o.done_by(p.deadline))} miss the deadline." if p.deadline else ""
    text = f"{o.draws:,} runs, each with its own failures, restarts and slow steps{own}.{late} {TAIL_HELP}"
    return Section("How long", (duration_table(p), distribution_table(o.wall, unit)), chart, text)


def duration_table(p: RunResult) -> DataTable:
    """Quantiles of a step, of the run, and of what it costs."""
    rows = [
        ("step", *_cells(p.steps, seconds)),
        ("mean step of a run", *_cells(p.exact.step, seconds)),
        ("run", *_cells(p.exact.wall, span)),
        *([("run, with presage's own error", *_cells(p.outcome.wall, span))] if p.has_model_error else []),
        ("goodput", *_cells(p.outcome.goodput, percent)),
        ("ETTR (slow steps count too)", *_cells(p.outcome.ettr, percent)),
        ("failures", *_cells(p.outcome.failures, _count)),
        *([("cost", *_cells(p.cost, amount))] if p.cost is not None else []),
        ("energy, MWh", *_cells(p.kwh / 1e3, lambda x: f"{x:,.0f}" if x >= 100 else f"{x:.3g}")),
    ]
    return data_table("How long", ("", "mean", *(f"p{100 * q:.0f}" for q in LEVELS)), rows)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _cells(values: NDArray[np.float64], text: Callable[[float], str]) -> list[str]:
    every = [float(values.mean()), *map(float, quantiles(values, LEVELS))]
    return ["never" if v == inf else text(v) for v in every]


# ---- where the time goes


def _causes_section(p: RunResult) -> Section:
    shares, whole = _cause_shares(p), _finite_mean(p.outcome.wall)
    parts = [(CAUSE_NAMES[c], share * whole) for c, share in shares.items()]
    lost = max(parts[1:], key=lambda x: x[1])
    text = f"Goodput: {percent(shares['steps'])} of the time are useful steps"
    text += f"; most of the rest is {lost[0]}, {percent(lost[1] / whole)}." if lost[1] > 0 else "."
    text += " ETTR counts stalls and slow episodes as training as well."
    return Section("Where the time goes", (cause_table(p),), partial(parts_figure, parts, whole), text)


def _cause_shares(p: RunResult) -> dict[str, float]:
    """The mean share of wall-clock time by cause, of runs that end: that of useful steps is the goodput."""
    o: RunOutcome = p.outcome
    ends = ~o.never if not o.never.all() else o.never
    whole = sum(o.parts[c] for c in CAUSES)[ends]  # type: ignore[index]
    return {c: float((o.parts[c][ends] / whole).mean()) for c in CAUSES}


def _finite_mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else inf


def cause_table(p: RunResult) -> DataTable:
    """Wall-clock time by cause, on average."""
    o, shares = p.outcome, _cause_shares(p)
    rows = []
    for cause in CAUSES:
        part = o.parts[cause]
        if part.any():
            low, high = quantiles(part, [0.05, 0.95])
            mean = float(part.mean())
            rows.append((CAUSE_NAMES[cause], span(mean), percent(shares[cause]), span(float(low)), span(float(high))))
    rows.append(("run", span(_finite_mean(o.wall)), percent(1.0), "", ""))
    return data_table("Where the time goes", ("what", "time", "share", "p5", "p95"), rows, bold=(-1,))


def _stops_section(p: RunResult) -> Section | None:
    if not p.run.risk.rate:
        return None
    stops = sorted((s for s in p.outcome.stops() if s.seconds > 0), key=lambda s: -s.seconds)
    text = "Time lost to each class of failure: detection, restart and repeated steps."
    if stops:
        text += f" Most: {stops[0].name}, {span(stops[0].seconds)} in {stops[0].count:,.1f} stops."
    costs = [(s.name, s.seconds) for s in stops]
    chart = partial(parts_figure, costs, sum(t for _, t in costs)) if stops else None
    return Section("What stops it", (stop_table(p),), chart, text)


def stop_table(p: RunResult) -> DataTable:
    """Stops by class, the most expensive first."""
    every = sorted((s for s in p.outcome.stops() if s.per_node_day), key=lambda s: -s.seconds)
    rows = [
        (
            s.name,
            f"{1e3 * s.per_node_day:.3g}",
            f"{s.count:,.1f}",
            f"{s.low:,.0f}-{s.high:,.0f}",
            span(s.seconds),
            span(s.each),
        )
        for s in every[:CLASSES_SHOWN]
    ]
    rest = every[CLASSES_SHOWN:]
    if any(s.count for s in rest):
        rate, count, cost = (sum(getattr(s, k) for s in rest) for k in ("per_node_day", "count", "seconds"))
        rows.append((f"{len(rest)} others", f"{1e3 * rate:.3g}", f"{count:,.1f}", "", span(cost), span(cost / count)))
    columns = ("class", "per 1,000 node-days", "times", "p5-p95", "cost", "each")
    return data_table("What stops it", columns, rows)


# ---- what to choose


def _checkpoints_section(p: RunResult) -> Section | None:
    if not p.intervals:
        return None
    text = (
        "Checkpoint interval: too short costs writing, too long costs repeated steps. ETTR here is of closed formulas, "
        "which know checkpoints, failures and restarts alone."
    )
    return Section("Checkpoints", (interval_table(p),), None, text)


def interval_table(p: RunResult) -> DataTable:
    """Checkpoint intervals by different rules."""
    rows = [(i.name, span(i.seconds), f"{i.steps:,}", percent(i.exact), percent(i.meta)) for i in p.intervals]
    title = f"Checkpoints: {seconds(p.run.checkpoints.save)} each ({p.run.checkpoints.source})"
    strong = [k for k, i in enumerate(p.intervals) if i.name == "this run"]
    return data_table(title, ("interval by", "time", "steps", "ETTR, exact", "by Meta's formula"), rows, bold=strong)


def _changes_section(p: RunResult) -> Section | None:
    base = p.exact.quantile(0.5)
    if not p.changes:
        return None
    if not base < inf:
        return Section("What would change it", (change_table(p),))
    swings = [Swing(c.name, (c.middle / base, c.late / base)) for c in p.changes]
    best = min(swings, key=lambda s: s.changes[0])
    text = f"The run's duration with one thing changed at a time. Most saved: {best.name}, {percent(-best.changes[0])}."
    tables = (change_table(p), tornado_table(swings, "change", ("p50", "p95"), "Relative to the run"))
    chart = partial(tornado_figure, swings, ("p50", "p95"), "run duration", apart=True)
    return Section("What would change it", tables, chart, text)


def change_table(p: RunResult) -> DataTable:
    rows = [(c.name, _signed_span(c.middle), _signed_span(c.late), percent(c.ettr)) for c in p.changes]
    return data_table("What would change it", ("change", "p50", "p95", "ETTR"), rows)


def _signed_span(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{span(abs(value))}"


def _spares_section(p: RunResult) -> Section | None:
    if not p.spares:
        return None
    rows = [(f"{s.spares:,}", span(s.middle), span(s.late), span(s.waits) if s.waits else "-") for s in p.spares]
    title = f"Spare nodes (a repair takes {span(p.run.reliability.repair.mean)})"
    table = data_table(title, ("spares", "p50", "p95", "waiting"), rows)
    series = {"p50": [s.middle for s in p.spares], "p95": [s.late for s in p.spares]}
    finite = [v for values in series.values() for v in values if isfinite(v)]
    chart = partial(
        grouped_figure, [f"{s.spares:,}" for s in p.spares], series, "spare nodes", time_unit(max(finite, default=1.0))
    )
    return Section("Spare nodes", (table,), chart if finite else None, "The run with more or fewer spare nodes.")
