"""Charts of a plan as plain values, without a theme: the page puts on the one of the day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from presage.prediction.jobs.job_prediction import JobResult
from presage.report.html.charts.bars import Unit, parts_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.theme import BAD, PALETTE
from presage.report.terms import LEAST, MEMORY, PARTS
from presage.text import percent, size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from presage.prediction.draws.guarantee import Guarantee
    from presage.runs.whole import RunResult

__all__ = ["memory_chart", "numbers", "parts_chart", "run_chart", "sure_chart"]

Chart = dict[str, Any]
GIB, DAY = 1024.0**3, 86400.0
TALL = 330  # pixels
SHOWN = 0.1  # of the chart: smaller parts have no room for their number


def parts_chart(p: JobResult) -> Chart:
    parts = [(PARTS.get(name, name), took) for name, took in p.breakdown.items() if took > LEAST * p.seconds]
    figure = parts_figure(parts, p.seconds)
    figure.update_layout(height=TALL)
    return _plain(figure, (0.0, max(took for _, took in parts) * 1.02))


def memory_chart(p: JobResult) -> Chart:
    """What a GPU of the fullest stage holds, end to end, and where its memory ends."""
    from plotly.graph_objects import Bar, Figure

    worst, capacity = p.memory.worst, p.memory.memory
    held = [(words, float(getattr(worst, name))) for name, words in MEMORY.items()]
    figure = Figure(
        [
            Bar(
                x=[nbytes / GIB], y=[""], name=words, orientation="h", marker={"color": colour},
                text=[size(nbytes) if nbytes > SHOWN * max(worst.needed, capacity) else ""], textposition="inside",
                insidetextanchor="middle", textangle=0,
                hovertemplate=f"{words}: {size(nbytes)}, {percent(nbytes / worst.needed)}<extra></extra>",
            )
            for (words, nbytes), colour in zip(held, PALETTE, strict=False) if nbytes
        ]
    )  # fmt: skip
    figure.add_vline(x=capacity / GIB, line={"color": BAD, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=capacity / GIB, y=1, yref="paper", text=f"a GPU has {size(capacity)}", showarrow=False, xanchor="right",
        xshift=-6, yanchor="top",
    )  # fmt: skip
    figure.update_layout(barmode="stack", height=TALL, bargap=0.62, legend={"traceorder": "normal"}, margin_t=90)
    figure.update_xaxes(title_text="GiB", rangemode="tozero")
    figure.update_yaxes(showticklabels=False, ticks="")
    return _plain(figure, (0.0, max(worst.needed, capacity) / GIB * 1.03))


def sure_chart(p: JobResult, g: Guarantee) -> Chart:
    figure = distribution_figure(g.draws.seconds, marks={"quiet": p.seconds}, what="steps", height=450)
    return _plain(figure, None)


def run_chart(r: RunResult) -> Chart:
    marks = {} if r.deadline is None else {"deadline": r.deadline}
    middle = r.outcome.quantile(0.5)
    unit = Unit("days", DAY) if DAY <= middle < float("inf") else None
    figure = distribution_figure(r.outcome.wall, marks=marks, what="runs", unit=unit, height=450)
    return _plain(figure, None)


def _plain(figure: Figure, span: tuple[float, float] | None) -> Chart:
    """`meta.span`: what its x axis should show at least, so that charts side by side can share it."""
    import json

    if span is not None:
        figure.update_layout(meta={"span": list(span)})
    out: Chart = json.loads(figure.to_json())
    out["layout"].pop("template", None)
    return out


def numbers(draws: Any) -> list[list[str]]:
    """The curve's numbers: quantile, at most, longer than that."""
    return [list(row) for row in distribution_table(draws).rows]
