"""The search for the best plans of a page: one at a time, with its progress, and cut off with what it has found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from presage.report.html.charts.points import PlanPoint, pareto_figure
from presage.report.terms import count_text
from presage.search import SearchProgress, SearchResult, job_plan, plan_words, search
from presage.search.plans import KNOBS as PLAN_KNOBS
from presage.search.plans import knob
from presage.search.search_result import StopSearch
from presage.text import percent, seconds, size
from presage.ui.knobs import KNOBS, InvalidPlan
from presage.ui.plans import job_of_text, plan_like

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

    def start(self, page: str) -> None:
        if not self.lock.acquire(blocking=False):
            raise InvalidPlan("another search is running: try again when it is done")
        self.page, self.begun, self.stopped, self.now = page, time.monotonic(), False, None

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
    if not page or UNDER_WAY.page != page or now is None:
        return 0.0, "Searching …"
    spent = time.monotonic() - begun
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
    return f"{counts} in {found.took:.0f} s.{cut}"
