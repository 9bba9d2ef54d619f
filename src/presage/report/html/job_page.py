"""The page of `presage job`: how long a step takes on many GPUs, whether it fits, how sure that is, and why."""

from __future__ import annotations

from presage.prediction.draws.distribution import StepDistribution
from presage.prediction.jobs.cost import TrainingCost
from presage.prediction.jobs.job_prediction import JobResult
from presage.report import job_tables as tables
from presage.report.html import job_sections as parts
from presage.report.html.page import Fact, Page, plain
from presage.text import amount, percent, seconds, size

__all__ = ["job_page"]

BOUND = {
    "compute": "compute sets the pace",
    "memory bandwidth": "the GPU's memory sets the pace",
    "communication": "transfers between GPUs set the pace",
    "pipeline": "most of it is the pipeline's bubble",
    "host": "the GPUs wait for the host",
}
MUCH = 0.15  # of the step: worth a look


def job_page(
    p: JobResult, sure: StepDistribution | None = None, tokens: float | None = None, command: str = ""
) -> Page:
    """All there is to see of a job's step."""
    what, spread, _ = plain(tables.headline(p)).split("\n")
    sections = (
        parts.parts_section(p, tokens),
        parts.sure_section(p, sure) if sure else None,
        parts.pipeline_section(p),
        parts.heat_section(p),
        parts.memory_section(p),
        parts.limits_section(p),
        parts.swings_section(p),
    )
    return Page(
        title=p.job.name or p.job.model.name or "job",
        question=f"How long will a step of {what} take? {spread}",
        answer=answer(p, sure, tokens),
        facts=facts(p, sure, tokens),
        sections=tuple(s for s in sections if s is not None),
        notes=tuple(n.removeprefix("note: ") for n in tables.remarks(p)),
        command=command,
    )


def answer(p: JobResult, sure: StepDistribution | None, tokens: float | None) -> str:
    """The one sentence."""
    where = f"{p.job.gpus:,} x {p.job.platform.gpu.name.removeprefix('NVIDIA ')}"
    late = f" (19 of 20 steps at most {seconds(sure.steps[0.95].value)})" if sure else ""
    left = p.memory.margin
    fits = f"it fits, with {size(left)} to spare" if left >= 0 else f"it does not fit: {size(-left)} too much"
    run = f"; {_run(p.spent(tokens))}" if tokens else ""
    pace = f"{BOUND[p.bound]} at {percent(p.mfu, 0)} MFU"
    return f"A step takes {seconds(p.seconds)} on {where}{late}: {pace}, and {fits}{run}."


def _run(s: TrainingCost) -> str:
    cost = "" if s.cost is None else f" and cost {amount(s.cost)}"
    return f"{amount(s.tokens).replace('G', 'B')} tokens take {_days(s)} if nothing fails{cost}"


def _days(s: TrainingCost) -> str:
    return f"{s.days:.3g} days" if s.days >= 1 else f"{s.days * 24:.3g} hours"


def facts(p: JobResult, sure: StepDistribution | None, tokens: float | None) -> tuple[Fact, ...]:
    late = f"p95 {seconds(sure.steps[0.95].value)}" if sure else f"{p.job.global_batch:,} samples"
    out = [
        Fact("Step time", seconds(p.seconds), late),
        Fact("Throughput", f"{p.tokens_per_second_per_gpu:,.0f}", "tokens a second, each GPU"),
        Fact("MFU", percent(p.mfu), f"of {p.peak[0]}'s {p.peak[1] / 1e12:,.0f} TFLOPS"),
        Fact(
            "Memory of a GPU", size(p.memory.needed), f"of {size(p.memory.memory)}", "good" if p.memory.fits else "bad"
        ),
        _share("Exposed transfers", p.exposed, p.seconds),
    ]
    if p.job.parallel.pp > 1 and not tokens:
        out.append(_share("Pipeline's bubble", p.breakdown.get("bubble", 0.0), p.seconds))
    if tokens:
        spent = p.spent(tokens)
        cost = f"{amount(spent.gpu_hours)} GPU hours" + ("" if spent.cost is None else f", cost {amount(spent.cost)}")
        out.append(Fact("Whole training", _days(spent), cost))
    return tuple(out)


def _share(name: str, took: float, whole: float) -> Fact:
    return Fact(name, percent(took / whole), f"{seconds(took)} of the step", "warn" if took > MUCH * whole else "")
