"""The answer of `presage shard --objective step`: plans by the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.step_plans import StepPlan
from presage.embeddings.table_files import plan_json
from presage.report.answer import Answer, Section, data_table
from presage.text import percent, seconds

MS = 1e3


def step_plans_answer(job: DlrmJob, plans: Sequence[StepPlan]) -> Answer:
    """Everything that is shown."""
    best = plans[0]
    least = min(plans, key=lambda p: p.embeddings)
    rows = [
        (p.name, seconds(p.step), percent(p.step / best.step - 1) if p is not best else "-", seconds(p.embeddings))
        for p in plans
    ]
    table = data_table("Plans", ("plan", "step", "longer by", "embeddings alone"), rows, bold=(0,), wrap=True)
    same = "the same" if least.plan == best.plan else f"{seconds(least.step - best.step)} longer a step"
    ways = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in best.plan.counts().items())
    headline = (
        f"{seconds(best.step)}/step with {best.name}; the plan with the least time for embeddings alone "
        f"({least.name}) is {same}."
    )
    return Answer(
        title=f"{len(job.tables)} tables on {job.ranks} ranks",
        question="Which plan makes the step shortest?",
        subject=f"{job.name} on {job.ranks} ranks of {job.platform}, batch {job.batch}, {job.system.framework}: {ways}",
        headline=headline,
        sections=(Section("Plans by the whole step", (table,)),),
        to_data=partial(_data, job, plans),
    )


def _data(job: DlrmJob, plans: Sequence[StepPlan]) -> dict[str, Any]:
    return {
        "kind": "shard",
        "objective": "step",
        "plans": [{"name": p.name, "step_ms": p.step * MS, "embeddings_ms": p.embeddings * MS} for p in plans],
        "plan": plan_json(plans[0].plan, job.tables),
    }
