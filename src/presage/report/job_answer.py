"""The answer of `presage job`: the step time of a job on many GPUs, whether it fits, how sure that is, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from presage.configs.lengths import lengths_text
from presage.configs.recipes import recipe_text
from presage.configs.tuning import tuning_text
from presage.parallel.schedules import default_schedule
from presage.report import job_sections as parts
from presage.report.answer import Answer, DataTable, Fact, data_table, limit_rows, sections_of, share_table
from presage.report.next_sections import next_plans_section
from presage.report.spread_tables import exceeding_table, spread_table
from presage.report.terms import (
    LEAST,
    count_text,
    gpu_basis,
    part_name,
    share_of,
    signed,
    step_interval,
    step_text,
    step_time,
    verdict,
)
from presage.text import amount, percent, seconds, size

if TYPE_CHECKING:
    from presage.prediction.jobs.cost import TrainingCost
    from presage.prediction.jobs.job_prediction import JobResult, StageSummary

BOUND = {
    "compute": "compute-bound",
    "memory bandwidth": "memory-bound",
    "communication": "communication-bound",
    "pipeline": "bound by the pipeline bubble",
    "host": "CPU-bound",
}
STAGES_SHOWN, SAVINGS_SHOWN = 20, 6
MUCH = 0.15  # of the step: worth a look


def job_answer(p: JobResult, tokens: float | None = None, page: bool = False) -> Answer:
    """`page`: with the distribution, the timeline, the roofline and the sensitivity."""
    name, spread = p.job.name or p.job.model.name or "job", p.distribution if page or p.spread else None
    timeline = parts.timeline_section(p, stage_table(p)) if page else None
    sections = sections_of(
        next_plans_section(p) if page else None,
        parts.breakdown_section(p, step_table(p, tokens), breakdown_table(p)),
        parts.spread_section(p, spread, spread_table(spread), exceeding_table(spread)) if spread else None,
        timeline,
        parts.stages_section(p, stage_table(p)) if timeline is None and len(p.stages) > 1 else None,
        parts.memory_section(p, memory_table(p), savings_table(p)),
        parts.roofline_section(p) if page else None,
        parts.sensitivity_section(p) if page else None,
    )
    return Answer(
        title=name,
        question="How long will a step take?",
        subject=f"{name}, {_parameters(p)}, on {_where(p)}\n{layout_text(p)}",
        headline=headline(p, tokens),
        verdict=verdict(p),
        verdict_tone="good" if p.fits else "bad",
        facts=facts(p, tokens),
        sections=sections,
        notes=(p.model_error.note, *p.notes),
        to_data=lambda: p.to_json(tokens),
        basis=gpu_basis(p.job.platform.gpu),
    )


def headline(p: JobResult, tokens: float | None = None) -> str:
    use = percent(p.mfu) + (f" of {p.peak[0]} peak" if len(p.mfu_by_peak) > 1 else "")
    rate = f"{_rate(p.tokens_per_second_per_gpu)} tokens/s/GPU, MFU {use}, {BOUND[p.bound]}"
    run = f"; {_run_text(p.spent(tokens))}{'' if p.fits else ', if it fitted'}" if tokens else ""
    return f"{step_text(p.step)}: {rate}{run}."


def _run_text(s: TrainingCost) -> str:
    cost = "" if s.cost is None else f", cost {amount(s.cost)}"
    return f"{count_text(s.tokens)} tokens take {_days(s)} without failures{cost}"


def _days(s: TrainingCost) -> str:
    """Two digits: the step time has no more."""
    return (
        f"{s.days:,.0f} days" if s.days >= 10 else f"{s.days:.2g} days" if s.days >= 1 else f"{s.days * 24:.2g} hours"
    )


def _where(p: JobResult) -> str:
    return f"{p.job.gpus:,} x {p.job.platform.gpu.name} ({p.job.platform.key})"


def _parameters(p: JobResult) -> str:
    m = p.job.model
    active = f" ({count_text(m.active_parameters)} active)" if m.experts else ""
    return f"{count_text(m.parameters)} parameters{active}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def layout_text(p: JobResult) -> str:
    """The parallel layout, batch and recomputation in a line."""
    job, q = p.job, p.job.parallel
    pipeline = f"pp {q.pp}" + (f" x {q.virtual} chunks" if q.virtual > 1 else "") if q.pp > 1 else ""
    kind = "" if q.pp == 1 or q.schedule == default_schedule(q.virtual) else f"({q.schedule})"
    words = [
        f"tp {q.tp}" + (" with sequence parallel" if q.sequence_parallel else "") if q.tp > 1 else "",
        f"{pipeline} {kind}".strip(),
        f"cp {q.cp}" if q.cp > 1 else "",
        f"ep {q.ep}" if q.ep > 1 else "",
        f"dp {job.dp}",
        _sharding(p),
        f"{job.microbatches} microbatch{'es' if job.microbatches > 1 else ''} of {job.micro_batch} x {job.sequence:,}",
        job.precision,
        lengths_text(job.lengths),
        tuning_text(job.tuning),
        recipe_text(job.recipe, job.optimizer),
        _recompute(p),
        job.framework.key,
    ]
    return ", ".join(w for w in words if w)


def _sharding(p: JobResult) -> str:
    job, q = p.job, p.job.parallel
    if not q.zero:
        return ""
    name = ("FSDP" if q.zero == 3 else "FSDP without resharding") if q.fsdp else f"ZeRO-{q.zero}"
    return f"{name} over {q.shard}" if q.shard and q.shard < job.dp * q.cp else name


def _recompute(p: JobResult) -> str:
    r = p.job.recompute
    if r.mode == "none":
        return "no recomputation"
    part = f" in {percent(r.share, 0)} of the layers" if r.share < 1 else ""
    return (f"recompute {', '.join(r.modules) or 'attention'}" if r.mode == "selective" else "full recompute") + part


def facts(p: JobResult, tokens: float | None) -> tuple[Fact, ...]:
    fits = "good" if p.memory.fits else "bad"
    out = [
        Fact("Step time", step_time(p.step), f"90% interval {step_interval(p.step)}"),
        Fact("Throughput", f"{p.tokens_per_second_per_gpu:,.0f}", "tokens/s/GPU"),
        Fact("MFU", percent(p.mfu), f"of {p.peak[0]}'s {p.peak[1] / 1e12:,.0f} TFLOPS"),
        Fact("Memory per GPU", size(p.memory.needed), f"of {size(p.memory.memory)}", fits),  # type: ignore[arg-type]
        _share_fact("Exposed communication", p.exposed, p.step.p50),
    ]
    if p.job.parallel.pp > 1 and not tokens:
        out.append(_share_fact("Pipeline bubble", p.breakdown.get("bubble", 0.0), p.step.p50))
    if tokens:
        spent = p.spent(tokens)
        cost = f"{amount(spent.gpu_hours)} GPU-hours" + ("" if spent.cost is None else f", cost {amount(spent.cost)}")
        out.append(
            Fact("Whole training", _days(spent), cost if p.fits else f"{cost}, if it fitted", "" if p.fits else "bad")
        )
    return tuple(out)


def _share_fact(name: str, part: float, whole: float) -> Fact:
    return Fact(name, percent(part / whole), f"{seconds(part)} of the step", "warn" if part > MUCH * whole else "")


# ---- tables


def step_table(p: JobResult, tokens: float | None = None) -> DataTable:
    peak, rate = p.peak
    others = "".join(f"; {percent(v)} of {k}'s" for k, v in p.mfu_by_peak.items() if k != peak)
    rows = [
        ("step time", step_time(p.step), f"{count_text(p.job.tokens)} tokens in {p.job.global_batch:,} samples"),
        ("throughput", f"{count_text(p.tokens_per_second)} tokens/s", f"{_rate(p.samples_per_second)} samples/s"),
        ("MFU", percent(p.mfu), f"of {peak}'s peak of {rate / 1e12:.0f} TFLOPS{others}; FLOPs: {p.convention}"),
        ("HFU", percent(p.hfu), "with recomputation"),
        ("compute", seconds(p.compute), share_of(p.compute, p.step.p50)),
        ("exposed communication", seconds(p.exposed), share_of(p.exposed, p.step.p50)),
        ("bound by", p.bound, ""),
        ("memory", size(p.memory.needed), f"of {size(p.memory.memory)}, on stage {_fullest(p)}"),
        *_spending(p, tokens),
    ]
    return data_table("Step", ("", "", ""), rows, text=(0, 2), wrap=True)


def _fullest(p: JobResult) -> int:
    return p.memory.stages.index(p.memory.worst)


def _spending(p: JobResult, tokens: float | None) -> list[tuple[str, str, str]]:
    one, pue = p.spent(), p.terms.pue
    over = f", PUE {pue:g}" if pue != 1 else ""
    rows = [("power", f"{p.watts / p.job.gpus:.0f} W/GPU", f"{one.energy / 1e6:.4g} MJ/step{over}")]
    if one.cost is not None:
        rows.append(("cost", f"{one.cost:,.2f} per step", f"{p.terms.price:g} per GPU-hour"))
    if tokens is None:
        return rows
    s = p.spent(tokens)
    cost = "" if s.cost is None else f", cost {s.cost:,.0f}"
    energy = f"{s.kwh / 1e3:,.0f} MWh" if s.kwh >= 1e5 else f"{s.kwh:,.0f} kWh"
    total = f"{s.steps:,.0f} steps, {amount(s.gpu_hours)} GPU-hours, {energy}{cost}"
    return [*rows, (f"{count_text(s.tokens)} tokens", _days(s), total)]


def breakdown_table(p: JobResult) -> DataTable:
    """Parts of the step that take any time."""
    rows = [(part_name(k), t) for k, t in p.step_parts.items() if abs(t) > LEAST * p.seconds]
    return share_table("Where the step goes", ("part", "time", "share"), rows, ("step", p.step.p50), seconds)


def stage_table(p: JobResult) -> DataTable:
    """Equal stages share a row."""
    columns = ("stage", "layers", "forward", "backward", "busy", "idle", "memory")
    rows = []
    for cells, group in groupby(p.stages, _stage_cells):
        first, *rest = [s.number for s in group]
        rows.append((f"{first}-{rest[-1]}" if rest else f"{first}", *cells))
    return data_table("Stages (forward, backward: per microbatch)", columns, limit_rows(rows, STAGES_SHOWN))


def _stage_cells(s: StageSummary) -> tuple[str, ...]:
    return str(s.layers), *(seconds(x) for x in (s.forward, s.backward, s.busy, s.bubble)), size(s.memory)


def memory_table(p: JobResult) -> DataTable:
    """Memory of the fullest stage at its worst moment, as the job's software names the parts."""
    held = list(p.memory_parts.items())
    title = f"Memory per GPU of stage {_fullest(p)}"
    worst = p.memory.worst
    table = share_table(title, ("what", "bytes", "share"), held, ("needed", worst.needed), size)
    idle = (
        "besides, at most: blocks that lie idle in the allocator",
        size(worst.idle),
        percent(worst.idle / worst.needed),
    )
    return replace(table, rows=(*table.rows, idle)) if worst.idle else table


def savings_table(p: JobResult) -> DataTable:
    """Changes that save memory: those that make the job fit first, the least slow before; at the terminal without -v
    where the job does not fit."""
    costs = list(zip(p.helps, p.help_costs, strict=False))[:SAVINGS_SHOWN]
    costs.sort(key=lambda pair: (not pair[0].fits, pair[1] if pair[0].fits else -pair[0].saved))
    rows = [
        (h.change, h.flags, size(h.saved), _left(h.margin), "yes" if h.fits else "no", signed(cost))
        for h, cost in costs
    ]
    columns = ("change", "flags", "saves", "then left", "fits", "step time")
    return data_table("What would save memory", columns, rows, text=2, key=not p.memory.fits)


def _left(margin: float) -> str:
    return size(margin) if margin >= 0 else f"-{size(-margin)}"
