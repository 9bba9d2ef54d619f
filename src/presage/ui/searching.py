"""What takes a page a while: the search for the best plans, and plans on fewer and more GPUs. One at a time, with its
progress, and cut off with what it has found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from presage.errors import PresageError
from presage.report.html.charts.bars import time_unit
from presage.report.html.charts.points import PlanPoint, pareto_figure
from presage.report.html.theme import ACCENT
from presage.report.terms import count_text
from presage.search import SearchProgress, SearchResult, job_plan, plan_words, search
from presage.search.plans import KNOBS as PLAN_KNOBS
from presage.search.plans import knob
from presage.search.search_result import StopSearch
from presage.text import percent, seconds, size
from presage.ui.knobs import KNOBS, InvalidPlan
from presage.ui.plans import job_of_text, plan_like, plan_of, plan_of_text, text_of
from presage.ui.repairs import repair_plan

if TYPE_CHECKING:
    from presage.prediction.jobs.job_prediction import JobResult

PATIENCE = 60.0  # seconds of a search
SURVEY = 0.6  # of them at most go to looking at what fits
TOP = 10
COLUMNS = {
    "tp": "tp", "cp": "cp", "pp": "pp", "virtual": "chunks", "schedule": "schedule", "ep": "ep", "dp": "dp",
    "micro_batch": "microbatch", "sharding": "sharding", "recompute": "recompute",
}  # fmt: skip


class SearchUnderWay:
    """The one search that runs: whose it is, how far it has come, and whether it should end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.page, self.begun, self.stopped = "", 0.0, False
        self.now: SearchProgress | None = None
        self.swept = 0, 0  # points of a sweep that are done, of how many

    def start(self, page: str) -> None:
        if not self.lock.acquire(blocking=False):
            raise InvalidPlan("another search is running: try again when it is done")
        self.page, self.begun, self.stopped, self.now, self.swept = page, time.monotonic(), False, None, (0, 0)

    def end(self) -> None:
        self.page, self.now = "", None
        self.lock.release()

    def tell(self, now: SearchProgress) -> None:
        self.now = now
        share = SURVEY if now.what == "surveying" else 1.0
        if self.stopped or time.monotonic() - self.begun > share * PATIENCE:
            raise StopSearch


UNDER_WAY = SearchUnderWay()


def find_plans(text: str, page: str, tell: Callable[[SearchProgress], None] | None = None) -> SearchResult:
    """The ten best plans for the job of a text on as many GPUs, or those of a search that was cut off."""
    job = job_of_text(text, checked=False)
    UNDER_WAY.start(page)
    try:
        found = search(job, job.gpus, top=TOP, tell=tell or UNDER_WAY.tell)
    finally:
        UNDER_WAY.end()
    if not found.best:
        more = "" if found.complete else " so far: presage plan JOB.toml has no limit"
        raise InvalidPlan(f"no plan fits on these GPUs{more or ': use more or larger ones'}", ("gpus",))
    return found


def stop(page: Any) -> None:
    """Ends the search of this page, if it is that which runs."""
    if page and UNDER_WAY.page == page:
        UNDER_WAY.stopped = True


def progress(page: Any) -> tuple[float, str]:
    """Percent done, and a sentence with the time left."""
    now, begun = UNDER_WAY.now, UNDER_WAY.begun
    if not page or UNDER_WAY.page != page or (now is None and not UNDER_WAY.swept[1]):
        return 0.0, "Searching …"
    spent = time.monotonic() - begun
    done, points = UNDER_WAY.swept
    if points or now is None:
        more = f"; about {max(1.0, spent * (points - done) / done):.0f} s left" if done else ""
        return 100 * done / points, f"{done} of {points} points{more}"
    if now.what == "surveying":
        share = 0.5 * now.done / max(1, now.total)
        left = min(2 * spent * (1 - share) / max(share, 1e-3) / 2, PATIENCE - spent)
        return 100 * share, f"{count_text(now.plans)} plans looked at; about {max(1.0, left):.0f} s left"
    share = max(0.5, min(0.98, spent / PATIENCE))
    return 100 * share, f"best so far {seconds(now.best)}/step; at most {max(1.0, PATIENCE - spent):.0f} s left"


# ---- what is shown of it


def plan_rows(text: str, found: SearchResult) -> dict[str, Any]:
    """A table of the best plans with the columns in which they differ, and the controls' values of each."""
    plans = [job_plan(p.job) for p in found.best]
    words = [{name: knob(plan, name) for name in PLAN_KNOBS} for plan in plans]
    names = [n for n in COLUMNS if len({w[n] for w in words}) > 1 or n in ("tp", "pp", "dp")]
    rows = [[*(w[n] for n in names), *_figures(p, found.best[0])] for w, p in zip(words, found.best, strict=True)]
    made = [plan_like(text, p.job) for p in found.best]
    values = [{"values": [m.knobs[k.name] for k in KNOBS], "rest": dict(m.rest)} for m in made]
    return {"head": [*(COLUMNS[n] for n in names), "step", "slower", "memory", "MFU"], "rows": rows, "plans": values}


def _figures(p: JobResult, best: JobResult) -> list[str]:
    slower = "" if p is best else f"+{percent(p.seconds / best.seconds - 1)}"
    return [seconds(p.seconds), slower, size(p.memory.needed), percent(p.mfu)]


def plan_scatter(found: SearchResult) -> Any:
    """Time against memory of all plans that were evaluated."""
    best, own = found.best[0], found.own
    cloud = [PlanPoint(plan_words(s.layout), s.seconds, s.needed) for s in found.cloud]
    front = [PlanPoint(plan_words(s.layout), s.seconds, s.needed) for s in found.front]
    return pareto_figure(cloud, front, best.memory.memory, _point(best), _point(own) if own else None)


def _point(p: JobResult) -> PlanPoint:
    return PlanPoint(plan_words(job_plan(p.job)), p.seconds, p.memory.needed)


def found_text(found: SearchResult) -> str:
    c = found.counts
    cut = "" if found.complete else " The search was cut off: these are the best so far."
    counts = f"{count_text(c.legal)} legal plans, {count_text(c.fit)} fit, {c.priced:,} evaluated"
    return f"{counts} in {found.took:.0f} s; step times are without jitter.{cut}"


# ---- a sweep over numbers of GPUs

HALVINGS = 3  # and doublings of the plan's GPUs
LINE_COLOURS = (ACCENT, "#d9822b")  # of plans A and B, as on the page


@dataclass(frozen=True)
class SweepLine:
    """A plan on several numbers of GPUs, repaired where it cannot be run on so many."""

    name: str
    points: list[JobResult]


def sweep(texts: Mapping[str, str], noise: str, page: str, step_of: Callable[[str, str], JobResult]) -> list[SweepLine]:
    """Plans A and B, or A with its batch and with one that grows with the GPUs; `step_of` draws the steps of a text."""
    plans = {p: plan_of_text(text) for p, text in texts.items()}
    grows = {f"plan {p.upper()}": (plan, False) for p, plan in plans.items()}
    if len(plans) == 1:
        grows = {"same batch": (plans["a"], False), "batch grows with the GPUs": (plans["a"], True)}
    around = sorted({n for plan in plans.values() for n in _numbers(plan.knobs["gpus"])})
    UNDER_WAY.start(page)
    try:
        found: dict[str, list[JobResult]] = {name: [] for name in grows}
        UNDER_WAY.swept = 0, len(around) * len(grows)
        for gpus, name in product(around, grows):
            if UNDER_WAY.stopped:
                break
            plan, grow = grows[name]
            batch = round(plan.knobs["global_batch"] * (gpus / plan.knobs["gpus"] if grow else 1)) or 1
            with suppress(PresageError):  # no plan for so many, which leaves a gap
                moved = plan_of({**plan.knobs, "gpus": gpus, "global_batch": batch}, plan.rest)
                made, _ = repair_plan(moved, ("gpus",))
                found[name].append(step_of(text_of(made), noise))
            UNDER_WAY.swept = UNDER_WAY.swept[0] + 1, UNDER_WAY.swept[1]
    finally:
        UNDER_WAY.end()
    if not any(found.values()):
        raise InvalidPlan("nothing to show: stopped before the first point, or no plan for such numbers of GPUs")
    return [SweepLine(name, points) for name, points in found.items() if points]


def _numbers(gpus: int) -> list[int]:
    return [gpus >> k for k in range(HALVINGS, 0, -1) if not gpus % (1 << k)] + [gpus << k for k in range(HALVINGS + 1)]


def sweep_rows(lines: Sequence[SweepLine], tokens: float) -> dict[str, Any]:
    """The numbers of the curves."""
    rows = [
        [line.name, f"{p.job.gpus:,}", plan_words(job_plan(p.job)), f"{p.job.global_batch:,}", seconds(p.step.p50),
         f"{count_text(p.tokens_per_second)}/s", percent(p.mfu), "yes" if p.memory.fits else "no",
         f"{p.spent(tokens).days:,.3g}", count_text(_money(p, tokens)[0])]
        for line in lines for p in line.points
    ]  # fmt: skip
    cost = _money(lines[0].points[0], tokens)[1]
    return {"head": ["", "GPUs", "plan", "batch", "step", "tokens", "MFU", "fits", "days", cost], "rows": rows}


def _money(p: JobResult, tokens: float) -> tuple[float, str]:
    """Cost, or GPU-hours where there is no price."""
    s = p.spent(tokens)
    return (s.gpu_hours, "GPU-hours") if s.cost is None else (s.cost, "cost")


def sweep_figure(lines: Sequence[SweepLine], tokens: float) -> Any:
    """Step time, tokens/s, MFU and cost against the number of GPUs; hollow where it does not fit."""
    from plotly.subplots import make_subplots

    unit = time_unit(lines[0].points[0].step.p50)
    money = _money(lines[0].points[0], tokens)[1]
    titles = (f"step time, {unit.name}", "tokens/s", "MFU, %", f"{money} of {count_text(tokens)} tokens")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.17)
    for line, colour in zip(lines, LINE_COLOURS, strict=False):
        gpus = [p.job.gpus for p in line.points]
        curves = (
            [p.step.p50 / unit.size for p in line.points], [p.tokens_per_second for p in line.points],
            [100 * p.mfu for p in line.points], [_money(p, tokens)[0] for p in line.points],
        )  # fmt: skip
        fits = ["circle" if p.memory.fits else "circle-open" for p in line.points]
        words = [plan_words(job_plan(p.job)) + ("" if p.memory.fits else ", does not fit") for p in line.points]
        for k, values in enumerate(curves):
            figure.add_scatter(
                x=gpus, y=values, name=line.name, legendgroup=line.name, showlegend=not k, mode="lines+markers",
                line={"color": colour, "width": 2}, marker={"symbol": fits, "size": 8}, row=k // 2 + 1, col=k % 2 + 1,
                text=words, hovertemplate="%{x:,} GPUs: %{y:.4s}<br>%{text}<extra></extra>",
            )  # fmt: skip
    ticks = sorted({p.job.gpus for line in lines for p in line.points})
    named = ticks[1::2] or ticks  # with room for their names on a phone, and the plan's own among them
    words = [f"{n >> 10}K" if n >= 1024 and not n % 1024 else str(n) for n in named]
    figure.update_xaxes(type="log", tickvals=named, ticktext=words, tickangle=0)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(
        legend={"orientation": "h", "y": 1.1, "x": 0, "yanchor": "bottom"}, margin_t=76, hovermode="closest"
    )
    return figure
