"""The answer of `presage predict`: the time of a training step on GPUs that are not here, and what it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from presage.prediction.breakdown import BreakdownPart, CostlyOps, RecordedPart, StepAssumption
from presage.prediction.rank_results import RankClass, RankResults
from presage.prediction.step import DataLoading, StepResult
from presage.report.answer import Answer, DataTable, Fact, Section, Tone, data_table, limit_rows, sections_of
from presage.report.html.charts.bars import parts_figure
from presage.report.html.charts.distribution import distribution_section
from presage.report.next_sections import next_edits_section
from presage.report.spread_tables import noise_section
from presage.report.step_sections import memory_section, ranks_section, step_roofline_section, step_timeline_section
from presage.report.terms import (
    TAIL_HELP,
    family_name,
    first_few,
    gpu_basis,
    peak_share,
    share_of,
    step_interval,
    step_text,
    step_time,
    verdict,
)
from presage.text import known_seconds, percent, seconds, shorten, size

BOUND = {
    "gpu": "GPU-bound",
    "host": "CPU-bound: the GPU waits for the host, so faster kernels would gain little",
    "loading": "bound by data loading: the GPU waits for batches, so faster kernels would gain nothing",
    "communication": "communication-bound: GPUs wait for each other's data",
}
FEWEST = 20  # draws: fewer have no shape


def predict_answer(p: StepResult, page: bool = False) -> Answer:
    """Everything `presage predict` shows; `page`: with timeline, memory over the step and roofline."""
    sections = sections_of(
        next_edits_section(p) if page else None,
        families_section(p, step_table(p)),
        recorded_section(p.recorded) if p.recorded else None,
        ranks_section(p.many, rank_table(p.many, p.memory_known)) if p.many is not None else None,
        collectives_section(p.many) if p.many is not None else None,
        noise_section(p.spread) if p.spread is not None else None,
        step_timeline_section(p) if page else None,
        spread_section(p.draws) if page and len(p.draws) >= FEWEST else None,
        memory_section(p) if page and p.memory_known else None,
        step_roofline_section(p) if page else None,
        _modules_section(p),
    )
    return Answer(
        title=p.source or "training step",
        question="How long will a training step take?",
        subject=subject(p),
        headline=headline(p),
        verdict=f"{verdict(p)}{assumed_text(p.assumptions)}",
        verdict_tone=("warn" if _deciding(p.assumptions) else "good") if p.fits else "bad",
        facts=step_facts(p),
        sections=sections,
        notes=notes(p),
        to_data=p.to_json,
        basis=gpu_basis(p.basis.gpu),
    )


def subject(p: StepResult) -> str:
    """What was predicted, and for what."""
    given = ", ".join(f"{k}={v}" for k, v in p.arguments.items())
    where = p.gpu if p.many is None else f"{p.many.ranks:,} x {p.gpu} ({p.many.platform}), {p.many.strategy}"
    return f"{p.source or 'training step'}{f' ({given})' if given else ''} on {where}"


def headline(p: StepResult) -> str:
    return f"{step_text(p.step)}, {BOUND[p.bound]}."


def step_facts(p: StepResult) -> tuple[Fact, ...]:
    """The key figures of a step."""
    facts = [
        Fact("Step time", step_time(p.step), f"90% interval {step_interval(p.step)}"),
        Fact("GPU active", seconds(p.gpu_active), share_of(p.gpu_active, p.step.p50)),
        Fact("Host time", seconds(p.host), f"{p.launches:,} launches", "warn" if p.bound == "host" else ""),
        Fact("Peak memory", peak_text(p), f"of {size(p.gpu_memory)}", "good" if p.fits else "bad"),
        Fact("Modelled", percent(p.coverage.modelled_fraction), "of the GPU time"),
    ]
    if p.many is not None:
        exposed = p.many.exposed + p.many.wait
        tone: Tone = "warn" if p.bound == "communication" else ""
        facts[2:2] = [Fact("Exposed communication", seconds(exposed), "transfers and waits, not overlapped", tone)]
    return tuple(facts)


def peak_text(p: StepResult) -> str:
    return size(p.peak_memory) if p.memory_known else "not known"


def notes(p: StepResult) -> tuple[str, ...]:
    """What to know before trusting it."""
    out, c = [], p.coverage
    if c.fallback_ops:
        rest = percent(1 - c.modelled_fraction)
        out.append(f"{rest} of the GPU time is from a roofline: no kernel model for {first_few(c.fallback_ops)}")
    if c.unknown_host_ops:
        out.append(f"host time of {first_few(c.unknown_host_ops)} is that of similar ops (never traced)")
    return (*out, *assumption_notes(p.assumptions), *p.notes)


def assumed_text(assumptions: Sequence[StepAssumption]) -> str:
    """' Assumed: 2 values decide what runs (train.py:31, model.py:8), up to 40% of the step.', or nothing."""
    found = _deciding(assumptions)
    if not found:
        return ""
    values = "a value that decides" if len(found) == 1 else f"{len(found)} values that decide"
    lines = first_few(list(dict.fromkeys(a.line for a in found)), 3)
    share = f", up to {percent(found[0].share)} of the step" if found[0].share else ""
    return f" Assumed: {values} what runs ({lines}){share}."


def assumption_notes(assumptions: Sequence[StepAssumption]) -> tuple[str, ...]:
    """What was assumed, with how to say otherwise."""
    out = []
    for a in _deciding(assumptions):
        remedy = "" if a.what.startswith(("the size", "the distribution")) else f" (--assume {a.line}=VALUE)"
        share = f"up to {percent(a.share)} of the step hangs on it" if a.share else "the code branched on it"
        out.append(f"{a.line}: {a.what} is not known and taken to be {a.value}; {share}{remedy}")
    out += [f"{a.line}: {a.what} is taken to be {a.value}, as given" for a in assumptions if a.given]
    logged = list(dict.fromkeys(a.line for a in assumptions if not a.decides and not a.given))
    if logged:
        out.append(f"values read at {first_few(logged)} are not known; nothing was seen to depend on them")
    return tuple(out)


def _deciding(assumptions: Sequence[StepAssumption]) -> list[StepAssumption]:
    return [a for a in assumptions if a.decides and not a.given]


# ---- tables


def step_table(p: StepResult) -> DataTable:
    rows = [
        ("step time", step_time(p.step), f"mean {known_seconds(p.step.mean, p.step.p5, p.step.p95)}"),
        ("GPU active", seconds(p.gpu_active), share_of(p.gpu_active, p.step.p50)),
        ("host", seconds(p.host), f"{p.launches} launches, by itself"),
        ("bound by", p.bound, ""),
        ("peak memory", peak_text(p), f"of {size(p.gpu_memory)}"),
    ]
    if p.many is not None:
        rows[2:2] = [
            ("communication", seconds(p.many.communication), "transfers, without waits for other ranks"),
            ("  exposed", seconds(p.many.exposed), "not overlapped by kernels"),
            ("wait for ranks", seconds(p.many.wait), "longest of all ranks, not overlapped"),
        ]
    if p.data_loading is not None:
        rows.append(("data loading", f"about {seconds(p.data_loading.seconds)}", _loading_text(p.data_loading)))
    return data_table("Step", ("", "", ""), rows, wrap=True)


def _loading_text(d: DataLoading) -> str:
    if not d.workers:
        return "on this host, in the training process: part of the step"
    each = f"on this host, {d.workers} worker{'s' * (d.workers > 1)}"
    kept = "keeps up with the step" if d.keeps_up else "too slow for the step, which waits for it"
    return f"{each}, a step's batches every {seconds(d.pace)}: {kept}"


def part_table(
    title: str, first: str, parts: Sequence[BreakdownPart], whole: tuple[str, float], most: int = 20
) -> DataTable:
    """Families or modules, largest first, with their shares of the `whole`: its name and its seconds."""
    rows = [
        (
            family_name(x.name), str(x.ops), seconds(x.gpu), percent(x.gpu / whole[1] if whole[1] else 0.0),
            seconds(x.host),
        )
        for x in parts
    ]  # fmt: skip
    return data_table(title, (first, "ops", "GPU", f"of {whole[0]}", "host"), limit_rows(rows, most))


def costly_table(rows: Sequence[CostlyOps]) -> DataTable:
    """The ops with the most GPU time, and how near the GPU's peak they run."""
    columns = ("op", "phase", "calls", "GPU", "share", "of peak", "limit", "from")
    cells = [
        (
            shorten(f"{r.name.removeprefix('aten::')} {r.shapes}", 70), r.phase, str(r.calls), seconds(r.seconds),
            percent(r.share), peak_share(r.efficiency, r.limit), r.limit, r.source,
        )
        for r in rows
    ]  # fmt: skip
    return data_table("Costliest ops", columns, cells)


def recorded_section(parts: Sequence[RecordedPart]) -> Section:
    """Kernels as the trace has them against those predicted."""
    columns = ("family", "ops", "measured", "predicted", "predicted over measured")
    whole = RecordedPart("all", *(sum(getattr(p, k) for p in parts) for k in ("ops", "recorded", "predicted")))
    rows = [
        (family_name(p.name), str(p.ops), seconds(p.recorded), seconds(p.predicted), f"{p.predicted / p.recorded:.2f}")
        for p in (*parts, whole)
    ]
    text = "Kernels in the profiler's trace, on the GPU it was recorded on, and as predicted for this one."
    return Section("Measured against predicted", (data_table("Measured against predicted", columns, rows),), text=text)


def rank_table(m: RankResults, memory_known: bool = True) -> DataTable:
    """Equal ranks share a row."""
    columns = ("from rank", "ranks", "compute", "communication", "exposed", "wait", "host", "memory")
    rows = [
        (
            _rank(k), str(k.ranks), *(seconds(x) for x in (k.compute, k.communication, k.exposed, k.wait, k.host)),
            size(k.peak_memory) if memory_known else "not known",
        )
        for k in m.kinds
    ]  # fmt: skip
    return data_table("Ranks", columns, limit_rows(rows, 16))


def _rank(k: RankClass) -> str:
    how = [f"speed {k.speed:g}"] * (k.speed != 1) + [f"host x{k.pace:g}"] * (k.pace != 1)
    how += [f"{name}={value}" for name, value in (k.arguments or {}).items()]
    return f"{k.rank}" + (f" ({', '.join(how)})" if how else "")


def collective_table(m: RankResults, most: int = 8) -> DataTable:
    """Collectives of one kind and size share a row."""
    columns = ("collective", "group", "ranks", "size", "calls", "each", "bus GB/s", "share", "from")
    total = sum(s.seconds * s.calls for s in m.collectives)
    rows = [
        (
            s.name, s.group, str(s.ranks), size(s.nbytes), str(s.calls), seconds(s.seconds), f"{s.busbw / 1e9:.0f}",
            percent(s.seconds * s.calls / total) if total else "", "measured" if s.measured else "link facts",
        )
        for s in m.collectives
    ]  # fmt: skip
    return data_table("Collectives per rank", columns, limit_rows(rows, most))


# ---- sections


def families_section(p: StepResult, *tables: DataTable) -> Section:
    """GPU time by family of ops, and the idle rest of the step."""
    parts = [(family_name(f.name), f.gpu) for f in p.families]
    idle = p.step.p50 - sum(gpu for _, gpu in parts)
    if idle > 0.01 * p.step.p50:
        parts.append(("idle, waiting for the host" if p.bound == "host" else "idle", idle))
    chart = partial(parts_figure, parts, p.step.p50) if any(gpu > 0 for _, gpu in parts) else None
    shown = (*tables, part_table("Op families", "family", p.families, ("the step", p.step.p50)))
    return Section("Where the step goes", shown, chart, _families_text(p))


def _families_text(p: StepResult) -> str:
    text = "GPU time of each family of ops, and its share of the step."
    if not p.families or not p.step.p50:
        return text
    top, idle = p.families[0], 1 - p.gpu_active / p.step.p50
    most = f" Most goes to {family_name(top.name)}, {share_of(top.gpu, p.step.p50)}"
    return text + most + (f"; the GPU is idle for {percent(idle)} of it." if idle > 0.01 else ".")


def spread_section(drawn: NDArray[np.float64]) -> Section:
    """The distribution of the drawn step times."""
    text = (
        f"{len(drawn):,} runs, each on a slightly faster or slower machine of this kind: host speed, GPU spread and "
        f"the error of the kernel models. {TAIL_HELP}"
    )
    return distribution_section(drawn, text, what="runs")


def collectives_section(m: RankResults) -> Section | None:
    """What a rank sends in a step."""
    if not m.collectives:
        return None
    sums: dict[str, float] = {}
    for s in m.collectives:
        sums[s.name] = sums.get(s.name, 0.0) + s.seconds * s.calls
    total = sum(sums.values())
    text = f"Collectives of one rank: {seconds(total)} per step if nothing overlapped them."
    chart = partial(parts_figure, list(sums.items()), total) if total > 0 else None
    return Section("Collectives", (collective_table(m),), chart, text)


def _modules_section(p: StepResult) -> Section:
    chart = partial(parts_figure, [(m.name, m.gpu) for m in p.modules], p.gpu_active) if p.gpu_active else None
    text = "GPU time by module of the model, and the costliest single ops with how near the GPU's peak they run."
    modules = part_table("Modules", "module", p.modules, ("GPU time", p.gpu_active))
    tables = (modules, costly_table(p.costliest))
    return Section("By module", tables, chart, text)
