"""The answer to a plan as plain values: key figures, sentences and charts, first of the step, then of drawn runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from presage.prediction.jobs.job_prediction import JobResult
from presage.report.html.charts.bars import AxisUnit, parts_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.theme import BAD, colours
from presage.report.job_answer import headline, layout_text
from presage.report.terms import (
    LEAST,
    MEMORY,
    count_text,
    part_name,
    share_of,
    signed,
    step_interval,
    step_time,
    verdict,
)
from presage.text import amount, known_seconds, percent, seconds, size
from presage.ui.knobs import InvalidPlan
from presage.ui.plans import predicted
from presage.ui.question import DAY, RunQuestion

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from presage.runs.whole import RunResult


DRAWS, RUNS, FEWEST = 4000, 500, 500
STAGES, MOST = 64, 128  # of a pipeline whose steps are drawn so often; and those that are drawn here at all
YEAR, LONG = 365.25 * DAY, 30  # a run of more years than that is none
SEED = 0
ABOUT = 0.85, 1.2  # presage's own error, roughly: the digits that are known before steps are drawn


class Measure(NamedTuple):
    """A key figure that plans are compared by; `better`: 1 if more is better, -1 if less is, 0 if neither."""

    name: str
    shown: str
    detail: str
    value: float
    better: int
    tone: str = ""


# ---- at once


def step_measures(p: JobResult, asked: RunQuestion | None) -> list[Measure]:
    """Median and interval of drawn steps; without draws what is known of them: about two digits."""
    m, q = p.memory, p.step
    idle, each = p.breakdown.get("bubble", 0.0), f"{p.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    fits = f"of {size(m.memory)}, " + (f"{size(m.margin)} to spare" if m.fits else f"{size(-m.margin)} too little")
    detail = f"90% interval {step_interval(q)}" if p.drawn else "interval being drawn"
    out = [
        Measure("Step", step_shown(p), detail, q.p50, -1),
        Measure("Throughput", f"{count_text(p.tokens_per_second)}/s", each, p.tokens_per_second, 1),
        Measure("MFU", percent(p.mfu), f"of {p.peak[0]}'s {p.peak[1] / 1e12:.0f} TFLOPS", p.mfu, 1),
        Measure("Memory", size(m.needed), fits, m.needed, 0, "good" if m.fits else "bad"),
        Measure("Exposed comm", seconds(p.exposed), share_of(p.exposed, q.p50), p.exposed, -1),
        Measure("Pipeline bubble", seconds(idle), share_of(idle, q.p50), idle, -1),
    ]  # fmt: skip
    return out if asked is None else [*out, *_spent(p, asked)]


def step_shown(p: JobResult) -> str:
    """5.0 s; without draws about 4.9 s."""
    if p.drawn:
        return step_time(p.step)
    return f"≈ {known_seconds(p.seconds, ABOUT[0] * p.seconds, ABOUT[1] * p.seconds)}"


def _spent(p: JobResult, asked: RunQuestion) -> list[Measure]:
    """The training from the mean step, without failures."""
    s = p.spent(asked.tokens)
    return [
        Measure("Steps alone", _days(s.days), f"{s.steps:,.0f} steps without failures", s.days, -1),
        Measure("GPU-hours", amount(s.gpu_hours), f"{s.kwh / 1e3:,.0f} MWh", s.gpu_hours, -1),
    ]


def step_sentences(p: JobResult) -> dict[str, str]:
    """The headline and the verdict of `presage job`, and what it runs on."""
    job = p.job
    where = f"{job.gpus:,} x {job.platform.gpu.name}" if job.gpus > 1 else f"one {job.platform.gpu.name}"
    first = headline(p)
    if not p.drawn:
        first = f"{step_shown(p)}/step{first[first.index(':') :]}"
    return {"sentence": first, "verdict": verdict(p), "subject": f"{job.name} on {where}: {layout_text(p)}"}


# ---- with draws


@lru_cache(64)
def drawn_job(text: str, noise: str) -> JobResult:
    """As `presage job` draws it, without intervals for the noise's own uncertainty; with --draws it draws evenly."""
    from presage.prediction.draws.distribution import quick_distribution

    p = predicted(text)
    _drawable(p)
    return replace(p, drawn=True, noise=noise, spread=quick_distribution(p, SEED, draw_count(p), noise))


def draw_count(p: JobResult) -> int:
    """Fewer for many stages: the time to draw grows with their square."""
    return max(FEWEST, min(DRAWS, int(DRAWS * (STAGES / p.job.parallel.pp) ** 2)))


def _drawable(p: JobResult) -> None:
    if p.job.parallel.pp > MOST:
        raise InvalidPlan(f"pp is {p.job.parallel.pp}: this page draws at most {MOST} stages; use presage job --draws")


def spread_measures(p: JobResult) -> list[Measure]:
    g = p.distribution
    late, middle = g.quantile(0.95).value, g.quantile(0.5).value
    over = g.exceeds(1.1 * middle).value
    return [
        Measure("p95 step", seconds(late), f"steps vary: {signed(p.jitter)} over p50", late, -1),
        Measure("P(> 1.1 x median)", percent(over, 2), f"a step over {seconds(1.1 * middle)}", over, -1),
    ]  # fmt: skip


@lru_cache(64)
def draw_run(text: str, asked: RunQuestion) -> RunResult:
    """As `presage run --draws 500` draws it."""
    from presage.runs.run import with_interval
    from presage.runs.sets import chosen_reliability
    from presage.runs.steps import step_times
    from presage.runs.whole import predict_run

    p = predicted(text)
    _drawable(p)
    steps = asked.steps(p.job.tokens)
    if (years := steps * p.seconds / YEAR) > LONG:
        raise InvalidPlan(f"the run would take {years:,.0f} years: choose fewer tokens or more GPUs", ("tokens",))
    kind = chosen_reliability(asked.failures, asked.rate, asked.restart)
    times, _ = step_times(p, asked.noise, bool(kind.slow), SEED)
    until = None if asked.days is None else asked.days * DAY
    found = predict_run(p, steps, kind, times=times, spares=asked.spares, draws=RUNS, seed=SEED, deadline=until)
    found = replace(found, run=with_interval(found.run, asked.interval))
    assert found.outcome.draws == RUNS  # drawn here, so that whoever waits for it waits outside the cache's lock
    return found


def run_measures(r: RunResult) -> list[Measure]:
    from presage.runs.outcome import quantiles

    o = r.outcome
    middle, late = o.quantile(0.5) / DAY, o.quantile(0.95) / DAY
    good = float(o.goodput.mean())
    out = [
        Measure("Whole run", _days(middle), f"p95 {_days(late)}", middle, -1),
        Measure("Goodput", percent(good), _stops_text(r), good, 1),
    ]
    if r.deadline is not None:
        chance = o.done_by(r.deadline)
        tone = "good" if chance >= 0.9 else "bad" if chance < 0.5 else "warn"
        said = f"done within {r.deadline / DAY:g} days"
        out.append(Measure("By the deadline", percent(chance), said, chance, 1, tone))
    if r.cost is not None:
        cost = float(quantiles(r.cost, 0.5))
        out.append(Measure("Cost", count_text(cost), f"at {r.job.terms.price:g} per GPU-hour", cost, -1))
    return out


def _stops_text(r: RunResult) -> str:
    """412 failures, 3 spares; checkpoint every 38 min."""
    every = f"{r.run.every * r.run.step / 60:.3g} min" if r.run.every < r.run.steps else "never"
    spares = "" if r.run.spares is None else f", {count_text(r.run.spares)} spare{'' if r.run.spares == 1 else 's'}"
    failures = float(r.outcome.failures.mean())
    saves = f"checkpoint every {every}" if every != "never" else "no checkpoints"
    return f"{failures:,.0f} failures{spares}; {saves}"


def run_sentence(r: RunResult, asked: RunQuestion) -> str:
    """The run in a sentence, and where the rest of its time goes."""
    o = r.outcome
    whole = float(sum(v.mean() for v in o.parts.values()))
    lost = sorted(((float(v.mean()) / whole, name) for name, v in o.parts.items() if name != "steps"), reverse=True)
    told = ", ".join(f"{LOST[name]} {percent(share)}" for share, name in lost[:3] if share > 0.001)
    rest = f"; lost to {told}" if told else ""
    middle, late = _days(o.quantile(0.5) / DAY), _days(o.quantile(0.95) / DAY)
    return f"{count_text(asked.tokens)} tokens take {middle} (p95 {late}){rest}."


LOST: Mapping[str, str] = {
    "stalls": "stalls", "slow": "slow episodes", "checkpoints": "checkpoints", "lost": "repeated steps",
    "detection": "detecting failures", "spares": "waiting for spares", "restart": "restarts",
}  # fmt: skip


# ---- words


def _days(days: float) -> str:
    if not days < float("inf"):
        return "never done"
    if days >= 1:
        return f"{days:,.0f} days" if days >= 1000 else f"{days:.3g} days"
    return f"{days * 24:.3g} h" if days * 24 >= 1 else f"{days * 1440:.3g} min"


# ---- Charts of a plan as plain values, without a theme: the page puts on the one of the day.

Chart = dict[str, Any]
GIB = 1024.0**3
TALL = 330  # pixels
SHOWN = 0.1  # of the chart: smaller parts have no room for their number


def parts_chart(p: JobResult) -> Chart:
    parts = [(part_name(name), took) for name, took in p.breakdown.items() if took > LEAST * p.seconds]
    figure = parts_figure(parts, p.seconds)
    figure.update_layout(height=TALL)
    return plain_chart(figure, (0.0, max(took for _, took in parts) * 1.02))


def memory_chart(p: JobResult) -> Chart:
    """Memory of a GPU of the fullest stage by kind, against its capacity."""
    from plotly.graph_objects import Bar, Figure

    worst, capacity = p.memory.worst, p.memory.memory
    held = [(words, float(getattr(worst, name))) for name, words in MEMORY.items()]
    paint = colours(words for words, _ in held)
    figure = Figure(
        [
            Bar(
                x=[nbytes / GIB], y=[""], name=words, orientation="h", marker={"color": colour},
                text=[size(nbytes) if nbytes > SHOWN * max(worst.needed, capacity) else ""], textposition="inside",
                insidetextanchor="middle", textangle=0,
                hovertemplate=f"{words}: {size(nbytes)}, {percent(nbytes / worst.needed)}<extra></extra>",
            )
            for (words, nbytes), colour in zip(held, paint.values(), strict=True) if nbytes
        ]
    )  # fmt: skip
    figure.add_vline(x=capacity / GIB, line={"color": BAD, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=capacity / GIB, y=1, yref="paper", text=f"GPU memory, {size(capacity)}", showarrow=False, xanchor="right",
        xshift=-6, yanchor="top",
    )  # fmt: skip
    figure.update_layout(barmode="stack", height=TALL, bargap=0.62, legend={"traceorder": "normal"}, margin_t=90)
    figure.update_xaxes(title_text="GiB", rangemode="tozero")
    figure.update_yaxes(showticklabels=False, ticks="")
    return plain_chart(figure, (0.0, max(worst.needed, capacity) / GIB * 1.03))


def spread_chart(p: JobResult) -> Chart:
    figure = distribution_figure(p.draws, marks={"no jitter": p.seconds}, what="steps", height=450)
    return plain_chart(figure, _x_range(figure))


def run_chart(r: RunResult) -> Chart:
    marks = {} if r.deadline is None else {"deadline": r.deadline}
    middle = r.outcome.quantile(0.5)
    unit = AxisUnit("days", DAY) if DAY <= middle < float("inf") else None
    figure = distribution_figure(r.outcome.wall, marks=marks, what="runs", unit=unit, height=450)
    return plain_chart(figure, _x_range(figure))


def _x_range(figure: Figure) -> tuple[float, float] | None:
    found = figure.layout.xaxis.range
    return None if found is None else (float(found[0]), float(found[1]))


def plain_chart(figure: Figure, span: tuple[float, float] | None = None) -> Chart:
    """`meta.span`: what its x axis should show at least, so that charts side by side can share it."""
    import json

    if span is not None:
        figure.update_layout(meta={"span": list(span)})
    out: Chart = json.loads(figure.to_json())
    out["layout"].pop("template", None)
    return out


def quantile_rows(draws: Any) -> list[list[str]]:
    """The curve's numbers: quantile, at most, longer than that."""
    return [list(row) for row in distribution_table(draws).rows]
