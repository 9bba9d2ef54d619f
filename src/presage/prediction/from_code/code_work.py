"""What the kernels of a captured step do by part, and a description that counts what the usual kernels do not."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from presage.configs.job import Job
from presage.graph import work
from presage.graph.families import family
from presage.graph.graph import Graph, Op
from presage.prediction.from_code.code_traits import parameters
from presage.prediction.from_code.describe import CodeJob
from presage.prediction.jobs.efficiency import shipped_efficiency
from presage.prediction.jobs.job_detail import job_roofline
from presage.prediction.jobs.job_host import US, layer_host_of
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.optimizer_step import update_bytes
from presage.prediction.step import StepResult

PARTS = ("products", "attention", "streams", "optimizer")
KINDS = {"matrix multiply": "products", "attention": "attention"}


class Work(NamedTuple):
    """FLOPs, bytes and kernels of a part."""

    flops: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0

    def plus(self, *more: float) -> Work:
        return Work(*(a + b for a, b in zip(self, more, strict=True)))


def part_of(op: Op) -> str | None:
    """The part of the step that an op's kernels count in; collectives have parts of their own."""
    kind = family(op.name)
    if not op.kernels or kind == "communication":
        return None
    return "optimizer" if op.phase == "optimizer" else KINDS.get(kind, "streams")


def code_work(graph: Graph) -> dict[str, Work]:
    """What the kernels of a captured step do."""
    out = dict.fromkeys(PARTS, Work())
    for op in graph.ops:
        if name := part_of(op):
            flops = work.useful_flops(graph, op) if name == "attention" else work.flops(graph, op)
            out[name] = out[name].plus(float(flops), float(work.bytes_touched(graph, op).total), 1.0)
    return out


def job_work(job: Job) -> dict[str, Work]:
    """What the kernels of a job do on a GPU of its busiest stage."""
    out = dict.fromkeys(PARTS, Work())
    for r in job_roofline(job, job_step(job)):
        out[r.family] = out[r.family].plus(r.flops, r.moved, r.calls)
    out["optimizer"] = Work(moved=_held(job) * update_bytes(job))
    return out


def _held(job: Job) -> float:
    """Parameters that one rank updates."""
    p = job.parallel
    return job.model.parameters / (p.tp * p.pp * (job.sharding if p.zero else 1))


def with_code_work(described: CodeJob, code: StepResult, job: Job) -> CodeJob:
    """The description with what the code's own kernels move, beyond the usual ones of a layer and for each parameter,
    and with the host time of its layers."""
    found, usual = code_work(code.graph), job_work(job)
    said = {**_traffic(job, found["streams"].moved - usual["streams"].moved), **_host(job, code)}
    held = _held(job) if job.parallel.zero == 1 else parameters(code.graph)
    if job.optimizer not in ("none", "muon") and held and found["optimizer"].moved:
        said["update_bytes"] = found["optimizer"].moved / held
    rounded = {key: round(value, 1) for key, value in said.items()}
    return replace(described, table=described.table | {"framework": described.table["framework"] | rounded})


def _traffic(job: Job, more: float) -> dict[str, float]:
    """Bytes beyond those of the usual kernels, for each number between two layers."""
    rows = job.rank_tokens / (job.parallel.tp if job.parallel.sequence_parallel else 1)
    passes = 1 + (job.recompute.share / 3 if job.recompute.mode == "full" else 0.0)
    each = more / (_layers(job) * rows * job.model.hidden * passes)
    return {"extra_bytes": each} if each > 0 else {}


def _host(job: Job, code: StepResult) -> dict[str, float]:
    """Host time of a layer, without FSDP's own ops: the law of jobs has its hooks as measured, and adds them."""
    if job.parallel.pp > 1 or job.recompute.mode != "none":
        return {}
    took = dict.fromkeys(("forward", "backward", "other", "optimizer"), 0.0)
    usual = layer_host_of(job, shipped_efficiency())
    for op, seconds in zip(code.graph.ops, code.basis.program.host_seconds.tolist(), strict=True):
        took[op.phase] += 0.0 if job.parallel.fsdp and _of_fsdp(op) else seconds
    ends = job.microbatches * usual.ends_forward, job.microbatches * usual.ends_backward
    each = [(took["forward"] - ends[0]) / _layers(job), (took["backward"] - ends[1]) / _layers(job)]
    return {"forward_us": each[0] / US, "backward_us": each[1] / US} if min(each) > 0 else {}


def _of_fsdp(op: Op) -> bool:
    """Whether it gathers, copies or reduces shards of parameters."""
    within = " ".join(op.within)
    shards = "fsdp::" in within or "RegisterPostBackward" in within or op.name == "aten::_foreach_copy_"
    return shards or op.name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


def _layers(job: Job) -> float:
    """Calls of a layer on one rank."""
    return job.model.layers / job.parallel.pp * job.microbatches
