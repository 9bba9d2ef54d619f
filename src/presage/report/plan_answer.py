"""The answer of `presage plan`: the best parallel layout of a job, its alternatives, and what each choice costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from presage.configs.job import Job
from presage.prediction.jobs.job_prediction import JobResult
from presage.report.answer import Answer, DataTable, Fact, Section, data_table
from presage.report.html.charts.bars import stacks_figure, time_unit
from presage.report.html.charts.points import PLANS_SHOWN, PlanPoint, pareto_figure
from presage.report.terms import gpu_basis, part_name, signed, step_text, step_time
from presage.search import (
    PlanDifference,
    PricedPlan,
    SearchResult,
    compare_plans,
    job_plan,
    overheads,
    plan_words,
)
from presage.search.evidence import evidence
from presage.search.search_result import SearchCounts
from presage.text import percent, seconds, size

FRONT_SHOWN = 12  # plans
NAMED_PARTS = 3  # parts in a sentence
COMPARED = 8  # plans side by side
EQUAL = 5e-4
KNOBS = {"micro_batch": "micro batch", "expert_tp": "expert tp"}


def plan_data(job: Job, found: SearchResult) -> dict[str, Any]:
    """The JSON."""
    said = evidence(found.best[0].job) if found.best else []
    return found.to_json(job) | {"explanation": explanation(found) if found.best else [], "evidence": said}


def plan_answer(job: Job, found: SearchResult) -> Answer:
    """Everything `presage plan` shows."""
    to_data = partial(plan_data, job, found)
    name = job.name or job.model.name or "job"
    where = f"{job.platform.gpu.name} ({job.platform.key})"
    subject = f"{name} on {where}, {job.global_batch:,} samples of {job.sequence:,} tokens per step"
    question, counts = "Which parallel layout is best?", _counts_section(found.counts)
    if not found.best:
        return Answer(
            name, nothing_fits(job, found.counts), subject, question, _count_facts(found), (counts,), (), to_data
        )
    sections = (
        _best_section(found),
        _front_section(found),
        Section("What each choice costs", (knob_line_table(found), _knob_table(found)), None, KNOB_HELP),
        Section("Why", text="\n".join(explanation(found))),
    )
    notes = (counts_line(found.counts, found.complete), *evidence(found.best[0].job))
    notes += (f"noise: {found.noise}",) if found.noise else ()
    basis = gpu_basis(job.platform.gpu)
    return Answer(name, headline(found), subject, question, facts(found), sections, notes, to_data, basis=basis)


KNOB_HELP = "The best plan with each choice, against the best of all."


def headline(found: SearchResult) -> str:
    best = found.best[0]
    goal = {
        "cost": f", {best.seconds * best.job.gpus:,.0f} GPU-seconds",
        "p95": f" (p95 {seconds(found.late[0].value)})" if found.late else "",
    }.get(found.objective, "")
    memory = f"{size(best.memory.needed)} of {size(best.memory.memory)}"
    return (
        f"Best of {found.counts.legal:,} plans on {best.job.gpus:,} GPUs: {plan_words(job_plan(best.job))}: "
        f"{step_text(found.chosen.step)}{goal}, MFU {percent(found.chosen.mfu)}, {memory}{_than_own(found)}."
    )


def _value(p: JobResult | PricedPlan, found: SearchResult) -> float:
    """The objective: seconds per step, or GPU-seconds."""
    gpus = p.job.gpus if isinstance(p, JobResult) else p.layout.gpus
    return p.seconds * (gpus if found.objective == "cost" else 1)


def _than_own(found: SearchResult) -> str:
    own, best = found.own, found.best[0]
    if own is None:
        return ""
    gain = 1 - _value(best, found) / _value(own, found)
    if not own.memory.fits:
        return "; the job's own plan does not fit"
    if abs(gain) < EQUAL:
        return "; as good as the job's own plan"
    less, more = ("cheaper", "more expensive") if found.objective == "cost" else ("faster", "slower")
    return f"; {percent(abs(gain))} {less if gain > 0 else more} than the job's own plan"


def counts_line(counts: SearchCounts, complete: bool) -> str:
    """How many plans were considered."""
    cut = "" if complete else "; the limit was reached before the search was complete"
    return (
        f"{counts.legal:,} legal plans: {counts.too_large:,} do not fit in memory, {counts.set_aside:,} are slower by "
        f"a bound, {counts.priced:,} were evaluated{cut}"
    )


def nothing_fits(job: Job, counts: SearchCounts) -> str:
    memory = float(job.platform.gpu.memory)
    return (
        f"None of {counts.legal:,} legal plans fits in {size(memory)}: the smallest needs {size(counts.smallest)}. "
        "More GPUs, a shorter sequence or a smaller global batch may help."
    )


def facts(found: SearchResult) -> tuple[Fact, ...]:
    best, own = found.best[0], found.own
    late = f"p95 {seconds(found.late[0].value)}" if found.late else f"{best.job.gpus:,} GPUs"
    out = [
        Fact("Step time", step_time(found.chosen.step), late),
        Fact("MFU", percent(found.chosen.mfu), f"{found.chosen.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"),
        Fact("Memory per GPU", size(best.memory.needed), f"of {size(best.memory.memory)}", "good"),
    ]
    if own is not None:
        fits = "" if own.memory.fits else f"; {size(-own.memory.margin)} too much memory"
        slower = signed(
            own.seconds / best.seconds - 1
        )  # plans are compared by steps without noise, unlike the first card
        out.append(
            Fact("The job's own plan", slower, f"step time against the best{fits}", "" if own.memory.fits else "bad")
        )
    return (*out, *_count_facts(found))


def _count_facts(found: SearchResult) -> tuple[Fact, ...]:
    c = found.counts
    return (
        Fact("Legal plans", f"{c.legal:,}"),
        Fact("Fit in memory", f"{c.fit:,}", f"the smallest needs {size(c.smallest)}", "" if c.fit else "bad"),
    )


# ---- the best plans


def _best_section(found: SearchResult) -> Section:
    """The best plans, and which parts make the others slower."""
    plans = [*found.best[:COMPARED], *([found.own] if found.own else [])]
    names = [f"{k + 1}" for k in range(len(found.best[:COMPARED]))] + (["own"] if found.own else [])
    kinds, best = _kinds(plans), plans[0]
    more = {part_name(k): [p.breakdown.get(k, 0.0) - best.breakdown.get(k, 0.0) for p in plans[1:]] for k in kinds}
    unit = time_unit(max((abs(v) for row in more.values() for v in row), default=1.0))
    chart = partial(stacks_figure, names[1:], more, "plan", unit) if plans[1:] else None
    text = "What makes the other plans slower (up) or faster (down) than the best, in the table's order."
    rows = [
        (n, *(seconds(p.breakdown.get(k, 0.0)) for k in kinds), seconds(p.seconds))
        for n, p in zip(names, plans, strict=True)
    ]
    breakdown = data_table("Breakdown", ("plan", *map(part_name, kinds), "step"), rows, where="page")
    return Section("The best plans", (best_table(found), breakdown), chart, text if chart else "")


def _kinds(plans: Sequence[JobResult]) -> list[str]:
    seen = dict.fromkeys(k for p in plans for k in p.breakdown)
    return [k for k in seen if any(p.breakdown.get(k, 0.0) > 1e-6 * p.seconds for p in plans)]


def best_table(found: SearchResult) -> DataTable:
    """The best plans, and the job's own."""
    several = len({p.job.gpus for p in found.best}) > 1
    late = ["p95", "error", "later"] if found.late else []
    columns = ["plan", *(["GPUs"] if several else []), *late, "step", "slower", "MFU", "tokens/s/GPU", "memory", "free"]
    rows = [_row(p, found, k, several) for k, p in enumerate(found.best)]
    if found.own is not None:
        rows.append(_row(found.own, found, len(found.best), several, "the job's own: "))
    title = "Best plans" + (f" (noise: {found.noise})" if late else "")
    return data_table(title, columns, rows, bold=(-1,) if found.own is not None else (), wrap=True)


def _late(found: SearchResult, k: int) -> list[str]:
    if not found.late:
        return []
    e, first = found.late[k], found.late[0]
    return [seconds(e.value), seconds(e.error), percent(e.value / first.value - 1) if e is not first else "-"]


def _row(p: JobResult, found: SearchResult, k: int, several: bool, prefix: str = "") -> list[str]:
    best = found.best[0].seconds
    free = size(p.memory.margin) if p.memory.margin >= 0 else f"{size(-p.memory.margin)} too much"
    slower = percent(p.seconds / best - 1) if p.seconds != best else "-"
    return [
        prefix + plan_words(job_plan(p.job)), *([f"{p.job.gpus:,}"] if several else []), *_late(found, k),
        seconds(p.seconds), slower,
        percent(p.mfu), f"{p.tokens_per_second_per_gpu:,.0f}", size(p.memory.needed), free,
    ]  # fmt: skip


# ---- time against memory


def _front_section(found: SearchResult) -> Section:
    best, own = found.best[0], found.own
    times = best.job.gpus if found.objective == "cost" else 1
    too_large = [PlanPoint(plan_words(m.layout), m.seconds * times, m.needed) for m in found.too_large]
    chart = partial(
        pareto_figure, [_point(s, found) for s in found.cloud], [_point(s, found) for s in found.front],
        best.memory.memory, _point(best, found), _point(own, found) if own else None, too_large,
        "GPU-seconds per step" if found.objective == "cost" else "step time",
    )  # fmt: skip
    last = min(found.front, key=lambda s: s.needed)
    text = f"Each dot is one of {found.counts.priced:,} evaluated plans; the line is the Pareto front."
    if last.needed < best.memory.needed:
        saved, more = size(best.memory.needed - last.needed), percent(_value(last, found) / _value(best, found) - 1)
        text += f" Its smallest plan needs {saved} less than the best and is {more} slower."
    if len(found.cloud) > PLANS_SHOWN:
        text += f" {PLANS_SHOWN:,} dots are shown, all of them near the front."
    if too_large:
        text += f" {len(too_large)} faster plans near the best do not fit (crosses)."
    rows = [(p.name, seconds(p.seconds), size(p.needed)) for p in too_large]
    large = [data_table("Faster, but too large", ("plan", "step", "memory"), rows, where="page")] if too_large else []
    return Section("Time against memory", (front_table(found.front), *large), chart, text)


def _point(s: PricedPlan | JobResult, found: SearchResult) -> PlanPoint:
    if isinstance(s, JobResult):
        return PlanPoint(plan_words(job_plan(s.job)), _value(s, found), s.memory.needed)
    return PlanPoint(plan_words(s.layout), _value(s, found), s.needed)


def front_table(front: Sequence[PricedPlan]) -> DataTable:
    """The Pareto front; of a long one, plans evenly spaced along it."""
    last = len(front) - 1
    few = sorted({round(i * last / (FRONT_SHOWN - 1)) for i in range(FRONT_SHOWN)})
    shown = range(len(front)) if last < FRONT_SHOWN else few
    rows = [(plan_words(front[i].layout), seconds(front[i].seconds), size(front[i].needed)) for i in shown]
    return data_table("Pareto front: time against memory", ("plan", "step", "memory"), rows, wrap=True)


# ---- choices


def knob_line_table(found: SearchResult) -> DataTable:
    """The cost of each choice, one knob per row: for the terminal."""
    best = _value(next(iter(found.by_knob["tp"].values())), found)
    rows = [
        (
            KNOBS.get(name, name),
            "   ".join(f"{word} {_worse(_value(s, found) / best - 1)}" for word, s in choices.items()),
        )
        for name, choices in found.by_knob.items()
        if len(choices) > 1
    ]
    title = "The best plan with each choice, and how much slower it is"
    return data_table(title, ("knob", "choices"), rows, text=2, wrap=True, where="terminal")


def _worse(share: float) -> str:
    return "best" if share < EQUAL else f"{1 + share:.3g} times" if share >= 1 else f"+{percent(share)}"


def _knob_table(found: SearchResult) -> DataTable:
    """The cost of each choice, one choice per row: for the page."""
    best = _value(next(iter(found.by_knob["tp"].values())), found)
    rows = [
        (
            KNOBS.get(knob, knob),
            word,
            signed(_value(s, found) / best - 1),
            seconds(s.seconds),
            size(s.needed),
            plan_words(s.layout),
        )
        for knob, choices in found.by_knob.items()
        if len(choices) > 1
        for word, s in choices.items()
    ]
    columns = ("knob", "choice", "more expensive" if found.objective == "cost" else "slower", "step", "memory", "plan")
    return data_table("The best plan with each choice", columns, rows, text=(0, 1, 5), where="page")


# ---- explanation


def explanation(found: SearchResult) -> list[str]:
    """Sentences: why the best is better, and what limits it."""
    best = found.best[0]
    out = []
    if found.own is not None and job_plan(found.own.job) != job_plan(best.job):
        out.append(_against("The job's own plan", compare_plans(best, found.own), found.own))
    if len(found.best) > 1:
        out.append(_against("The runner-up", compare_plans(best, found.best[1]), found.best[1]))
    return [*out, _limits(best), _memory(best, found.too_large)]


def _against(who: str, d: PlanDifference, other: JobResult) -> str:
    changes = ", ".join(f"{KNOBS.get(k, k)} {there} for {here}" for k, here, there in d.knobs) or "another layer split"
    more = [f"{seconds(s)} more {part_name(k)}" for k, s in d.parts if s > 0][:NAMED_PARTS]
    less = [f"{seconds(-s)} less {part_name(k)}" for k, s in d.parts if s < 0][:NAMED_PARTS]
    because = f": {', '.join([*more, *less])}" if more or less else ""
    if not other.memory.fits:
        because += f"; it needs {size(-other.memory.margin)} more memory than there is"
    slower = f"{seconds(d.seconds)} slower" if d.seconds >= 0 else f"{seconds(-d.seconds)} faster"
    return f"{who} ({changes}) is {slower}{because}."


def _limits(best: JobResult) -> str:
    rest = ", ".join(
        f"{part_name(k)} {seconds(s)} ({percent(s / best.seconds)})" for k, s in overheads(best)[:NAMED_PARTS]
    )
    return f"{percent(best.compute / best.seconds)} of the step is compute" + (
        f"; most of the rest is {rest}." if rest else "."
    )


def _memory(best: JobResult, faster: Sequence[PricedPlan]) -> str:
    if not faster:
        return "Memory is not the limit: no neighbouring plan that does not fit would be faster."
    first = faster[0]
    saved, over = percent(1 - first.seconds / best.seconds), size(first.needed - best.memory.memory)
    return (
        f"Memory is the limit: {plan_words(first.layout)} would be {saved} faster, but needs {over} more than there is."
    )


def _counts_section(c: SearchCounts) -> Section:
    rows = (
        ("legal plans", c.legal),
        ("do not fit in memory", c.too_large),
        ("slower by a bound, not evaluated", c.set_aside),
        ("evaluated", c.priced),
    )
    cells = [(name, f"{n:,}", percent(n / c.legal if c.legal else 0.0)) for name, n in rows]
    text = f"{percent(c.too_large / c.legal)} of the legal plans need more memory than a GPU has." if c.legal else ""
    table = data_table("Plans", ("plans", "count", "share"), cells)
    return Section("Plans considered", (table,), None, text, where="page")
