"""What a Job's owner should know though nothing is wrong with it."""

from __future__ import annotations

from presage.configs.job import Job

__all__ = ["notes"]


def notes(job: Job) -> tuple[str, ...]:
    """Of a job that `check` lets pass."""
    return (*_tensor(job), *_pipeline(job), *_experts(job), *_rest(job))


def _tensor(job: Job) -> list[str]:
    p, m, domain, out = job.parallel, job.model, job.platform.domain, []
    if p.tp > domain:
        out.append(f"tp = {p.tp} reaches beyond the {domain} GPUs of a node: its collectives go over the network")
    if m.latent is None and p.tp > m.kv_heads:
        out.append(f"tp = {p.tp} is more than kv_heads = {m.kv_heads}: each key head is on {p.tp // m.kv_heads} ranks")
    if p.tp > 1 and not p.sequence_parallel:
        out.append("tp without sequence_parallel: every rank keeps all of the activations between its blocks")
    return out


def _pipeline(job: Job) -> list[str]:
    p, out = job.parallel, []
    if p.pp == 1:
        return []
    counts = [n for stage in job.stage_layers() for n in stage]
    inner = counts[1:-1] if p.ends_as_layers else counts
    if not p.layers_as and len(set(inner)) > 1:
        out.append(f"{job.model.layers} layers over {len(counts)} chunks: {min(counts)} to {max(counts)} layers each")
    if job.microbatches < p.pp:
        out.append(f"{job.microbatches} microbatches over pp = {p.pp} stages: the pipeline is never full")
    return out


def _experts(job: Job) -> list[str]:
    p, e, domain, out = job.parallel, job.model.experts, job.platform.domain, []
    if e is None:
        return []
    if p.ep * p.expert_tp > domain:
        sizes = f"ep x expert_tp = {p.ep} x {p.expert_tp}"
        out.append(f"{sizes} reaches beyond the {domain} GPUs of a node: tokens cross the network to their experts")
    if e.imbalance == 1 and not e.capacity:
        out.append("experts are as busy as each other (imbalance = 1): real routing is slower")
    return out


def _rest(job: Job) -> list[str]:
    p, m, domain, out = job.parallel, job.model, job.platform.domain, []
    if job.gpus > domain and job.gpus % domain:
        out.append(f"{job.gpus} GPUs are no whole number of nodes of {domain}")
    if p.shard and not p.zero:
        out.append(f"shard = {p.shard} does nothing with zero = 0")
    if m.window and m.window >= job.sequence:
        out.append(f"window = {m.window} does nothing on sequences of {job.sequence}")
    return out
