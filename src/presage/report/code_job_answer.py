"""The answer of `presage job --from`: the step from the code, the step from its job file, and why they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from presage.report.answer import Answer, DataTable, Section, data_table, sections_of
from presage.report.job_answer import layout_text
from presage.report.terms import count_text, gpu_basis, part_name, signed, step_time, verdict
from presage.text import seconds

if TYPE_CHECKING:
    from presage.prediction.from_code.agreement import CodeJobResult

OWN = {
    "communication": "communication",
    "bubble": "waits, pipeline bubble",
    "host": "host and the rest",
    "training": "losses of training runs",
}


def code_job_answer(p: CodeJobResult) -> Answer:
    """Both predictions by part; what the job file assumes and leaves out as notes."""
    job = p.job.job
    where = f"{job.gpus:,} x {job.platform.gpu.name} ({job.platform.key})"
    return Answer(
        title=p.code.source,
        question="Which job file describes this code, and do the two predictions agree?",
        subject=f"{p.code.source}, {count_text(job.model.parameters)} parameters, on {where}\n{layout_text(p.job)}",
        headline=headline(p),
        verdict=verdict(p.code),
        verdict_tone="good" if p.code.fits else "bad",
        sections=sections_of(Section("Both predictions", (part_table(p),))),
        notes=(
            *(f"assumed: {what}" for what in p.described.assumed),
            *(f"not in the job file: {what}" for what in p.described.unsaid),
            *p.code.notes,
            *p.job.notes,
        ),
        to_data=p.to_json,
        basis=gpu_basis(job.platform.gpu),
    )


def headline(p: CodeJobResult) -> str:
    both = f"{step_time(p.code.step)}/step from the code, {step_time(p.job.step)}/step from its job file"
    return f"{both}: {signed(p.difference)} ({signed(p.by_laws)} by kernel laws alone)."


def part_table(p: CodeJobResult) -> DataTable:
    """Parts of both steps."""
    rows = [
        (OWN.get(x.name) or part_name(x.name), _time(x.code), _time(x.job), _signed(x.job - x.code), x.why)
        for x in p.parts
    ]
    step = p.code.step.p50, p.job.step.p50
    rows.append(("step", _time(step[0]), _time(step[1]), _signed(step[1] - step[0]), ""))
    columns = ("part", "code", "job file", "difference", "why")
    return data_table("Both predictions by part", columns, rows, text=(0, 4), wrap=True)


def _time(value: float) -> str:
    return seconds(value) if value >= 0 else f"-{seconds(-value)}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{seconds(abs(value))}"
