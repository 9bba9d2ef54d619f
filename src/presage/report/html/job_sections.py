"""Sections of a job's page: its step, how sure it is, its pipeline, memory, limits, and what would change it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from presage.engine import Lane
from presage.errors import PresageError
from presage.prediction.draws.distribution import StepDistribution
from presage.prediction.jobs.job_prediction import JobResult
from presage.prediction.jobs.job_roofline import Ran, ran
from presage.prediction.jobs.job_timeline import job_timeline
from presage.prediction.jobs.perturbation import BY, perturb
from presage.prediction.step_roofline import RooflinePoint
from presage.report import job_tables as tables
from presage.report import sure_tables
from presage.report.html.charts.bars import parts_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.charts.heat import heat_figure, heat_table
from presage.report.html.charts.roofline import roofline_figure
from presage.report.html.charts.stacks import GIB, stacks_figure
from presage.report.html.charts.tornado import Swing, tornado_figure, tornado_table
from presage.report.html.page import Section, Table, table_of
from presage.report.html.timeline import lanes_section, timeline_bars
from presage.report.sensitivity_tables import CLASSES
from presage.text import amount, percent, seconds, size

__all__ = [
    "heat_section",
    "limits_section",
    "memory_section",
    "parts_section",
    "pipeline_section",
    "sure_section",
    "swings_section",
]

NAMED = (0.5, 0.95, 0.99)
PASSES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
MOST_TASKS = 200_000  # of a timeline
STAGES = 64  # bars of memory
TERA = 1e12


# ---- where it goes


def parts_section(p: JobResult, tokens: float | None) -> Section:
    named = [(tables.PARTS.get(k, k), took) for k, took in p.breakdown.items()]
    first, *rest = sorted(named, key=lambda x: -x[1])
    lead = (
        f"Parts of one step on the stage that works longest. Most goes to {first[0]}, {percent(first[1] / p.seconds)}"
    )
    lead += f"; then to {rest[0][0]}, {percent(rest[0][1] / p.seconds)}." if rest and rest[0][1] > 0 else "."
    shown = (table_of(tables.breakdown_table(p)), table_of(tables.step_table(p, tokens)))
    return Section("Where the step goes", shown, parts_figure(named, p.seconds), lead)


# ---- how sure


def sure_section(p: JobResult, s: StepDistribution) -> Section:
    draws = s.found.draws.seconds.ravel()
    figure = distribution_figure(draws, {q: s.steps[q].value for q in NAMED}, marks={"predicted": p.seconds})
    p50, p95 = s.steps[0.5].value, s.steps[0.95].value
    over = next(((t, e.value) for t, e in s.longer.items() if 0 < e.value < 0.5), None)
    more = f" One in {1 / over[1]:,.0f} takes over {percent(over[0] - 1, 0)} longer than that." if over else ""
    lead = (
        f"{s.count:,} steps drawn through the same engine, with slow GPUs, the network and stalls ({s.source}): 19 of "
        f"20 take at most {seconds(p95)}, half at most {seconds(p50)}.{more} Above how many take so long, below the "
        "chance of longer."
    )
    told = (sure_tables.sure_table(s), sure_tables.longer_table(s))
    shown = (*(_filled(table_of(t)) for t in told), distribution_table(draws))
    return Section("How sure that is", shown, figure, lead)


def _filled(table: Table) -> Table:
    """Without columns that nothing is in."""
    kept = [i for i in range(len(table.columns)) if any(row[i] for row in table.rows)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return Table(tuple(table.columns[i] for i in kept), rows, table.title)


# ---- the pipeline


def pipeline_section(p: JobResult) -> Section | None:
    """Every microbatch on every stage; None where there are too many."""
    s = p.job_step.pipeline.schedule
    if 2 * s.stages * s.virtual * s.microbatches > MOST_TASKS:
        return None
    try:
        line = job_timeline(p.job_step)
    except PresageError:
        return None
    layers = {x.number: x.layers for x in p.stages}
    bars = timeline_bars(line, None, _group, lambda lane: _lane(lane, layers))
    idle = percent(float(p.job_step.pipeline.bubble.mean()) / p.seconds)
    lead = (
        f"One step of {s.microbatches} microbatches, a lane for each of {s.stages} pipeline stages. Gaps are the "
        f"bubble: on average a stage waits for {idle} of the step."
        if s.stages > 1
        else f"One step: {s.microbatches} microbatches one after the other, what replicas send, and the optimizer."
    )
    made = lanes_section("Timeline of a step", bars, lead, p.seconds)
    return replace(made, tables=made.tables[:1])


def _group(name: str, _: Lane) -> str:
    return PASSES.get(name[:1], name) if name[1:2].isdigit() else name


def _lane(lane: Lane, layers: dict[int, int]) -> str:
    return f"{lane.name} ({layers.get(lane.rank, 0)} layers)"


def heat_section(p: JobResult) -> Section | None:
    """Stages against what they do."""
    if len(p.stages) < 2:
        return None
    n, columns = p.job.microbatches, ("forward", "backward", "bubble")
    values = np.array([[s.forward * n, s.backward * n, s.bubble] for s in p.stages])
    names = [f"stage {s.number}" for s in p.stages]
    busy = max(p.stages, key=lambda s: s.busy)
    spread = busy.busy / float(np.mean([s.busy for s in p.stages])) - 1
    lead = "Seconds of a step by stage; red is above the usual of its column, blue below. "
    if spread > 1e-3:
        lead += (
            f"Stage {busy.number} works longest, {percent(spread)} longer than the mean stage: the others wait for it."
        )
    else:
        lead += "All work equally long."
    cells = heat_table("stage", names, columns, values, title="The cells")
    return Section("Stages", (table_of(tables.stage_table(p)), cells), heat_figure(names, columns, values), lead)


# ---- memory


def memory_section(p: JobResult) -> Section:
    stages = p.memory.stages[:STAGES]
    kinds = {w: [float(getattr(m, k)) for m in stages] for k, w in tables.MEMORY.items()}
    kinds = {w: v for w, v in kinds.items() if any(v)}
    limit = (f"the GPU's {size(p.memory.memory)}", p.memory.memory)
    figure = stacks_figure([str(i) for i in range(len(stages))], kinds, "stage", GIB, limit)
    worst = max(kinds, key=lambda w: kinds[w][p.memory.stages.index(p.memory.worst)]) if kinds else ""
    left = p.memory.margin
    fits = f"{size(left)} are left" if left >= 0 else f"{size(-left)} are missing"
    cut = f" The first {STAGES} of {len(p.memory.stages)} stages." if len(p.memory.stages) > STAGES else ""
    lead = (
        f"What a GPU of each stage holds when it holds most, by kind; most of it is {worst}. On the fullest stage "
        f"{fits}.{cut}"
    )
    shown = (table_of(tables.memory_table(p)), _stages_table(p, kinds), table_of(tables.help_table(p)))
    return Section("Memory", shown, figure, lead)


def _stages_table(p: JobResult, kinds: dict[str, list[float]]) -> Table:
    many = len(next(iter(kinds.values()), []))
    rows = (
        (str(i), *(size(v[i]) for v in kinds.values()), str(m.microbatches), size(m.needed))
        for i, m in enumerate(p.memory.stages[:many])
    )
    return Table(("stage", *kinds, "microbatches in flight", "needed"), tuple(rows), "By stage")


# ---- limits


def limits_section(p: JobResult) -> Section | None:
    """Each part of a layer against what the GPU can do at most."""
    found, gpu = ran(p.job, p.job_step), p.job.platform.gpu
    if not found:
        return None
    work = [_worked(r) for r in found]
    names = {v: k for k, v in gpu.peak.items()}
    peaks = {names.get(r.peak, "peak"): r.peak for r in found if r.flops}
    total, least = sum(r.seconds for r in found), sum(r.least for r in found)
    lead = (
        "Each dot is a part of a layer, its area the time it takes on one GPU of the busiest stage. Lines are what the "
        f"{gpu.name} can do at most: at those limits all of it would take {seconds(least)}, and it takes "
        f"{seconds(total)} ({percent(least / total)} of the limits)."
    )
    return Section(
        "How near the limits", (_ran_table(found),), roofline_figure(work, gpu.memory_bandwidth, peaks), lead
    )


def _worked(r: Ran) -> RooflinePoint:
    kind = tables.PARTS[r.kind]
    return RooflinePoint(
        r.block, f"({kind})", r.phase, kind, max(1, round(r.launches)), r.seconds, r.flops, r.moved, r.least, r.peak
    )


def _ran_table(found: tuple[Ran, ...]) -> Table:
    columns = ("part", "work", "phase", "launches", "time", "FLOPs", "bytes", "TFLOP/s", "TB/s", "of the limit")
    rows = (
        (
            r.block, tables.PARTS[r.kind], r.phase, f"{r.launches:,.0f}", seconds(r.seconds), amount(r.flops),
            size(r.moved), f"{r.flops / r.seconds / TERA:.4g}" if r.flops else "-",
            f"{r.moved / r.seconds / TERA:.3g}", percent(r.least / r.seconds),
        )
        for r in found
        if r.seconds > 0
    )  # fmt: skip
    return Table(columns, tuple(rows), "Parts of a layer, of one GPU in a step", frozenset({0, 1, 2}))


# ---- what would change it


def swings_section(p: JobResult) -> Section | None:
    found, series = perturb(p.job), (f"{BY:.0%} quicker", f"{BY:.0%} slower")
    if not found:
        return None
    swings = [Swing(CLASSES.get(s.name, s.name), (s.quicker / p.seconds - 1, s.slower / p.seconds - 1)) for s in found]
    best = max(swings, key=lambda s: -s.changes[0])
    lead = (
        f"The step with each class of work {BY:.0%} quicker or slower, through the same laws: what hides behind other "
        f"work moves nothing. First come {best.name}: {BY:.0%} quicker, and the step is "
        f"{percent(-best.changes[0])} shorter. What moves its p95, and which noise does: presage sensitivity."
    )
    shown = tornado_table(swings, "class of work", series, "Change of the step")
    return Section("What would change it", (shown,), tornado_figure(swings, series, "the step time"), lead)
