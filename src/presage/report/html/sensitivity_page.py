"""The page of `presage sensitivity`: what to make steadier or quicker first."""

from __future__ import annotations

from presage.noise.sampling import Estimate
from presage.prediction.draws.sensitivity import Sensitivity, SensitivityRow
from presage.report import sensitivity_tables as tables
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.tornado import NONE, Swing, tornado_figure, tornado_table
from presage.report.html.page import Fact, Page, Section, plain, table_of
from presage.text import percent, seconds

__all__ = ["sensitivity_page"]

ALL = 1_000_000  # rows: as many as there are
GROUPS = {"class": "Classes of work", "source": "Sources of noise", "stage": "Pipeline stages"}
BOTH = ("were it steady", "were it 10% quicker")


def sensitivity_page(s: Sensitivity, source: str = "", command: str = "") -> Page:
    """All there is to see of it."""
    asked, steadier, quicker = plain(tables.headline(s)).split("\n")
    sections = (*(_group(s, kind) for kind in GROUPS if s.of(kind)), _steps(s))
    return Page(
        title=s.shape.job.name or s.shape.job.model.name or "job",
        question=f"What should be steadier or quicker? {asked}",
        answer=f"{steadier}. {quicker}.",
        facts=_facts(s),
        sections=sections,
        notes=(*tables.remarks(s), *([f"noise: {source}"] if source else [])),
        command=command,
    )


def _facts(s: Sensitivity) -> tuple[Fact, ...]:
    p50, p95 = s.draws.p50.value, s.draws.p95.value
    left = s.all_steady.p95.value / p95
    return (
        Fact("p50 of a step", seconds(p50), f"{s.draws.seconds.size:,} draws"),
        Fact("p95 of a step", seconds(p95), f"{percent(p95 / p50 - 1)} over p50"),
        Fact("Without any noise", seconds(s.calm), f"p95 is {percent(p95 / s.calm - 1)} over it"),
        Fact("Were all sources steady", f"{100 * left:+.1f}%", "of p95"),
    )


def _group(s: Sensitivity, kind: str) -> Section:
    rows, p95 = s.of(kind), s.draws.p95.value
    some = any(r.faster is not None for r in rows)
    series = BOTH if some else BOTH[:1]
    swings = [_swing(r, p95, len(series)) for r in rows]
    table = {"class": tables.class_table, "source": tables.source_table, "stage": tables.stage_table}[kind]
    figure = tornado_figure(swings, series, "p95", apart=some)
    lead = "What p95 of a step would be shorter, were each of these otherwise; ± is one standard error of the draws."
    shown = (table_of(table(s, ALL)), tornado_table(swings, kind, series, "Change of p95"))
    return Section(GROUPS[kind], shown, figure, lead)


def _swing(r: SensitivityRow, p95: float, many: int) -> Swing:
    found = [r.steady.p95, r.faster.p95 if r.faster else Estimate(NONE)][:many]
    return Swing(tables.called(r), tuple(e.value / p95 for e in found), tuple(e.error / p95 for e in found))


def _steps(s: Sensitivity) -> Section:
    draws = s.draws.seconds.ravel()
    lead = "The steps that were drawn. Above how many take so long, below the chance of longer."
    figure = distribution_figure(draws, marks={"without noise": s.calm})
    return Section("The steps", (distribution_table(draws),), figure, lead)
