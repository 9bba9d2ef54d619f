"""The answer of `presage sensitivity`: what the step time depends on, and what to make steadier or faster first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from presage.noise.sampling import Estimate
from presage.noise.sources import SOURCES
from presage.prediction.draws.sensitivity import MetricChange, Sensitivity, SensitivityRow
from presage.report.answer import Answer, DataTable, Fact, Section, data_table
from presage.report.html.charts.bars import NO_CHANGE, Swing, tornado_figure, tornado_table
from presage.report.html.charts.distribution import distribution_section
from presage.report.plots import BarPanel, ErrorBar, draw_bars
from presage.report.terms import TAIL_HELP, WORK, signed
from presage.text import percent, seconds

OPS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce",
       "all_to_all": "AllToAll", "send_recv": "send and receive"}  # fmt: skip
NAMES = {"class": WORK, "collective": OPS, "source": {s.name: s.words for s in SOURCES}}
GROUPS = {
    "class": "Classes of work",
    "collective": "Collectives",
    "source": "Sources of noise",
    "stage": "Pipeline stages",
}
KINDS = ("class of work", "collective", "source of noise", "pipeline stage")
BOTH = ("if perfectly steady", "if 10% faster")
ERRORS = 2.0  # an effect below so many standard errors is shown as none
LEAST = 0.02  # a share that is surely below this is shown as none


def sensitivity_answer(s: Sensitivity, top: int = 12) -> Answer:
    """Everything `presage sensitivity` shows; `top`: rows of each table."""
    job, p95 = s.shape.job, _p95(s)
    name = job.name or job.model.name or "job"
    over = f"{signed(p95 / s.calm - 1)} over {seconds(s.calm)} without noise"
    step = f"p50 {seconds(s.draws.p50.value)}, p95 {seconds(p95)} ({over})"
    return Answer(
        title=name,
        question="What should be made steadier or faster?",
        subject=f"{name} on {job.gpus:,} x {job.platform.gpu.name}: step {step}",
        headline=f"{_steadier(s)}. {_faster(s)}.",
        facts=_facts(s),
        sections=(*(_group_section(s, kind, top) for kind in GROUPS if s.of(kind)), _steps_section(s)),
        notes=(*notes(s), f"noise: {s.source}"),
        to_data=s.to_json,
    )


def _steadier(s: Sensitivity) -> str:
    kind, source = _first(s.of("class"), _steady), _first(s.of("source"), _steady)
    if kind is None and source is None:
        return "Variability does not matter: no class of work or source of noise moves p95 by itself"
    parts = [f"{row_name(r)} (p95 {signed(r.steady.p95.value / _p95(s))} without it)" for r in (kind, source) if r]
    return f"Variability costs most in {'; by cause, '.join(parts)}"


def _faster(s: Sensitivity) -> str:
    kind = _first(s.of("class"), _quick)
    if kind is None or kind.faster is None:
        return "Speed does not matter: no class of work moves p95 by itself"
    moved = signed(kind.faster.p95.value / _p95(s))
    stage = _first(s.of("stage"), _quick)
    also = f"; of the stages, {row_name(stage)}" if stage is not None else ""
    return f"Make {row_name(kind)} faster first (p95 {moved} if 10% faster){also}"


def _p95(s: Sensitivity) -> float:
    return s.draws.p95.value


def _steady(r: SensitivityRow) -> Estimate:
    return r.steady.p95


def _quick(r: SensitivityRow) -> Estimate:
    return r.faster.p95 if r.faster is not None else Estimate(0.0)


def _first(rows: Iterable[SensitivityRow], by: Callable[[SensitivityRow], Estimate]) -> SensitivityRow | None:
    """The one that shortens p95 most, if one does."""
    best = min(rows, key=lambda r: by(r).value, default=None)
    return best if best is not None and by(best).value < 0 and is_significant(by(best)) else None


def is_significant(e: Estimate) -> bool:
    """Whether it is more than its error."""
    return abs(e.value) > ERRORS * e.error and e.value != 0


def row_name(r: SensitivityRow) -> str:
    """A row's name in words."""
    return f"stage {r.name}" if r.group == "stage" else NAMES[r.group].get(r.name, r.name)


def _order(rows: Iterable[SensitivityRow]) -> list[SensitivityRow]:
    return sorted(rows, key=lambda r: (r.steady.p95.value, _quick(r).value))


# ---- tables


def class_table(s: Sensitivity, top: int) -> DataTable:
    """Classes of work, the costliest variability first."""
    columns = ("class", "seconds", "critical", "steady: p50", "p95", "sd", "10% faster: p50", "p95")
    rows = [
        (row_name(r), *_critical(r), *_changed(r.steady, s), *_changed(r.faster, s)[:2])
        for r in _order(s.of("class"))[:top]
        if r.faster is not None
    ]
    return data_table("Classes of work", columns, rows)


def collective_table(s: Sensitivity, top: int) -> DataTable:
    """Kinds of collectives, likewise."""
    columns = ("collective", "seconds", "critical", "steady: p50", "p95", "sd")
    rows = [(row_name(r), *_critical(r), *_changed(r.steady, s)) for r in _order(s.of("collective"))[:top]]
    return data_table("Collectives", columns, rows)


def source_table(s: Sensitivity, top: int) -> DataTable:
    """Sources of noise, likewise."""
    columns = ("source", "steady: p50", "p95", "sd", "share of variance", "of p95 - p50", "of the mean's excess")
    rows = []
    for r in _order(s.of("source"))[:top]:
        shares = (r.shares.variance, r.shares.tail, r.shares.mean) if r.shares else ()
        rows.append((row_name(r), *_changed(r.steady, s), *(_share(x) for x in shares)))
    rows.append(("all of them", *_changed(s.all_steady, s), *["100%"] * 3))
    return data_table("Sources of noise", columns, rows, bold=(-1,))


def stage_table(s: Sensitivity, top: int) -> DataTable:
    """Pipeline stages, likewise."""
    columns = ("stage", "seconds", "critical", "steady: p50", "p95", "10% faster: p50", "p95")
    rows = [
        (r.name, *_critical(r), *_changed(r.steady, s)[:2], *_changed(r.faster, s)[:2])
        for r in _order(s.of("stage"))[:top]
        if r.faster is not None
    ]
    return data_table("Pipeline stages", columns, rows)


TABLES = {"class": class_table, "collective": collective_table, "source": source_table, "stage": stage_table}


def _critical(r: SensitivityRow) -> tuple[str, str]:
    """Seconds, and the share of them on the critical path."""
    c = r.critical
    if c is None:
        return "", ""
    return seconds(c.seconds), percent(c.share) if c.share > 0 else "0, hidden"


def _changed(c: MetricChange, s: Sensitivity) -> list[str]:
    """Changes of p50, p95 and the standard deviation, each relative to itself."""
    d = s.draws
    whole = d.quantile(0.5).value, d.quantile(0.95).value, float(d.seconds.std())
    parts = [(e, w) for e, w in zip((c.p50, c.p95, c.sd), whole, strict=True)]
    return [_cell(Estimate(e.value / w, e.error / w) if w else e) for e, w in parts]


def _cell(e: Estimate, digits: int = 2) -> str:
    there = is_significant(e) and abs(100 * e.value) >= 0.5 * 10**-digits
    return f"{percent(e.value, digits)} ±{100 * e.error:.{digits}f}" if there else "~0"


def _share(e: Estimate) -> str:
    """What may be large is told with its error, however large that is."""
    return f"{percent(e.value, 0)} ±{100 * e.error:.0f}" if abs(e.value) + ERRORS * e.error >= LEAST else "~0"


def notes(s: Sensitivity) -> list[str]:
    """What to know before trusting it."""
    p95, hidden = _p95(s), [row_name(r) for r in s.of("class") if r.critical and r.critical.share == 0]
    alone, whole = signed(s.one_by_one / p95), signed(s.all_steady.p95.value / p95)
    out = [f"~0: below {ERRORS:g} standard errors of {s.draws.seconds.size:,} draws; ±: one standard error"]
    if s.of("source"):
        out.append(
            f"sources made steady one at a time change p95 by {alone} in sum, all together by {whole}: {_additive(s)}"
        )
    if hidden:
        out.append(f"fully overlapped by other work: {', '.join(hidden)}")
    if not s.exact:
        out.append("shares are sampled over orders of the sources; their error is included")
    return out


def _additive(s: Sensitivity) -> str:
    if abs(s.one_by_one - s.all_steady.p95.value) < 0.1 * abs(s.all_steady.p95.value):
        return "nearly additive"
    more = abs(s.one_by_one) < abs(s.all_steady.p95.value)
    return "where one source no longer delays, another still does" if more else "their delays overlap"


def _facts(s: Sensitivity) -> tuple[Fact, ...]:
    p50, p95 = s.draws.p50.value, _p95(s)
    return (
        Fact("p50 step", seconds(p50), f"{s.draws.seconds.size:,} draws"),
        Fact("p95 step", seconds(p95), f"{signed(p95 / p50 - 1)} over p50"),
        Fact("Without noise", seconds(s.calm), f"p95 is {signed(p95 / s.calm - 1)} over it"),
        Fact("All sources steady", signed(s.all_steady.p95.value / p95), "change in p95"),
    )


# ---- sections


def _group_section(s: Sensitivity, kind: str, top: int) -> Section:
    rows, p95 = s.of(kind), _p95(s)
    both = any(r.faster is not None for r in rows)
    series = BOTH if both else BOTH[:1]
    swings = [_swing(r, p95, len(series)) for r in rows]
    text = "Change in p95 if each were perfectly steady, or 10% faster; ± is one standard error of the draws."
    tables = (TABLES[kind](s, top), tornado_table(swings, kind, series, "Change in p95"))
    return Section(GROUPS[kind], tables, partial(tornado_figure, swings, series, "p95", apart=both), text)


def _swing(r: SensitivityRow, p95: float, many: int) -> Swing:
    effects = [r.steady.p95, r.faster.p95 if r.faster else Estimate(NO_CHANGE)][:many]
    return Swing(row_name(r), tuple(e.value / p95 for e in effects), tuple(e.error / p95 for e in effects))


def _steps_section(s: Sensitivity) -> Section:
    marks = {"without noise": s.calm}
    return distribution_section(s.draws.seconds.ravel(), f"The drawn steps. {TAIL_HELP}", marks=marks)


# ---- the plot


def plot_sensitivity(s: Sensitivity, path: Path, top: int) -> None:
    """Write a tornado diagram: the change of p95 if each were perfectly steady, or 10% faster."""
    job = s.shape.job
    title = f"{job.name or job.model.name or 'job'}, {job.gpus:,} GPUs: change in p95 ({seconds(_p95(s))}), %"
    panels = [_panel(s, "if perfectly steady", _steady, top), _panel(s, "if 10% faster", _quick, top)]
    draw_bars(path, title, [p for p in panels if p.bars] or panels[:1], KINDS)


def _panel(s: Sensitivity, title: str, by: Callable[[SensitivityRow], Estimate], top: int) -> BarPanel:
    rows = [r for r in s.rows if is_significant(by(r))]
    rows.sort(key=lambda r: -abs(by(r).value))
    scale = 100 / _p95(s)
    bars = [
        ErrorBar(row_name(r), by(r).value * scale, by(r).error * scale, list(GROUPS).index(r.group)) for r in rows[:top]
    ]
    return BarPanel(title, tuple(bars))
