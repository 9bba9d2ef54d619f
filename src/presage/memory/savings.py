"""Memory savings: single changes of a job and the memory each saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from presage.configs.check import problems
from presage.configs.job import Job, Recompute
from presage.memory.flags import change_flags
from presage.memory.job_memory import job_memory
from presage.parallel.schedules import ONE_CHUNK

MOST_CHANGES = 4  # that are made at once
WHAT = {"op": "every second product"}
LEAST = 0.005  # of the memory needed: what saves less is not worth a word


@dataclass(frozen=True, slots=True)
class MemorySaving:
    """A change of the job, and the memory it saves."""

    change: str
    saved: float  # bytes of the worst stage
    margin: float  # bytes left afterwards
    job: Job
    flags: str = ""  # of its software

    @property
    def fits(self) -> bool:
        return self.margin >= 0


def memory_savings(job: Job) -> tuple[MemorySaving, ...]:
    """All single changes that save memory and keep the job valid, largest saving first; where none of them makes it
    fit, before them several at once that do."""
    now, already = job_memory(job), frozenset(problems(job))
    found = _single_changes(job, now.needed, already)
    if now.fits or not found or any(h.fits for h in found):
        return found
    together = _together(job, now.needed, already)
    return (together, *found) if together else found


def _single_changes(job: Job, now: float, already: frozenset[str]) -> tuple[MemorySaving, ...]:
    savings = []
    for change, other in _changes(job):
        if already.issuperset(problems(other)):
            then = job_memory(other)
            flags = change_flags(job, other)
            savings.append(MemorySaving(change, now - then.needed, then.margin, other, flags))
    return tuple(sorted((h for h in savings if h.saved > LEAST * now), key=lambda h: -h.saved))


def _together(job: Job, now: float, already: frozenset[str]) -> MemorySaving | None:
    """The change that saves most, then of what that leaves the one that does, until it fits."""
    other = job
    said: list[str] = []
    for _ in range(MOST_CHANGES):
        found = _single_changes(other, job_memory(other).needed, already)
        if not found:
            return None
        best = next((h for h in found if h.fits), found[0])
        other, said = best.job, [*said, best.change]
        if best.fits:
            return MemorySaving(
                " and ".join(said), now - job_memory(other).needed, best.margin, other, change_flags(job, other)
            )
    return None


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    yield from _spread(job)
    yield from _sharded(job)
    yield from _computed_again(job)
    yield from _smaller(job)


def _with(job: Job, **changes: Any) -> Job:
    return replace(job, parallel=replace(job.parallel, **changes))


def _spread(job: Job) -> Iterator[tuple[str, Job]]:
    """Changes that split the model over more ranks."""
    p = job.parallel
    along = job.framework.sequence
    alike = {"expert_tp": 2 * p.expert_tp} if p.expert_tp == p.tp > 1 else {}
    yield (
        f"tensor parallel {p.tp} -> {2 * p.tp}",
        _with(job, tp=2 * p.tp, sequence_parallel=p.sequence_parallel or along, **alike),
    )
    if p.tp > 1 and not p.sequence_parallel:
        yield "sequence parallel", _with(job, sequence_parallel=True)
    yield f"pipeline stages {p.pp} -> {2 * p.pp}", _with(job, pp=2 * p.pp, virtual=max(1, p.virtual // 2), layers_as=())
    yield f"context parallel {p.cp} -> {2 * p.cp}", _with(job, cp=2 * p.cp)
    if job.model.experts:
        yield f"expert parallel {p.ep} -> {2 * p.ep}", _with(job, ep=2 * p.ep)
    if p.virtual > 1:
        yield "no interleaving", _with(job, virtual=1, schedule=ONE_CHUNK, layers_as=())


def _sharded(job: Job) -> Iterator[tuple[str, Job]]:
    """Changes that shard over data-parallel ranks."""
    p = job.parallel
    what = ("", "the optimizer", "the optimizer and gradients", "the optimizer, gradients and parameters")
    for stage in range(p.zero + 1, 4):
        yield f"ZeRO-{stage}: {what[stage]} sharded", _with(job, zero=stage)
    if p.zero and p.shard and p.shard < job.dp * p.cp:
        yield "sharded over all data-parallel ranks", _with(job, shard=0)


def _computed_again(job: Job) -> Iterator[tuple[str, Job]]:
    r = job.recompute
    if r.mode == "full" and r.share >= 1:
        return
    yield "full recomputation", replace(job, recompute=Recompute("full"))
    if r.mode == "full" or "op" in r.modules:
        return
    for name in _modules(job):
        if name not in r.modules:
            given = (*r.modules, name) if r.mode == "selective" and name != "op" else (name,)
            yield f"recomputation of {WHAT.get(name, name)}", replace(job, recompute=Recompute("selective", given))


def _modules(job: Job) -> Iterator[str]:
    """What the job's software can compute again by itself: TorchTitan every second product, Megatron modules."""
    m, key = job.model, job.framework.key
    if key.startswith("torchtitan"):
        yield "op"
    elif key in ("megatron-2021", "megatron-deepspeed"):
        yield "core_attn"
    elif not key.startswith("hf-") and key != "deepspeed":
        yield from ("core_attn", "norm", "mlp")
        yield from ("moe_act", "moe") if m.experts else ()
        yield from ("mla_up_proj",) if m.latent else ()


def _smaller(job: Job) -> Iterator[tuple[str, Job]]:
    """Smaller microbatches, recomputation, and kernels that keep less."""
    size, f = job.micro_batch, job.framework
    replica = max(1, job.global_batch // max(1, job.dp))
    less = next((n for n in range(size - 1, 0, -1) if replica % n == 0), 0)
    if less:
        yield f"microbatches of {less}, not {size}", replace(job, micro_batch=less)
    if not f.fused_loss or f.logit_bytes:
        yield "a fused cross entropy", replace(job, framework=replace(f, fused_loss=True, logit_bytes=0.0))
    if not f.attention.startswith("flash"):
        yield "fused attention", replace(job, framework=replace(f, attention="flash2"))
