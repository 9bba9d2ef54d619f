"""The page of `presage plan`: the best way to lay a job out, the others, and what was dropped."""

from __future__ import annotations

from collections.abc import Sequence

from presage.configs.job import Job
from presage.prediction.jobs.job_prediction import JobResult
from presage.report import plan_tables as tables
from presage.report.html.charts.pareto import POINTS, Point, pareto_figure
from presage.report.html.charts.stacks import stacks_figure
from presage.report.html.charts.units import time_unit
from presage.report.html.page import Fact, Page, Section, Table, table_of
from presage.search import PricedPlan, SearchResult, faster_but_too_large, job_plan, plan_words
from presage.search.search_result import SearchCounts
from presage.text import percent, seconds, size

__all__ = ["plan_page"]

COMPARED = 8  # plans beside each other
ALIKE = 5e-4


def plan_page(job: Job, found: SearchResult, command: str = "") -> Page:
    """All there is to see of a search."""
    name = job.name or job.model.name or "job"
    asked = f"Which plan is best? {name} on {job.platform.gpu.name} ({job.platform.key}), {job.global_batch:,} samples"
    asked += f" of {job.sequence:,} tokens a step"
    if not found.best:
        shown = Section("What was dropped", (_counts_table(found.counts),))
        return Page(name, asked, tables.nothing_fits(job, found.counts), _counted(found), (shown,), (), command)
    sections = (_pareto(found), _best(found), _knobs(found), _dropped(found))
    notes = (
        f"{tables.counts_line(found.counts, found.complete)}.",
        *([f"noise: {found.noise}"] if found.noise else []),
    )
    return Page(name, asked, answer(found), facts(found), sections, notes, command)


def answer(found: SearchResult) -> str:
    """The one sentence."""
    best = found.best[0]
    late = f" (19 of 20 at most {seconds(found.late[0].value)})" if found.late else ""
    late += f" ({best.seconds * best.job.gpus:,.0f} GPU-seconds)" if found.objective == "cost" else ""
    room = f"{size(best.memory.margin)} of memory to spare"
    plan = (
        f"The best of {found.counts.legal:,} plans takes {seconds(best.seconds)} a step on {best.job.gpus:,} GPUs{late}"
    )
    return f"{plan}{_than_own(found)}, with {room}: {plain_words(best.job)}."


def plain_words(job: Job) -> str:
    """The degrees of a plan, in words."""
    q = job.parallel
    kinds = (("tensor", q.tp), ("context", q.cp), ("pipeline", q.pp), ("expert", q.ep))
    said = [f"{name} parallel {n}" for name, n in kinds if n > 1]
    return ", ".join([*said, f"data parallel {job.dp:,}"])


def _value(p: JobResult | PricedPlan, found: SearchResult) -> float:
    """What is compared: seconds of a step, or of all GPUs where the cost is sought."""
    gpus = p.job.gpus if isinstance(p, JobResult) else p.layout.gpus
    return p.seconds * (gpus if found.objective == "cost" else 1)


def _than_own(found: SearchResult) -> str:
    own, best = found.own, found.best[0]
    if own is None:
        return ""
    gain = 1 - _value(best, found) / _value(own, found)
    if not own.memory.fits:
        return ", where the job's own plan does not fit"
    if abs(gain) < ALIKE:
        return ", as good as the job's own plan"
    less, more = ("cheaper", "dearer") if found.objective == "cost" else ("quicker", "longer")
    return f", {percent(abs(gain))} {less if gain > 0 else more} than the job's own plan"


def facts(found: SearchResult) -> tuple[Fact, ...]:
    best, own = found.best[0], found.own
    late = f"p95 {seconds(found.late[0].value)}" if found.late else f"{best.job.gpus:,} GPUs"
    out = [
        Fact("Step time", seconds(best.seconds), late),
        Fact("MFU", percent(best.mfu), f"{best.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"),
        Fact("Memory of a GPU", size(best.memory.needed), f"of {size(best.memory.memory)}", "good"),
    ]
    if own is not None:
        slower = f"{100 * (own.seconds / best.seconds - 1):+.1f}% against the best"
        fits = "" if own.memory.fits else f"; {size(-own.memory.margin)} too much memory"
        out.append(Fact("The job's own plan", seconds(own.seconds), slower + fits, "" if own.memory.fits else "bad"))
    return (*out, *_counted(found))


def _counted(found: SearchResult) -> tuple[Fact, ...]:
    c = found.counts
    return (
        Fact(
            "Legal plans", f"{c.legal:,}", f"searched in {seconds(found.took)}" if not found.best else "all looked at"
        ),
        Fact("That fit in memory", f"{c.fit:,}", f"the most frugal needs {size(c.smallest)}", "" if c.fit else "bad"),
    )


# ---- time against memory


def _pareto(found: SearchResult) -> Section:
    best, own = found.best[0], found.own
    cost = found.objective == "cost"
    times = best.job.gpus if cost else 1
    too_large = [Point(plan_words(m.layout), m.seconds * times, m.needed) for m in faster_but_too_large(found)]
    figure = pareto_figure(
        [_point(s, found) for s in found.cloud], [_point(s, found) for s in found.front], best.memory.memory,
        _made(best, found), _made(own, found) if own else None, too_large,
        "GPU time of a step" if cost else "time of a step",
    )  # fmt: skip
    last = min(found.front, key=lambda s: s.needed)
    lead = f"Each dot is one of {found.counts.priced:,} plans that were priced; none is better in both than the line."
    if last.needed < best.memory.needed:
        saved, more = size(best.memory.needed - last.needed), percent(_value(last, found) / _value(best, found) - 1)
        lead += f" The most frugal of them needs {saved} less than the best and takes {more} longer."
    if len(found.cloud) > POINTS:
        lead += f" {POINTS:,} dots are shown: all near the line, and of the others evenly many."
    if too_large:
        lead += f" {len(too_large)} plans next to the best would be quicker and do not fit (crosses)."
    shown = (table_of(tables.front_table(found.front)), *([_large_table(too_large)] if too_large else []))
    return Section("Time against memory", shown, figure, lead)


def _point(s: PricedPlan, found: SearchResult) -> Point:
    return Point(plan_words(s.layout), _value(s, found), s.needed)


def _made(p: JobResult, found: SearchResult) -> Point:
    return Point(plan_words(job_plan(p.job)), _value(p, found), p.memory.needed)


def _large_table(points: Sequence[Point]) -> Table:
    rows = tuple((p.name, seconds(p.seconds), size(p.needed)) for p in points)
    return Table(("plan", "step", "memory"), rows, "Quicker, but too large")


# ---- the best


def _best(found: SearchResult) -> Section:
    """What the next best plans take longer for than the best."""
    plans = [*found.best[:COMPARED], *([found.own] if found.own else [])]
    names = [f"{k + 1}" for k in range(len(found.best[:COMPARED]))] + (["own"] if found.own else [])
    kinds, best = _kinds(plans), plans[0]
    more = {
        tables.PARTS.get(k, k): [p.breakdown.get(k, 0.0) - best.breakdown.get(k, 0.0) for p in plans[1:]] for k in kinds
    }
    unit = time_unit(max((abs(v) for row in more.values() for v in row), default=1.0))
    figure = stacks_figure(names[1:], more, "plan", unit) if plans[1:] else None
    shown = (table_of(tables.best_table(found)), _parts_table(plans, names, kinds))
    lead = " ".join(tables.explanation(found))
    if figure:
        lead += (
            " Bars: what the other plans take longer (up) or shorter (down) for than the best, in the table's order."
        )
    return Section("The best plans", shown, figure, lead)


def _parts_table(plans: Sequence[JobResult], names: Sequence[str], kinds: Sequence[str]) -> Table:
    rows = tuple(
        (name, *(seconds(p.breakdown.get(k, 0.0)) for k in kinds), seconds(p.seconds))
        for name, p in zip(names, plans, strict=True)
    )
    return Table(("plan", *(tables.PARTS.get(k, k) for k in kinds), "step"), rows, "Where their steps go")


def _kinds(plans: Sequence[JobResult]) -> list[str]:
    seen = dict.fromkeys(k for p in plans for k in p.breakdown)
    return [k for k in seen if any(p.breakdown.get(k, 0.0) > 1e-6 * p.seconds for p in plans)]


def _knobs(found: SearchResult) -> Section:
    lead = "What it costs to be held to a choice: the best plan with each, against the best of all."
    return Section("What each choice costs", (_knob_table(found),), None, lead)


def _knob_table(found: SearchResult) -> Table:
    """A row for each choice of each knob that has several."""
    best = _value(next(iter(found.by_knob["tp"].values())), found)
    rows = tuple(
        (tables.BY.get(knob, knob), word, f"{100 * (_value(s, found) / best - 1):+.1f}%", seconds(s.seconds),
         size(s.needed), plan_words(s.layout))
        for knob, choices in found.by_knob.items()
        if len(choices) > 1
        for word, s in choices.items()
    )  # fmt: skip
    columns = (
        "knob",
        "choice",
        "costlier" if found.objective == "cost" else "slower",
        "step",
        "memory",
        "the best plan with it",
    )
    return Table(columns, rows, "The best plan with each choice", frozenset({0, 1, 5}))


# ---- what was dropped


def _dropped(found: SearchResult) -> Section:
    c = found.counts
    lead = f"{percent(c.too_large / c.legal)} of the legal plans need more memory than a GPU has." if c.legal else ""
    return Section("What was dropped", (_counts_table(c),), None, lead)


def _counts_table(c: SearchCounts) -> Table:
    rows = (
        ("legal plans", c.legal),
        ("need more memory than there is", c.too_large),
        ("proven slower from a bound, without a price", c.set_aside),
        ("priced", c.priced),
    )
    told = tuple((name, f"{n:,}", percent(n / c.legal if c.legal else 0.0)) for name, n in rows)
    return Table(("what became of them", "plans", "share"), told, "Plans")
