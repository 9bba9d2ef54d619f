"""Sections of a job's answer: breakdown, distribution, timeline, stages, memory, roofline, sensitivity."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from presage.prediction.breakdown import RooflinePoint
from presage.prediction.jobs.job_detail import BY
from presage.report import step_sections as step
from presage.report.answer import DataTable, Section, data_table
from presage.report.html.charts.bars import GIB, Swing, parts_figure, stacks_figure, tornado_figure, tornado_table
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.heat import heat_figure
from presage.report.html.charts.lanes import lanes_section, timeline_tasks
from presage.report.terms import MEMORY, TAIL_HELP, part_name, share_of, work_name
from presage.text import amount, percent, seconds, size

if TYPE_CHECKING:
    from presage.engine import Lane
    from presage.prediction.draws.distribution import StepDistribution
    from presage.prediction.jobs.job_prediction import JobResult

MARKED = (0.5, 0.95, 0.99)  # quantiles
PASSES = {"F": "forward", "B": "backward", "W": "weight gradients"}
STAGES = 64  # bars of memory
MOST_TASKS = 200_000  # of a timeline on a page


def breakdown_section(p: JobResult, *tables: DataTable) -> Section:
    """Parts of the step."""
    named, step = [(part_name(k), t) for k, t in p.step_parts.items()], p.step.p50
    first, *rest = sorted(named, key=lambda x: -x[1])
    text = f"Parts of one step on the busiest stage. Most goes to {first[0]}, {percent(first[1] / step)}"
    text += f"; then to {rest[0][0]}, {percent(rest[0][1] / step)}." if rest and rest[0][1] > 0 else "."
    return Section("Where the step goes", tables, partial(parts_figure, named, step), text)


def spread_section(p: JobResult, s: StepDistribution, *tables: DataTable) -> Section:
    """The distribution of the step time."""
    draws = s.draws.seconds.ravel()
    marks = {q: s.steps[q].value for q in MARKED}
    chart = partial(distribution_figure, draws, marks, marks={"without draws": p.seconds})
    over = next(((t, e.value) for t, e in s.longer.items() if 0 < e.value < 0.5), None)
    more = f" One step in {1 / over[1]:,.0f} exceeds p50 by more than {percent(over[0] - 1, 0)}." if over else ""
    text = (
        f"{s.count:,} steps drawn with slow GPUs, network variation and stalls ({s.source}): p50 "
        f"{seconds(marks[0.5])}, p95 {seconds(marks[0.95])}.{more} {TAIL_HELP}"
    )
    return Section("Uncertainty", (*tables, distribution_table(draws)), chart, text)


# ---- the pipeline


def timeline_section(p: JobResult, table: DataTable) -> Section | None:
    """Every microbatch on every stage, with the stages' `table`, unless they are too many to draw."""
    s = p.job_step.pipeline.schedule
    if 2 * s.stages * s.virtual * s.microbatches > MOST_TASKS:
        return None
    layers = {x.number: x.layers for x in p.stages}
    tasks = timeline_tasks(
        p.timeline, None, _pass_name, lambda lane: f"{lane.name} ({layers.get(lane.rank, 0)} layers)"
    )
    text = f"One step: {s.microbatches} microbatches, DP communication, the optimizer."
    if s.stages > 1:
        text = f"One step of {s.microbatches} microbatches, one lane per pipeline stage. {_bubble_text(p)}"
    section = lanes_section("Timeline of a step", tasks, text, p.seconds)
    tables = (table,) if s.stages > 1 else section.tables[:1]
    return replace(section, tables=tables, where="both" if s.stages > 1 else "page")


def _bubble_text(p: JobResult) -> str:
    """How long the busiest stage idles, in the breakdown's words and numbers."""
    busy, parts = max(p.stages, key=lambda s: s.busy), p.breakdown
    over = busy.busy / float(np.mean([s.busy for s in p.stages])) - 1
    waits = [(part_name(k), parts.get(k, 0.0)) for k in ("bubble", "pp") if parts.get(k, 0.0) > 0]
    gaps = ", ".join(f"{name} {share_of(t, p.seconds)}" for name, t in waits)
    text = f"Gaps of the busiest stage ({busy.number}): {gaps}." if gaps else "The busiest stage has no gaps."
    return f"{text} It works {percent(over)} longer than the mean stage: others wait for it." if over > 1e-3 else text


def _pass_name(name: str, _: Lane) -> str:
    return PASSES.get(name[:1], name) if name[1:2].isdigit() else name


def stages_section(p: JobResult, table: DataTable) -> Section:
    """Time of each stage, as a heat map."""
    n, columns = p.job.microbatches, ("forward", "backward", "idle")
    values = np.array([[s.forward * n, s.backward * n, s.bubble] for s in p.stages])
    names = [f"stage {s.number}" for s in p.stages]
    text = f"Seconds per step by stage; red is above the median of its column, blue below. {_bubble_text(p)}"
    return Section("Stages", (table,), partial(heat_figure, names, columns, values), text)


# ---- memory


def memory_section(p: JobResult, table: DataTable, savings: DataTable) -> Section:
    """Memory by stage and kind."""
    stages = p.memory.stages[:STAGES]
    kinds = {w: [float(getattr(m, k)) for m in stages] for k, w in MEMORY.items()}
    kinds = {w: v for w, v in kinds.items() if any(v)}
    limit = (f"GPU memory, {size(p.memory.memory)}", p.memory.memory)
    chart = partial(stacks_figure, [str(i) for i in range(len(stages))], kinds, "stage", GIB, limit)
    fullest = p.memory.stages.index(p.memory.worst)
    most = max(kinds, key=lambda w: kinds[w][fullest] if fullest < STAGES else 0.0) if kinds else ""
    left = p.memory.margin
    fits = f"{size(left)} free" if left >= 0 else f"{size(-left)} too little"
    cut = f" The first {STAGES} of {len(p.memory.stages)} stages." if len(p.memory.stages) > STAGES else ""
    text = f"Peak memory per GPU of each stage, by kind; most of it is {most}. The fullest stage has {fits}.{cut}"
    rows = [
        (str(i), *(size(v[i]) for v in kinds.values()), str(m.microbatches), size(m.needed))
        for i, m in enumerate(stages)
    ]
    by_stage = data_table("By stage", ("stage", *kinds, "microbatches in flight", "needed"), rows, where="page")
    return Section("Memory", (table, by_stage, savings), chart, text)


# ---- roofline and sensitivity


def roofline_section(p: JobResult) -> Section | None:
    """Each part of a layer against the GPU's limits."""
    dots = "Each dot is a part of a layer, its area the time on one GPU of the busiest stage."
    points = [_labelled(r) for r in p.roofline]
    return step.roofline_section(points, p.job.platform.gpu, dots, "", _roofline_table(p.roofline))


def _labelled(r: RooflinePoint) -> RooflinePoint:
    """A point with the names and whole launches that the chart shows."""
    kind = part_name(r.family)
    return replace(r, shapes=f"({kind})", family=kind, calls=max(1, round(r.calls)))


def _roofline_table(points: tuple[RooflinePoint, ...]) -> DataTable:
    columns = ("part", "work", "phase", "launches", "time", "FLOPs", "bytes", "TFLOP/s", "TB/s", "of the limit")
    rows = [
        (
            r.name, part_name(r.family), r.phase, f"{r.calls:,.0f}", seconds(r.seconds), amount(r.flops),
            size(r.moved), *step.roofline_cells(r),
        )
        for r in points
        if r.seconds > 0
    ]  # fmt: skip
    return data_table("Parts of a layer, one GPU, one step", columns, rows, text=3)


def sensitivity_section(p: JobResult) -> Section | None:
    """The step with each kind of work faster or slower."""
    if not p.perturbed:
        return None
    series = (f"{BY:.0%} faster", f"{BY:.0%} slower")
    swings = [Swing(work_name(s.name), (s.quicker / p.seconds - 1, s.slower / p.seconds - 1)) for s in p.perturbed]
    best = max(swings, key=lambda s: -s.changes[0])
    text = (
        f"The step with each kind of work {BY:.0%} faster or slower; hidden work changes nothing. Most gained: "
        f"{best.name}, {percent(-best.changes[0])} off the step. For p95 and for sources of noise: presage sensitivity."
    )
    table = tornado_table(swings, "work", series, "Change of the step")
    return Section("Sensitivity", (table,), partial(tornado_figure, swings, series, "step time"), text, where="page")
