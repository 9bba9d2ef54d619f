"""The page of `presage run`: when a whole training run is done, how sure that is, and what would change it."""

from __future__ import annotations

from presage.report import run_tables as tables
from presage.report.html.charts.bars import parts_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.tornado import Swing, tornado_figure, tornado_table
from presage.report.html.charts.units import Unit, time_unit
from presage.report.html.page import Fact, Page, Section, Tone, plain, table_of
from presage.report.run_tables import WORDS, span
from presage.runs.outcome import CAUSES
from presage.runs.whole import RunResult
from presage.text import amount, percent

__all__ = ["run_page"]

SURE, LIKELY = 0.9, 0.5
FEWEST = 20  # draws: fewer have no shape


def run_page(p: RunResult, command: str = "") -> Page:
    """All there is to see of a run."""
    asked = plain(tables.headline(p)).split("\n")[0]
    sections = (_end(p), _causes(p), _stops(p), _changes(p), _checkpoints(p), _spares(p))
    return Page(
        title=p.job.job.name or p.job.job.model.name or "run",
        question=f"When will it be done? {asked}",
        answer=answer(p),
        facts=facts(p),
        sections=tuple(s for s in sections if s is not None),
        notes=tuple(n.removeprefix("note: ") for n in tables.remarks(p)),
        command=command,
    )


def answer(p: RunResult) -> str:
    """The one sentence."""
    o = p.outcome
    low, high = span(o.quantile(0.05)), span(o.quantile(0.95))
    sure = f"it is {_sure(p, p.deadline)} sure to be done within {span(p.deadline)}, and " if p.deadline else ""
    lost = f"{percent(1 - float(o.goodput.mean()), 0)} of the time goes to failures, checkpoints and slow steps"
    return f"The run most likely takes {span(o.quantile(0.5))} (nine runs of ten {low} to {high}): {sure}{lost}."


def _sure(p: RunResult, deadline: float) -> str:
    return tables.surely(p.outcome.done_by(deadline))


def facts(p: RunResult) -> tuple[Fact, ...]:
    o = p.outcome
    out = [Fact("The run", span(o.quantile(0.5)), f"p95 {span(o.quantile(0.95))}")]
    if p.deadline:
        share = o.done_by(p.deadline)
        tone: Tone = "good" if share >= SURE else "warn" if share >= LIKELY else "bad"
        out.append(Fact(f"Done within {span(p.deadline)}", _sure(p, p.deadline), "of the runs drawn", tone))
    failures = float(o.failures.mean())
    out += [
        Fact("Goodput", percent(float(o.goodput.mean())), "of the time, had nothing stopped or slowed it"),
        Fact("Failures", f"{failures:,.0f}" if failures >= 10 else f"{failures:.2g}", _often(p)),
        Fact("Energy", f"{float(p.kwh.mean()) / 1e3:,.0f} MWh", "on average"),
    ]
    if p.cost is not None:
        out.append(Fact("Cost", amount(float(p.cost.mean())), f"{p.job.terms.price:g} an hour for a GPU"))
    return tuple(out)


def _often(p: RunResult) -> str:
    return f"one every {span(p.run.risk.mttf)}" if p.run.risk.unplanned else "none expected"


def _unit(p: RunResult) -> Unit:
    return time_unit(p.outcome.quantile(0.5))


# ---- sections


def _end(p: RunResult) -> Section:
    o, unit = p.outcome, _unit(p)
    marks = {"deadline": p.deadline} if p.deadline else {}
    figure = distribution_figure(o.wall, what="runs", marks=marks, unit=unit) if o.draws >= FEWEST else None
    lead = f"{o.draws:,} runs drawn, each with its own failures, stops and slow steps"
    lead += ", and with presage's own error of the step time and of failure rates. " if p.unsure else ". "
    lead += "Above how many take so long, below the chance of longer"
    late = 1 - o.done_by(p.deadline) if p.deadline else 0.0
    lead += f": {percent(late)} miss the deadline." if p.deadline else "."
    return Section("How long", (table_of(tables.end_table(p)), distribution_table(o.wall, unit)), figure, lead)


def _causes(p: RunResult) -> Section:
    parts = [(WORDS[c], float(p.exact.parts[c].mean())) for c in CAUSES]
    whole = sum(took for _, took in parts)
    lost = sorted(parts[1:], key=lambda x: -x[1])
    lead = f"The mean run by what it does. {percent(parts[0][1] / whole)} are steps that count"
    lead += f"; most of the rest is {lost[0][0]}, {percent(lost[0][1] / whole)}." if lost[0][1] > 0 else "."
    figure = parts_figure(parts, whole)
    return Section("Where the time goes", (table_of(tables.cause_table(p)),), figure, lead)


def _stops(p: RunResult) -> Section | None:
    if not p.run.risk.rate:
        return None
    found = sorted((s for s in p.exact.stops() if s.seconds > 0), key=lambda s: -s.seconds)
    whole = sum(s.seconds for s in found)
    lead = "Time lost to each class of failure: noticing it, restarting, and doing steps again."
    if found:
        lead += f" Most goes to one class, {found[0].name}: {span(found[0].seconds)} in {found[0].count:,.1f} stops."
    figure = parts_figure([(s.name, s.seconds) for s in found], whole) if found else None
    return Section("What stops it", (table_of(tables.class_table(p, len(found))),), figure, lead)


def _changes(p: RunResult) -> Section | None:
    base = p.exact.quantile(0.5)
    if not p.changes or not base < float("inf"):
        return None
    swings = [Swing(c.name, (c.middle / base, c.late / base)) for c in p.changes]
    best = min(swings, key=lambda s: s.changes[0])
    lead = f"The run's end with one thing changed at a time. Most saved: {best.name}, {percent(-best.changes[0])}."
    shown = (table_of(tables.change_table(p)), tornado_table(swings, "change", ("p50", "p95"), "As shares of the run"))
    return Section("What would change it", shown, tornado_figure(swings, ("p50", "p95"), "the run", apart=True), lead)


def _checkpoints(p: RunResult) -> Section | None:
    if not p.intervals:
        return None
    lead = "How often to write a checkpoint: too often costs writing, too seldom costs steps done again."
    return Section("Checkpoints", (table_of(tables.interval_table(p)),), None, lead)


def _spares(p: RunResult) -> Section | None:
    if not p.spares:
        return None
    lead = "What more and fewer spare nodes would do."
    return Section("Spare nodes", (table_of(tables.spare_table(p)),), None, lead)
