"""Results and answers in notebooks: headline, key figures and one chart; the rest is in their HTML report.

The chart is a picture in the page: it needs no script, so that it shows in saved notebooks and on code hosts too.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from presage.errors import PresageError
from presage.prediction.draws.distribution import StepDistribution
from presage.prediction.jobs.job_prediction import JobResult
from presage.prediction.step import StepResult
from presage.report.answer import Answer, DataTable, Fact, Section, data_table
from presage.report.html.charts.distribution import distribution_section
from presage.report.html.theme import ACCENT, BAD, FONT, GOOD, PALETTE
from presage.report.job_answer import job_answer
from presage.report.predict_answer import predict_answer
from presage.report.run_answer import run_answer
from presage.report.terms import TAIL_HELP, family_name, part_name, signed
from presage.report.trace_answer import trace_answer
from presage.report.whatif_answer import whatif_answer
from presage.runs.whole import RunResult
from presage.text import printable, seconds
from presage.traces.findings import TraceFindings
from presage.traces.replay import Replay
from presage.whatif.before_after import WhatIf

TONES = {"good": GOOD, "bad": BAD, "warn": PALETTE[1], "": "inherit"}
TEXT = "#7a828a"  # legible on white and on black
NAMES, WIDTH, ROW, VALUES = 210, 720, 24, 150  # pixels: of names, in all, of a bar's row, of values


def answer_of(result: Any, page: bool = False) -> Answer:
    """The answer of a result; `page`: with everything an HTML page shows."""
    if isinstance(result, Answer):
        return result
    if isinstance(result, StepResult):
        return predict_answer(result, page)
    if isinstance(result, JobResult):
        return job_answer(result, page=page)
    if isinstance(result, RunResult):
        return run_answer(result)
    if isinstance(result, WhatIf):
        return whatif_answer(result, page)
    if isinstance(result, StepDistribution):
        return distribution_answer(result)
    if isinstance(result, Replay):
        return trace_answer(TraceFindings([result]), page)
    raise PresageError(f"no report of a {type(result).__name__}")


def distribution_answer(found: StepDistribution) -> Answer:
    """The distribution of a job's step time."""
    steps = found.steps
    middle, late = steps[0.5].value, steps[0.95].value
    rows = [(f"p{100 * p:g}", seconds(e.value), seconds(found.runs[p].value)) for p, e in steps.items()]
    table = data_table("Quantiles", ("quantile", "a step", "mean step of a run"), rows)
    drawn = distribution_section(found.draws.seconds.ravel(), f"{found.count:,} drawn steps. {TAIL_HELP}")
    return Answer(
        title="step time",
        question="How do steps differ?",
        subject=f"{found.count:,} drawn steps, noise: {found.source or 'as given'}",
        headline=f"p50 {seconds(middle)}/step, p95 {seconds(late)} ({signed(late / middle - 1)} over p50).",
        facts=(Fact("p50", seconds(middle)), Fact("p95", seconds(late)), Fact("mean", seconds(found.mean.value))),
        sections=(Section("Quantiles", (table,)), drawn),
        to_data=found.to_json,
    )


def one_line(result: Any) -> str:
    """<StepResult gpt.py:build: 35.3 ms/step (90% interval 33.1-37.6 ms), GPU-bound, fits>."""
    answer = answer_of(result)
    sentence = answer.headline.split(". ")[0].rstrip(".")
    text = sentence if sentence.startswith(answer.title) else f"{answer.title}: {sentence}".removesuffix(": ")
    known = hasattr(result, "fits") and getattr(result, "memory_known", True)
    fits = (", fits" if result.fits else ", does NOT fit") if known else ""
    return f"<{type(result).__name__} {printable(' '.join(text.split()))}{fits}>"


def in_words(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a breakdown, whose parts have the names that reports have."""
    return [row | {"part": family_name(part_name(row["part"]))} if "part" in row else row for row in rows]


def html_of(result: Any) -> str:
    """Headline, key figures, a chart and notes; tables are closed."""
    answer = answer_of(result)
    facts = "".join(map(_tile, answer.facts))
    notes = "".join(f"<li>{escape(n)}</li>" for n in answer.notes)
    tables = "".join(map(_html_table, answer.tables("terminal")))
    return (
        f'<div style="max-width:{WIDTH + 40}px"><div style="color:{TEXT}">{escape(answer.subject)}</div>'
        f'<div style="font-size:1.25em;font-weight:600;margin:.3em 0">{escape(answer.headline or answer.title)}</div>'
        f'<div style="color:{TONES[answer.verdict_tone]};margin:.3em 0">{escape(answer.verdict)}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px">{facts}</div>{_chart(answer)}'
        + (f"<ul>{notes}</ul>" if notes else "")
        + (f"<details><summary>Tables</summary>{tables}</details>" if tables else "")
        + "</div>"
    )


def write_report(result: Any, path: str | Path) -> None:
    """Write the HTML page."""
    from presage.report.html import check_installed, write_page

    check_installed()
    write_page(answer_of(result, page=True), path)


def _tile(f: Fact) -> str:
    box = "border:1px solid #8886;border-radius:6px;padding:6px 10px"
    return (
        f'<div style="{box}"><div style="color:{TEXT};font-size:.85em">{escape(f.label)}</div>'
        f'<div style="font-weight:600;color:{TONES[f.tone]}">{escape(f.value)}</div>'
        f'<div style="color:{TEXT};font-size:.85em">{escape(f.note)}</div></div>'
    )


def _html_table(table: DataTable) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in table.rows)
    return f"<table><caption>{escape(table.title)}</caption><tr>{head}</tr>{rows}</table>"


# ---- the chart: the first bar chart of the page, as a picture


@dataclass(frozen=True)
class _Bar:
    name: str  # escaped
    value: float
    text: str
    colour: str


def _chart(answer: Answer) -> str:
    """The answer's first chart with horizontal bars, drawn as SVG; without Plotly, which lays it out, nothing."""
    if find_spec("plotly") is None:
        return ""
    for section in answer.sections:
        figure = section.figure
        bars = _bars(figure) if figure is not None else []
        if bars:
            picture = b64encode(_svg(bars).encode()).decode()
            alt = escape(f"{section.title}: " + ", ".join(f"{b.name} {b.text}" for b in bars), quote=True)
            return f'<p style="margin:.8em 0 .2em">{escape(section.title)}</p>' + (
                f'<img alt="{alt}" src="data:image/svg+xml;base64,{picture}">'
            )
    return ""


def _bars(figure: Any) -> list[_Bar]:
    """The bars of a figure, if all of its traces are horizontal ones with texts."""
    traces = figure.data
    if not traces or any(t.type != "bar" or t.orientation != "h" or t.text is None for t in traces):
        return []
    places = dict(zip(figure.layout.yaxis.tickvals or (), figure.layout.yaxis.ticktext or (), strict=True))
    rows: list[tuple[int, _Bar]] = []
    for t in traces:
        colours = t.marker.color if isinstance(t.marker.color, tuple | list) else [t.marker.color or ACCENT] * len(t.x)
        for k, (x, y, text, colour) in enumerate(zip(t.x, t.y, t.text, colours, strict=True)):
            name = str(places.get(y, y)) if not t.name else f"{places.get(y, y)}, {t.name}"
            rows.append((k, _Bar(name, float(x), str(text).rpartition(": ")[2], colour)))
    return [bar for _, bar in sorted(rows, key=lambda r: r[0])]


def _svg(bars: list[_Bar]) -> str:
    most = max((abs(b.value) for b in bars), default=0.0) or 1.0
    scale = (WIDTH - NAMES - VALUES) / most
    rows = []
    for k, b in enumerate(bars):
        y, width = ROW * k, max(abs(b.value) * scale, 1.0)
        rows.append(
            f'<text x="{NAMES - 8}" y="{y + 16}" text-anchor="end">{b.name}</text>'
            f'<rect x="{NAMES}" y="{y + 4}" width="{width:.1f}" height="{ROW - 8}" rx="3" fill="{b.colour}"/>'
            f'<text x="{NAMES + width + 6:.1f}" y="{y + 16}">{b.text}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{ROW * len(bars)}" '
        f'font-family="{escape(FONT, quote=True)}" font-size="12" fill="{TEXT}">{"".join(rows)}</svg>'
    )
