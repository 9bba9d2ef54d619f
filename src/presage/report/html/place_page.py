"""The page of `presage place`: which GPU goes where, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table as RichTable

from presage.placement import Placed
from presage.report import place_tables as tables
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.heat import heat_figure, heat_table, telling
from presage.report.html.charts.tornado import NONE, Swing, tornado_figure
from presage.report.html.charts.units import Unit
from presage.report.html.page import Fact, Page, Section, plain, table_of
from presage.text import percent, seconds

__all__ = ["place_page"]

STAGES, REPLICAS = 60, 32
TIMES = Unit("x", 1.0)


def place_page(p: Placed, shown: Sequence[RichTable], source: str = "", command: str = "") -> Page:
    """`shown`: the tables beside that of the outcomes: who goes where, whom to evict, a hot node."""
    asked, how, answer = plain(tables.headline(p)).split("\n")
    more = tuple(Section(t.title, (t,)) for t in map(table_of, shown))
    return Page(
        title=p.shape.job.name or p.shape.job.model.name or "job",
        question=f"Which GPU goes where? {asked}: {how}",
        answer=f"{answer[0].upper()}{answer[1:]}.",
        facts=_facts(p),
        sections=(_outcomes(p), _where(p), *more, _steps(p)),
        notes=tuple(tables.remarks(p, source)),
        command=command,
    )


def _facts(p: Placed) -> tuple[Fact, ...]:
    best = p.best.p95.value
    gain = 1 - best / p.given.p95.value
    return (
        Fact("p95, best placement", seconds(best), f"p50 {seconds(p.best.p50.value)}"),
        Fact("p95, as given", seconds(p.given.p95.value), f"the best is {percent(max(0.0, gain))} below"),
        Fact("p95, placed at random", seconds(p.randoms.p95), f"mean of {len(p.randoms.p95s)}"),
        Fact(
            "p95, worst placement", seconds(p.worst.p95.value), f"{percent(p.worst.p95.value / best - 1)} over the best"
        ),
        Fact("Slowest GPU", f"{p.fleet.factors.max():.3f}", "times the median GPU's time"),
    )


def _outcomes(p: Placed) -> Section:
    base = p.randoms.p95
    rows = {
        "as given": (p.given.p50.value, p.given.p95.value), "unlucky (1 in 20)": (NONE, p.randoms.unlucky),
        "best": (p.best.p50.value, p.best.p95.value), "no placement is below": (NONE, p.bound),
        "worst": (p.worst.p50.value, p.worst.p95.value),
    }  # fmt: skip
    swings = [Swing(name, (late / base - 1,)) for name, (_, late) in rows.items()]
    figure = tornado_figure(swings, ("p95",), "p95 against a random placement", apart=True)
    lead = "p95 of a step by placement, against the mean of random ones: left is better."
    return Section("Placements", (table_of(tables.outcome_table(p)),), figure, lead)


def _where(p: Placed) -> Section:
    """Replicas against stages."""
    factors = p.best.placement.factors[:, :STAGES]
    kept = telling(factors, REPLICAS)
    rows, columns = [f"replica {r}" for r in kept], [f"stage {k}" for k in range(factors.shape[1])]
    slow = np.unravel_index(int(factors.argmax()), factors.shape)
    lead = (
        "How many times as long as a usual GPU the slowest of each group takes in the best placement. The slowest "
        f"group of all is in replica {slow[0]}, stage {slow[1]}: {factors.max():.3f}."
    ) + (f" Of {len(factors):,} replicas the {REPLICAS} farthest from the usual." if len(kept) < len(factors) else "")
    figure = heat_figure(rows, columns, factors[kept], TIMES)
    return Section(
        "Groups of the best placement", (heat_table("replica", rows, columns, factors[kept], TIMES),), figure, lead
    )


def _steps(p: Placed) -> Section:
    draws = p.best.draws.seconds.ravel()
    lead = "Steps drawn with the best placement. Above how many take so long, below the chance of longer."
    return Section("The steps", (distribution_table(draws),), distribution_figure(draws), lead)
