"""Rich tables of how sure a job's step is."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from presage.noise.sampling import Estimate
from presage.prediction.draws.distribution import StepDistribution
from presage.report.plain import plain_table
from presage.text import percent, seconds

__all__ = ["longer_table", "sure_sentence", "sure_table"]


def sure_sentence(s: StepDistribution) -> str:
    """The guarantee in one sentence."""
    p50, p95, late = s.steps[0.5], s.steps[0.95], s.runs[0.95]
    return (
        f"19 of 20 steps take at most {seconds(p95.value)} ({_over(p95.value, p50.value)} the median of "
        f"{seconds(p50.value)}); 19 of 20 runs have a mean step of at most {seconds(late.value)}"
    )


def sure_table(s: StepDistribution) -> Table:
    """Quantiles of steps and of runs."""
    title = f"How sure: {s.count:,} draws; noise: {s.source}"
    columns = ("a step", "error", "90% interval", "a run's mean step", "error", "90% interval")
    table = plain_table(title, "", *columns, fold=False)
    table.add_row("mean", *_cells(s.mean), "", "", "")
    for p, e in s.steps.items():
        table.add_row(f"p{100 * p:g}", *_cells(e), *_cells(s.runs[p]))
    return table


def longer_table(s: StepDistribution) -> Table:
    """How likely steps are to be longer than the median by some times."""
    table = plain_table("A step longer than", "", "probability", "error", "90% interval", fold=False)
    for times, e in s.longer.items():
        limit = f"{seconds(times * s.steps[0.5].value)} ({_over(times, 1.0)} the median)"
        table.add_row(limit, percent(e.value, 2), percent(e.error, 2), _interval(e, lambda v: percent(v, 2)))
    return table


def _cells(e: Estimate) -> tuple[str, str, str]:
    return seconds(e.value), seconds(e.error), _interval(e, seconds)


def _interval(e: Estimate, told: Callable[[float], str]) -> str:
    return "" if e.low is None or e.high is None else f"{told(e.low)} .. {told(e.high)}"


def _over(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f}% over"
