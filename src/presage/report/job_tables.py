"""Rich tables of a job's prediction. Knows no physics: it prints values."""

from __future__ import annotations

from itertools import groupby

from rich.markup import escape
from rich.table import Table

from presage.memory import StageMemory
from presage.parallel.schedules import default_schedule
from presage.prediction.jobs.cost import TrainingCost
from presage.prediction.jobs.job_prediction import JobResult, StageSummary
from presage.report.plain import plain_table
from presage.text import amount, percent, seconds, size

__all__ = ["breakdown_table", "headline", "help_table", "memory_table", "remarks", "stage_table", "step_table"]

PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "streams": "memory-bound kernels",
    "tp": "exposed tensor-parallel transfers",
    "cp": "exposed context-parallel transfers",
    "ep": "exposed expert-parallel transfers",
    "pp": "exposed sends between stages",
    "dp": "exposed data-parallel transfers",
    "sharding": "waits for sharded parameters",
    "bubble": "the pipeline's bubble",
    "host": "waits for the host",
    "optimizer": "the optimizer",
}
MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "a layer at work",
    "loss": "logits and loss",
    "buffers": "buffers",
    "outside": "driver and NCCL",
}
SHOWN, HELPS = 20, 6
LEAST = 1e-6  # of the step: what takes less is a rounding


# ---- the answer


def headline(p: JobResult) -> str:
    """What was asked, how it is spread, and the answer in one sentence."""
    job, m = p.job, p.job.model
    what = f"[bold]{escape(job.name or m.name or 'job')}[/bold]"
    where = f"{job.gpus:,} x {job.platform.gpu.name} ({job.platform.key})"
    loss, took = p.loss
    most = f"; {percent(took / p.seconds)} of the step goes to {_part(loss)}" if took > LEAST * p.seconds else ""
    use = percent(p.mfu) + (f" of {p.peak[0]}'s peak" if len(p.mfu_by_peak) > 1 else "")
    answer = f"{seconds(p.seconds)} a step: {_rate(p.tokens_per_second_per_gpu)} tokens/s/GPU, MFU {use}"
    return f"{what}, {_parameters(p)}, on {escape(where)}\n{_spread(p)}\n{answer}; {_fits(p)}{most}"


def _parameters(p: JobResult) -> str:
    m = p.job.model
    active = f" ({_count(m.active_parameters)} active)" if m.experts else ""
    return f"{_count(m.parameters)} parameters{active}"


def _count(value: float) -> str:
    """Parameters and tokens are counted in billions and trillions."""
    return amount(value).replace("G", "B")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spread(p: JobResult) -> str:
    job, q = p.job, p.job.parallel
    pipeline = f"pp {q.pp}" + (f" x {q.virtual} chunks" if q.virtual > 1 else "") if q.pp > 1 else ""
    kind = "" if q.pp == 1 or q.schedule == default_schedule(q.virtual) else f"({q.schedule})"
    said = [
        f"tp {q.tp}" + (" with sequence parallel" if q.sequence_parallel else "") if q.tp > 1 else "",
        f"{pipeline} {kind}".strip(),
        f"cp {q.cp}" if q.cp > 1 else "",
        f"ep {q.ep}" if q.ep > 1 else "",
        f"dp {job.dp}",
        _sharded(p),
        f"{job.microbatches} microbatch{'es' if job.microbatches > 1 else ''} of {job.micro_batch} x {job.sequence:,}",
        job.precision,
        _recomputed(p),
        job.framework.key,
    ]
    return escape(", ".join(text for text in said if text))


def _sharded(p: JobResult) -> str:
    job, q = p.job, p.job.parallel
    if not q.zero:
        return ""
    name = ("FSDP" if q.zero == 3 else "FSDP, parameters kept") if q.fsdp else f"ZeRO-{q.zero}"
    return f"{name} over {q.shard}" if q.shard and q.shard < job.dp * q.cp else name


def _recomputed(p: JobResult) -> str:
    r = p.job.recompute
    if r.mode == "none":
        return "nothing recomputed"
    part = f" in {percent(r.share, 0)} of the layers" if r.share < 1 else ""
    return (f"recomputed: {', '.join(r.modules) or 'attention'}" if r.mode == "selective" else "all recomputed") + part


def _fits(p: JobResult) -> str:
    m = p.memory
    return f"it fits, {size(m.margin)} to spare" if m.fits else f"it does NOT fit: {size(-m.margin)} too much"


# ---- tables


def step_table(p: JobResult, tokens: float | None = None) -> Table:
    table = plain_table("Step", "", "", "")
    table.show_header, table.columns[2].justify = False, "left"
    peak, rate = p.peak
    others = {k: v for k, v in p.mfu_by_peak.items() if k != peak}
    beside = "".join(f"; {percent(v)} of {k}'s" for k, v in others.items())
    rows = [
        ("step time", seconds(p.seconds), f"{_count(p.job.tokens)} tokens in {p.job.global_batch:,} samples"),
        ("throughput", f"{_count(p.tokens_per_second)} tokens/s", f"{_rate(p.samples_per_second)} samples/s"),
        ("MFU", percent(p.mfu), f"of {peak}'s peak of {rate / 1e12:.0f} TFLOPS{beside}; FLOPs: {p.convention}"),
        ("HFU", percent(p.hfu), "with what is computed again"),
        ("compute", seconds(p.compute), f"{percent(p.compute / p.seconds)} of the step"),
        ("exposed transfers", seconds(p.exposed), f"{percent(p.exposed / p.seconds)} of the step"),
        ("bound", p.bound, "what most of the step goes to"),
        ("memory", size(p.memory.needed), f"of {size(p.memory.memory)}, on stage {_worst(p)}"),
        *_spending(p, tokens),
    ]
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _worst(p: JobResult) -> int:
    return p.memory.stages.index(p.memory.worst)


def _spending(p: JobResult, tokens: float | None) -> list[tuple[str, str, str]]:
    one, pue = p.spent(), p.terms.pue
    over = f", PUE {pue:g}" if pue != 1 else ""
    rows = [("power", f"{p.watts / p.job.gpus:.0f} W a GPU", f"{one.energy / 1e6:.4g} MJ a step{over}")]
    if one.cost is not None:
        rows.append(("cost", f"{one.cost:,.2f} a step", f"{p.terms.price:g} an hour for a GPU"))
    return rows if tokens is None else [*rows, _run(p.spent(tokens))]


def _run(s: TrainingCost) -> tuple[str, str, str]:
    cost = "" if s.cost is None else f", cost {s.cost:,.0f}"
    took = f"{s.days:.3g} days" if s.days >= 1 else f"{s.days * 24:.3g} hours"
    told = f"{s.steps:,.0f} steps, {amount(s.gpu_hours)} GPU hours, {_energy(s.kwh)}{cost}"
    return f"{_count(s.tokens)} tokens", took, told


def _energy(kwh: float) -> str:
    return f"{kwh / 1e3:,.0f} MWh" if kwh >= 1e5 else f"{kwh:,.0f} kWh"


def breakdown_table(p: JobResult) -> Table:
    """Parts of the step that take any time."""
    table = plain_table("Where the step goes", "part", "time", "share", fold=False)
    for name, took in p.breakdown.items():
        if took > LEAST * p.seconds:
            table.add_row(_part(name), seconds(took), percent(took / p.seconds))
    table.add_row("step", seconds(p.seconds), percent(1.0), style="bold")
    return table


def _part(name: str) -> str:
    return PARTS.get(name, escape(name))


def stage_table(p: JobResult) -> Table:
    """Stages that do the same in one row."""
    columns = ("layers", "forward", "backward", "busy", "bubble", "memory")
    table = plain_table("Stages (forward and backward: one microbatch)", "stage", *columns, fold=False)
    rows = [(cells, list(group)) for cells, group in groupby(p.stages, _cells)]
    for cells, group in rows[:SHOWN]:
        first, last = group[0].number, group[-1].number
        table.add_row(f"{first}" if first == last else f"{first}-{last}", *cells)
    if len(rows) > SHOWN:
        table.add_row(f"and {sum(len(group) for _, group in rows[SHOWN:])} more")
    return table


def _cells(s: StageSummary) -> tuple[str, ...]:
    times = (seconds(x) for x in (s.forward, s.backward, s.busy, s.bubble))
    return str(s.layers), *times, size(s.memory)


def memory_table(p: JobResult) -> Table:
    """Of the stage that needs most."""
    m: StageMemory = p.memory.worst
    table = plain_table(f"Memory of a GPU of stage {_worst(p)}", "what", "bytes", "share", fold=False)
    for name, words in MEMORY.items():
        if nbytes := float(getattr(m, name)):
            table.add_row(words, size(nbytes), percent(nbytes / m.needed))
    table.add_row("needed", size(m.needed), percent(1.0), style="bold")
    return table


def help_table(p: JobResult) -> Table:
    """Which change of the job saves how much."""
    table = plain_table("What would save memory", "change", "saves", "then left", "fits", fold=False)
    for h in p.helps[:HELPS]:
        table.add_row(escape(h.change), size(h.saved), _left(h.margin), "yes" if h.fits else "no")
    return table


def _left(margin: float) -> str:
    return size(margin) if margin >= 0 else f"-{size(-margin)}"


def remarks(p: JobResult) -> list[str]:
    """What to know before trusting it."""
    return [f"note: {note}" for note in p.notes]
