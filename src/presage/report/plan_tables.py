"""Tables and sentences of a search for the best layout of a job."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from presage.configs.job import Job
from presage.prediction.jobs.job_prediction import JobResult
from presage.report.plain import plain_table
from presage.search import (
    PlanDifference,
    PricedPlan,
    SearchResult,
    TooLargePlan,
    compare_plans,
    faster_but_too_large,
    job_plan,
    overheads,
    plan_words,
)
from presage.search.search_result import SearchCounts
from presage.text import percent, seconds, size

__all__ = ["best_table", "counts_line", "explanation", "front_table", "headline", "knob_table", "nothing_fits"]

PARTS = {
    "products": "matrix products", "attention": "attention", "streams": "passes over memory",
    "tp": "tensor-parallel transfers", "cp": "context-parallel transfers", "ep": "transfers to experts",
    "pp": "transfers between stages", "dp": "transfers between replicas", "sharding": "waits for sharded parameters",
    "bubble": "pipeline bubble", "host": "waits for the host", "optimizer": "optimizer",
}  # fmt: skip
SHOWN = 12  # of the front
TOLD = 3  # parts in a sentence
BY = {"micro_batch": "micro batch", "expert_tp": "expert tp"}


def headline(job: Job, found: SearchResult) -> str:
    best = found.best[0]
    what = f"{job.name or job.model.name} on {best.job.gpus:,} {job.platform.gpu.name} ({job.platform.key})"
    goal = {
        "cost": f", {best.seconds * best.job.gpus:,.0f} GPU-seconds",
        "p95": f", 19 of 20 in at most {seconds(found.late[0].value)}" if found.late else "",
    }.get(found.objective, "")
    return (
        f"{what}, {job.global_batch:,} samples of {job.sequence:,} tokens a step\n"
        f"{plan_words(job_plan(best.job))}: {seconds(best.seconds)} a step{goal}, MFU {percent(best.mfu)}, "
        f"{size(best.memory.needed)} of {size(best.memory.memory)}"
    )


def counts_line(counts: SearchCounts, complete: bool) -> str:
    """How many plans there were."""
    cut = "" if complete else "; the limit was reached before all was certain"
    return (
        f"{counts.legal:,} legal plans: {counts.too_large:,} need more memory than there is, {counts.set_aside:,} were "
        f"proven slower from a bound, {counts.priced:,} were priced{cut}"
    )


def nothing_fits(job: Job, counts: SearchCounts) -> str:
    memory = float(job.platform.gpu.memory)
    return (
        f"None of {counts.legal:,} legal plans fits in {size(memory)}: the most frugal needs {size(counts.smallest)}. "
        "More GPUs, a shorter sequence or a smaller global batch may help."
    )


def best_table(found: SearchResult) -> Table:
    """The best ones, and the job's own."""
    several = len({p.job.gpus for p in found.best}) > 1
    late = ["p95", "error", "later"] if found.late else []
    columns = ["plan", *(["GPUs"] if several else []), *late, "step", "slower", "MFU", "tokens/s/GPU", "memory", "left"]
    table = plain_table("Best plans" + (f" (noise: {found.noise})" if late else ""), *columns)
    for k, p in enumerate(found.best):
        table.add_row(*_row(p, found, k, several))
    if found.own is not None:
        table.add_row(*_row(found.own, found, len(found.best), several, "the job's own: "), style="bold")
    return table


def _late(found: SearchResult, k: int) -> list[str]:
    if not found.late:
        return []
    e, first = found.late[k], found.late[0]
    return [seconds(e.value), seconds(e.error), percent(e.value / first.value - 1) if e is not first else "-"]


def _row(p: JobResult, found: SearchResult, k: int, several: bool, called: str = "") -> list[str]:
    best = found.best[0].seconds
    left = size(p.memory.margin) if p.memory.margin >= 0 else f"{size(-p.memory.margin)} too much"
    slower = percent(p.seconds / best - 1) if p.seconds != best else "-"
    return [
        called + plan_words(job_plan(p.job)), *([f"{p.job.gpus:,}"] if several else []), *_late(found, k),
        seconds(p.seconds), slower,
        percent(p.mfu), f"{p.tokens_per_second_per_gpu:,.0f}", size(p.memory.needed), left,
    ]  # fmt: skip


def front_table(front: Sequence[PricedPlan]) -> Table:
    """Of many as few as show its course."""
    table = plain_table("Time against memory: no plan is better in both", "plan", "step", "memory")
    last = len(front) - 1
    shown = range(len(front)) if last < SHOWN else sorted({round(i * last / (SHOWN - 1)) for i in range(SHOWN)})
    for i in shown:
        table.add_row(plan_words(front[i].layout), seconds(front[i].seconds), size(front[i].needed))
    return table


def knob_table(found: SearchResult) -> Table:
    """What it costs to be held to a choice: the best plan with each."""
    table = plain_table(
        "The best plan with each choice, and how much slower it is than the best of all", "knob", "choices"
    )
    best = next(iter(found.by_knob["tp"].values()))
    for name, choices in found.by_knob.items():
        if len(choices) > 1:
            told = (f"{word} {_worse(_value(found, s) / _value(found, best) - 1)}" for word, s in choices.items())
            table.add_row(BY.get(name, name), "   ".join(told))
    table.columns[1].justify = "left"
    return table


def _value(found: SearchResult, s: PricedPlan) -> float:
    return s.seconds * (s.layout.gpus if found.objective == "cost" else 1)


def _worse(share: float) -> str:
    return "best" if share < 5e-4 else f"{1 + share:.3g} times" if share >= 1 else f"+{percent(share)}"


def explanation(found: SearchResult) -> list[str]:
    """Sentences: what the best does better, what holds it back."""
    best = found.best[0]
    out = []
    if found.own is not None and job_plan(found.own.job) != job_plan(best.job):
        out.append(_against("The job's own plan", compare_plans(best, found.own), found.own))
    if len(found.best) > 1:
        out.append(_against("The runner-up", compare_plans(best, found.best[1]), found.best[1]))
    out.append(_held_back(best))
    return [*out, _memory(best, faster_but_too_large(found))]


def _against(who: str, d: PlanDifference, other: JobResult) -> str:
    changes = ", ".join(f"{BY.get(k, k)} {there} for {here}" for k, here, there in d.knobs) or "layers dealt otherwise"
    more = [f"{seconds(s)} more {PARTS.get(k, k)}" for k, s in d.parts if s > 0][:TOLD]
    less = [f"{seconds(-s)} less {PARTS.get(k, k)}" for k, s in d.parts if s < 0][:TOLD]
    because = f": {', '.join([*more, *less])}" if more or less else ""
    if not other.memory.fits:
        because += f"; it needs {size(-other.memory.margin)} more memory than there is"
    slower = f"{seconds(d.seconds)} slower" if d.seconds >= 0 else f"{seconds(-d.seconds)} faster"
    return f"{who} ({changes}) is {slower}{because}."


def _held_back(best: JobResult) -> str:
    share = percent(best.compute / best.seconds)
    rest = ", ".join(f"{PARTS.get(k, k)} {seconds(s)} ({percent(s / best.seconds)})" for k, s in overheads(best)[:TOLD])
    return f"{share} of the step is compute" + (f"; of the rest most goes to {rest}." if rest else ".")


def _memory(best: JobResult, faster: list[TooLargePlan]) -> str:
    if not faster:
        return "Memory does not bind: no plan next to it that memory rules out would be faster."
    first = faster[0]
    saved, over = percent(1 - first.seconds / best.seconds), size(first.needed - best.memory.memory)
    return f"Memory binds: {plan_words(first.layout)} would be {saved} faster, but needs {over} more than there is."
