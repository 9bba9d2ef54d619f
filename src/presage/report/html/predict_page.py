"""The page of `presage predict`: how long a step takes on GPUs that are not here, how sure that is, and why."""

from __future__ import annotations

from collections.abc import Sequence

from presage.prediction.step import StepResult
from presage.prediction.step_detail import StepDetail
from presage.report import prediction_tables as tables
from presage.report.html.charts.bars import parts_figure
from presage.report.html.charts.distribution import distribution_figure, distribution_table
from presage.report.html.page import Fact, Page, Section, Tone, plain, table_of
from presage.report.html.step_sections import (
    memory_section,
    ranks_section,
    roofline_section,
    step_timeline_section,
)
from presage.report.rank_tables import sent_table
from presage.text import percent, seconds, size

__all__ = ["predict_page", "step_facts"]

BOUND = {
    "gpu": "the GPU sets the pace",
    "host": "the GPU waits for the host, so faster kernels would gain little",
    "communication": "the GPUs wait for each other's data",
}
FEW = 20  # draws: fewer have no shape


def predict_page(found: StepResult, detail: StepDetail, command: str = "") -> Page:
    """All there is to see of a prediction."""
    asked, _ = plain(tables.headline(found)).split("\n")
    sections = [
        families_section(found),
        *([ranks_section(found.many), _collectives(found)] if found.many is not None else []),
        step_timeline_section(detail.shown, found.many),
        *([spread_section(found.drawn)] if len(found.drawn) >= FEW else []),
        memory_section(detail.graph, detail.memory, found.memory),
        roofline_section(detail),
        _modules(found),
    ]
    return Page(
        title=found.source or "a training step",
        question=f"How long will a training step take? {asked}",
        answer=answer(found),
        facts=step_facts(found),
        sections=tuple(s for s in sections if s is not None),
        notes=tuple(tables.remarks(found)),
        command=command,
    )


def answer(p: StepResult) -> str:
    """The one sentence."""
    where = f"on {with_article(p.gpu)}" if p.many is None else f"on {p.many.ranks:,} x {p.gpu} with {p.many.strategy}"
    sure = f"nine runs of ten within {seconds(p.step.p5)} to {seconds(p.step.p95)}"
    room = p.memory - p.peak_memory
    fits = f"it fits, with {size(room)} to spare" if room >= 0 else f"it does not fit: {size(-room)} too much"
    return f"A step takes {seconds(p.step.p50)} {where} ({sure}): {BOUND[p.bound]}, and {fits}."


def with_article(name: str) -> str:
    return f"{'an' if name.startswith(('NVIDIA', 'A', 'E', 'I', 'O')) else 'a'} {name}"


def step_facts(p: StepResult) -> tuple[Fact, ...]:
    busy, room = p.gpu_active / p.step.p50 if p.step.p50 else 0.0, p.memory - p.peak_memory
    facts = [
        Fact("Step time", seconds(p.step.p50), f"{seconds(p.step.p5)} to {seconds(p.step.p95)}"),
        Fact("GPU active", seconds(p.gpu_active), f"{percent(busy)} of the step"),
        Fact("Host, by itself", seconds(p.host), f"{p.launches:,} launches", "warn" if p.bound == "host" else ""),
        Fact("Peak memory", size(p.peak_memory), f"of {size(p.memory)}", "good" if room >= 0 else "bad"),
        Fact("From models of the ops", percent(p.coverage.modelled_fraction), "of the GPU time"),
    ]
    if p.many is not None:
        exposed = p.many.exposed + p.many.wait
        tone: Tone = "warn" if p.bound == "communication" else ""
        facts[2:2] = [Fact("Exposed communication", seconds(exposed), "transfers and waits, nothing beside", tone)]
    return tuple(facts)


def families_section(p: StepResult) -> Section:
    table = table_of(tables.part_table("Families of ops", "family", p.families))
    parts = [(f.name, f.gpu) for f in p.families]
    waits = p.step.p50 - sum(gpu for _, gpu in parts)
    if waits > 0.01 * p.step.p50:
        parts.append((_unbusy(p), waits))
    figure = parts_figure(parts, p.step.p50) if any(gpu > 0 for _, gpu in parts) else None
    return Section("Where the step goes", (table, table_of(tables.step_table(p))), figure, _most(p))


def _unbusy(p: StepResult) -> str:
    """What the GPU does when no kernel of the families runs."""
    return "waits for the host" if p.bound == "host" else "idle"


def _most(p: StepResult) -> str:
    lead = "Seconds of the step in which the GPU runs each family of ops, and their share of the step."
    if not p.families or not p.step.p50:
        return lead
    top = p.families[0]
    said = f" {top.name.capitalize()} takes most of it, {percent(top.gpu / p.step.p50)} of the step"
    idle = 1 - p.gpu_active / p.step.p50
    return lead + said + (f"; for {percent(idle)} of it the GPU has nothing to do." if idle > 0.01 else ".")


def spread_section(drawn: Sequence[float]) -> Section:
    told = distribution_table(drawn)
    lead = (
        f"{len(drawn):,} runs, each on a machine of this kind that may be a little faster or slower: the host's pace, "
        "the GPU's spread, and what the kernel models do not know. Above how many take so long, below the chance of "
        "more."
    )
    return Section("How sure that is", (told,), distribution_figure(drawn, what="runs"), lead)


def _collectives(p: StepResult) -> Section | None:
    if p.many is None or not p.many.collectives:
        return None
    sums: dict[str, float] = {}
    for s in p.many.collectives:
        sums[s.name] = sums.get(s.name, 0.0) + s.seconds * s.calls
    total = sum(sums.values())
    lead = f"What a rank sends in a step: {seconds(total)} of transfers if nothing ran beside them."
    figure = parts_figure(list(sums.items()), total) if total > 0 else None
    return Section("Collectives", (table_of(sent_table(p.many, most=40)),), figure, lead)


def _modules(p: StepResult) -> Section:
    modules = table_of(tables.part_table("Modules", "module", p.modules))
    figure = parts_figure([(m.name, m.gpu) for m in p.modules], p.gpu_active) if p.gpu_active else None
    lead = "GPU time by module of the model, and the single ops that cost most, with how near the GPU's peak they run."
    return Section("By module", (modules, table_of(tables.costly_table(p.costliest))), figure, lead)
