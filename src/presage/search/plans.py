"""JobPlan: one way to run a job on GPUs. What a search varies; the model, the batch and the software stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from presage.configs.job import Job, Recompute
from presage.parallel.plan import ParallelPlan
from presage.parallel.schedules import ONE_CHUNK, SEVERAL_CHUNKS

# What of the forward pass is recomputed, by its word in job files.
RECOMPUTES = {
    "none": Recompute(),
    "selective": Recompute("selective", ("core_attn",)),
    "every-2": Recompute("full", share=0.5),
    "full": Recompute("full"),
}
# What can be fixed (--keep), and by which plans are compared.
KNOBS = (
    "gpus", "tp", "cp", "pp", "virtual", "schedule", "ep", "expert_tp", "dispatcher", "dp", "micro_batch",
    "zero", "sharding", "recompute",
)  # fmt: skip


class StateSharding(NamedTuple):
    """What data parallel ranks share."""

    zero: int
    fsdp: bool
    shard: int


class JobPlan(NamedTuple):
    """The choices of one plan: GPUs, the parallel plan on them, the microbatch size, what is recomputed."""

    gpus: int
    parallel: ParallelPlan
    micro_batch: int
    recompute: Recompute

    @property
    def dp(self) -> int:
        return self.parallel.dp(self.gpus)

    def with_parallel(self, **changes: Any) -> JobPlan:
        """The plan with other degrees."""
        return self._replace(parallel=replace(self.parallel, **changes))

    def to_json(self) -> dict[str, Any]:
        p = self.parallel
        return {
            "gpus": self.gpus, "tp": p.tp, "sequence": p.sequence_parallel, "cp": p.cp, "pp": p.pp, "ep": p.ep,
            "expert_tp": p.expert_tp, "dispatcher": p.dispatcher,
            "micro_batch": self.micro_batch, "virtual": p.virtual, "schedule": p.schedule,
            "ends": p.ends_as_layers, "zero": p.zero, "fsdp": p.fsdp, "shard": p.shard,
            "recompute": recompute_word(self.recompute), "dp": self.dp,
        }  # fmt: skip


def apply_plan(job: Job, plan: JobPlan) -> Job:
    """The job, run as the plan says."""
    return replace(job, gpus=plan.gpus, parallel=plan.parallel, micro_batch=plan.micro_batch, recompute=plan.recompute)


def job_plan(job: Job) -> JobPlan:
    """A job's own plan, without layers that are assigned to stages by hand."""
    sent = job.dispatcher if job.model.experts else ""
    return JobPlan(job.gpus, replace(job.parallel, layers_as=(), dispatcher=sent), job.micro_batch, job.recompute)


def knob(x: JobPlan, name: str) -> str:
    """The word for what a plan chose of a knob."""
    if name == "sharding":
        return sharding_word(x.parallel)
    if name == "recompute":
        return recompute_word(x.recompute)
    return str(getattr(x, name) if name in ("gpus", "dp", "micro_batch") else getattr(x.parallel, name))


def sharding_word(p: ParallelPlan | StateSharding) -> str:
    if not p.fsdp:
        return f"zero{p.zero}/{p.shard}" if p.shard else f"zero{p.zero}"
    kind = f"hsdp{p.shard}" if p.shard else "fsdp"
    return kind if p.zero == 3 else f"{kind}-zero{p.zero}"


def recompute_word(r: Recompute) -> str:
    """As job files have it: none, selective:mlp+moe_act, full, every-2."""
    for word, known in RECOMPUTES.items():
        if r == known:
            return word
    if r.mode == "selective":
        return f"selective:{'+'.join(r.modules)}" if r.modules else "selective"
    return f"full:{r.share:.3g}" if r.mode == "full" else r.mode


def plan_words(x: JobPlan) -> str:
    """A plan in a line: tp8 pp16 v4 dp128 mb1 zero1 full. `ends`: embedding and head take a layer's place each."""
    p = x.parallel
    odd = p.pp > 1 and p.schedule not in (ONE_CHUNK, SEVERAL_CHUNKS)
    degrees = [
        (p.tp, f"tp{p.tp}"), (p.cp, f"cp{p.cp}"), (p.pp, f"pp{p.pp}"), (p.virtual, f"v{p.virtual}"),
        (2 * odd, p.schedule), (2 * (p.ends_as_layers and p.pp > 1), "ends"),
        (p.ep, f"ep{p.ep}"), (p.expert_tp, f"etp{p.expert_tp}"),
    ]  # fmt: skip
    plan_words = [word for degree, word in degrees if degree > 1]
    plan_words += [p.dispatcher] if p.dispatcher and p.ep > 1 else []
    plan_words += [f"dp{x.dp}", f"mb{x.micro_batch}"]
    if p.tp > 1 and not p.sequence_parallel:
        plan_words.append("no-sp")
    if p.zero:
        plan_words.append(sharding_word(p))
    return " ".join([*plan_words, recompute_word(x.recompute)])
