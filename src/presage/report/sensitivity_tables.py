"""Rich tables of what a step's distribution owes to what, and its plot. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from presage.noise.sampling import Estimate
from presage.noise.sources import SOURCES
from presage.prediction.draws.sensitivity import MetricChange, Sensitivity, SensitivityRow
from presage.report.plain import plain_table
from presage.report.plots import Bar, Bars, draw_bars
from presage.text import percent, seconds

__all__ = ["class_table", "headline", "plot", "remarks", "source_table", "stage_table", "value"]

CLASSES = {
    "products": "matrix products",
    "attention": "attention",
    "streams": "memory-bound kernels",
    "host": "the host's launches",
    "optimizer": "the optimizer",
    "tp": "tensor-parallel transfers",
    "cp": "context-parallel transfers",
    "ep": "expert-parallel transfers",
    "sharding": "transfers of sharded parameters",
    "send": "sends between stages",
    "dp": "data-parallel transfers",
}
NAMES = {"class": CLASSES, "source": {s.name: s.words for s in SOURCES}}
GROUPS = ("class", "source", "stage")
KINDS = ("class of work", "source of noise", "pipeline stage")
ERRORS = 2.0  # an effect below so many standard errors is told as none
LEAST = 0.02  # a share that is below this for sure is told as none
MS = 1e3


# ---- the answer


def headline(s: Sensitivity) -> str:
    """The step, and what to make steadier or quicker."""
    job = s.shape.job
    what = f"[bold]{escape(job.name or job.model.name or 'job')}[/bold]"
    p50, p95 = s.draws.p50, s.draws.p95
    over = f"{percent(p95.value / s.calm - 1)} over the {seconds(s.calm)} of a step without noise"
    told = (
        f"a step on {job.gpus:,} x {job.platform.gpu.name}: p50 {seconds(p50.value)}, p95 {seconds(p95.value)}, {over}"
    )
    return f"{what}: {told}\n{_steadier(s)}\n{_faster(s)}"


def _steadier(s: Sensitivity) -> str:
    kind, source = _first(s.of("class"), _steady), _first(s.of("source"), _steady)
    if kind is None and source is None:
        return "Make nothing steadier: no class of work and no source of noise moves p95 by itself"
    parts = [f"{called(r)} ({_moved(r, s)} if steady)" for r in (kind, source) if r is not None]
    return f"Make steadier first: {'; by cause, '.join(parts)}"


def _faster(s: Sensitivity) -> str:
    kind = _first(s.of("class"), _quick)
    if kind is None or kind.faster is None:
        return "Make nothing faster: no class of work moves p95 by itself"
    moved = percent(kind.faster.p95.value / _p95(s))
    stage = _first(s.of("stage"), _quick)
    also = f"; of the stages, {called(stage)}" if stage is not None else ""
    return f"Make faster first: {called(kind)} (p95 {moved} if 10% quicker){also}"


def _moved(r: SensitivityRow, s: Sensitivity) -> str:
    return f"p95 {percent(r.steady.p95.value / _p95(s))}"


def _p95(s: Sensitivity) -> float:
    return s.draws.p95.value


def _steady(r: SensitivityRow) -> Estimate:
    return r.steady.p95


def _quick(r: SensitivityRow) -> Estimate:
    return r.faster.p95 if r.faster is not None else Estimate(0.0)


def _first(rows: Iterable[SensitivityRow], by: Callable[[SensitivityRow], Estimate]) -> SensitivityRow | None:
    """The one that shortens p95 most, if one does."""
    found = min(rows, key=lambda r: by(r).value, default=None)
    return found if found is not None and by(found).value < 0 and told(by(found)) else None


def told(e: Estimate) -> bool:
    """Whether it is more than its error."""
    return abs(e.value) > ERRORS * e.error and e.value != 0


def called(r: SensitivityRow) -> str:
    """A row's name in words."""
    return f"stage {r.name}" if r.group == "stage" else NAMES[r.group].get(r.name, r.name)


def _order(rows: Iterable[SensitivityRow]) -> list[SensitivityRow]:
    return sorted(rows, key=lambda r: (r.steady.p95.value, _quick(r).value))


# ---- tables


def class_table(s: Sensitivity, top: int) -> Table:
    """Classes of work, those first whose variance costs most."""
    columns = ("seconds", "critical", "steady: p50", "p95", "sd", "10% quicker: p50", "p95")
    table = plain_table("Classes of work", "class", *columns, fold=False)
    for r in _order(s.of("class"))[:top]:
        assert r.critical is not None and r.faster is not None
        cells = *_changed(r.steady, s), *_changed(r.faster, s)[:2]
        table.add_row(called(r), seconds(r.critical.seconds), _critical(r), *cells)
    return table


def source_table(s: Sensitivity, top: int) -> Table:
    """Sources of noise, likewise."""
    columns = ("steady: p50", "p95", "sd", "share of variance", "of p95 - p50", "of the mean's excess")
    table = plain_table("Sources of noise", "source", *columns, fold=False)
    for r in _order(s.of("source"))[:top]:
        shares = (r.shares.variance, r.shares.tail, r.shares.mean) if r.shares else ()
        table.add_row(called(r), *_changed(r.steady, s), *(_share(x) for x in shares))
    if s.of("source"):
        table.add_row("all of them", *_changed(s.all_steady, s), *["100%"] * 3, style="bold")
    return table


def stage_table(s: Sensitivity, top: int) -> Table:
    """Pipeline stages, likewise."""
    columns = ("seconds", "critical", "steady: p50", "p95", "10% quicker: p50", "p95")
    table = plain_table("Pipeline stages", "stage", *columns, fold=False)
    for r in _order(s.of("stage"))[:top]:
        assert r.critical is not None and r.faster is not None
        cells = *_changed(r.steady, s)[:2], *_changed(r.faster, s)[:2]
        table.add_row(r.name, seconds(r.critical.seconds), _critical(r), *cells)
    return table


def _critical(r: SensitivityRow) -> str:
    share = r.critical.share if r.critical else 0.0
    return percent(share) if share > 0 else "0, hidden"


def _changed(c: MetricChange, s: Sensitivity) -> list[str]:
    """Of p50, p95 and the standard deviation, each as a share of itself."""
    d = s.draws
    whole = d.quantile(0.5).value, d.quantile(0.95).value, float(d.seconds.std())
    parts = [(e, w) for e, w in zip((c.p50, c.p95, c.sd), whole, strict=True)]
    return [_cell(Estimate(e.value / w, e.error / w) if w else e) for e, w in parts]


def _cell(e: Estimate, digits: int = 2) -> str:
    there = told(e) and abs(100 * e.value) >= 0.5 * 10**-digits
    return f"{percent(e.value, digits)} ±{100 * e.error:.{digits}f}" if there else "~0"


def _share(e: Estimate) -> str:
    """What may be large is told with its error, however large that is."""
    return f"{percent(e.value, 0)} ±{100 * e.error:.0f}" if abs(e.value) + ERRORS * e.error >= LEAST else "~0"


def remarks(s: Sensitivity) -> list[str]:
    """What to know before trusting it."""
    p95, hidden = _p95(s), [called(r) for r in s.of("class") if r.critical and r.critical.share == 0]
    alone, whole = percent(s.one_by_one / p95), percent(s.all_steady.p95.value / p95)
    out = [f"~0: below {ERRORS:g} standard errors of {s.draws.seconds.size:,} draws; ±: one standard error"]
    if s.of("source"):
        out.append(f"one at a time, steady sources change p95 by {alone} all told, together by {whole}: {_additive(s)}")
    if hidden:
        out.append(f"wholly hidden behind other work: {', '.join(hidden)}")
    if not s.exact:
        out.append("shares: of drawn orders of the sources, their error included")
    return out


def _additive(s: Sensitivity) -> str:
    if abs(s.one_by_one - s.all_steady.p95.value) < 0.1 * abs(s.all_steady.p95.value):
        return "they nearly add up"
    more = abs(s.one_by_one) < abs(s.all_steady.p95.value)
    return "what one no longer delays, another still does" if more else "some of what each delays, others delay too"


# ---- for machines


def value(s: Sensitivity) -> dict[str, Any]:
    """Plain values with the units in their keys."""
    return {
        "job": s.shape.job.name,
        "gpus": s.shape.job.gpus,
        "draws": int(s.draws.seconds.size),
        "step_ms": {"p50": s.draws.p50.to_json(MS), "p95": s.draws.p95.to_json(MS)}
        | {"sd": float(s.draws.seconds.std()) * MS, "without_noise": s.calm * MS},
        "all_steady_ms": _change(s.all_steady),
        "one_by_one_p95_ms": s.one_by_one * MS,
        "shares_exact": s.exact,
        "rows": [_row(r) for r in s.rows],
    }


def _row(r: SensitivityRow) -> dict[str, Any]:
    out: dict[str, Any] = {"group": r.group, "name": r.name, "steady_ms": _change(r.steady)}
    if r.faster is not None:
        out["quicker_10pct_ms"] = _change(r.faster)
    if r.critical is not None:
        c = r.critical
        out |= {"criticality": c.share, "seconds_ms": c.seconds * MS, "on_path_ms": c.shown * MS}
    if r.shares is not None:
        names = {"variance": r.shares.variance, "p95_minus_p50": r.shares.tail, "mean_excess": r.shares.mean}
        out["shares"] = {k: e.to_json() for k, e in names.items()}
    return out


def _change(c: MetricChange) -> dict[str, Any]:
    return {"p50": c.p50.to_json(MS), "p95": c.p95.to_json(MS), "sd": c.sd.to_json(MS)}


# ---- the plot


def plot(s: Sensitivity, path: Path, top: int) -> None:
    """A tornado: what p95 would be shorter, were each steady, and 10% quicker."""
    job = s.shape.job
    title = f"{job.name or job.model.name or 'job'}, {job.gpus:,} GPUs: change of p95 ({seconds(_p95(s))}), %"
    panels = [_panel(s, "were it steady", _steady, top), _panel(s, "were it 10% quicker", _quick, top)]
    draw_bars(path, title, [p for p in panels if p.bars] or panels[:1], KINDS)


def _panel(s: Sensitivity, title: str, by: Callable[[SensitivityRow], Estimate], top: int) -> Bars:
    rows = [r for r in s.rows if told(by(r))]
    rows.sort(key=lambda r: -abs(by(r).value))
    scale = 100 / _p95(s)
    bars = [Bar(called(r), by(r).value * scale, by(r).error * scale, GROUPS.index(r.group)) for r in rows[:top]]
    return Bars(title, tuple(bars))
