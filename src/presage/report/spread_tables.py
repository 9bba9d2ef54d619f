"""Tables of drawn steps: quantiles with their errors and bounds, and how often a step is longer than usual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from presage.noise.sampling import Estimate
from presage.prediction.draws.distribution import StepDistribution
from presage.report.answer import DataTable, Section, data_table
from presage.report.html.charts.distribution import distribution_figure
from presage.report.terms import TAIL_HELP, interval, signed
from presage.text import percent, seconds


def noise_section(s: StepDistribution) -> Section:
    """Drawn steps of a captured or replayed step."""
    marks = {q: s.steps[q].value for q in (0.5, 0.95, 0.99)}
    chart = partial(distribution_figure, s.draws.seconds.ravel(), marks, marks={"without noise": s.draws.quiet})
    text = (
        f"{s.count:,} steps drawn by class of work, rank and step ({s.source}): p50 {seconds(marks[0.5])}, p95 "
        f"{seconds(marks[0.95])}; {seconds(s.draws.quiet)} without noise. {TAIL_HELP}"
    )
    return Section("Noise", (spread_table(s), exceeding_table(s)), chart, text)


def spread_table(s: StepDistribution) -> DataTable:
    """Quantiles of the step time and of the mean step of runs."""
    title = f"Distribution: {s.count:,} draws; noise: {s.source}"
    columns = ("", "step", "error", "90% interval", "ends' error", "at most", "run-mean step", "error", "90% interval")
    rows = [
        ("mean", *_estimate(s.mean), _ends_error(s.mean)),
        *(
            (f"p{100 * q:g}", *_estimate(e), _ends_error(e), _bound_text(s, q), *_estimate(s.runs[q]))
            for q, e in s.steps.items()
        ),
    ]
    return _without_empty(data_table(title, columns, rows))


def _ends_error(e: Estimate) -> str:
    """Standard error of the ends of the interval."""
    return "" if e.end_errors is None else " ".join(map(seconds, e.end_errors))


def _bound_text(s: StepDistribution, q: float) -> str:
    """What a far quantile is not above, with 95% confidence."""
    if q not in s.extremes:
        return ""
    bound = s.bound(q)
    return "too few draws" if bound is None else f"{seconds(bound)} (95% sure)"


def exceeding_table(s: StepDistribution) -> DataTable:
    """The probability that a step exceeds the median by some factor."""
    rows = [
        (
            f"{seconds(times * s.steps[0.5].value)} ({signed(times - 1)} over p50)", percent(e.value, 2),
            percent(e.error, 2), _interval_text(e, lambda v: percent(v, 2)),
        )
        for times, e in s.longer.items()
    ]  # fmt: skip
    return _without_empty(data_table("A step exceeds", ("", "probability", "error", "90% interval"), rows))


def _estimate(e: Estimate) -> tuple[str, str, str]:
    return seconds(e.value), seconds(e.error), _interval_text(e, seconds)


def _interval_text(e: Estimate, text: Callable[[float], str]) -> str:
    return "" if e.low is None or e.high is None else interval(e.low, e.high, text)


def _without_empty(table: DataTable) -> DataTable:
    """The table without columns that hold nothing."""
    kept = [i for i in range(len(table.columns)) if i == 0 or any(row[i] for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return data_table(table.title, [table.columns[i] for i in kept], rows)
