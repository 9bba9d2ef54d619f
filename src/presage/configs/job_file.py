"""Job files: TOML of a model, how it is trained, spread and on what; or with a framework's own file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from presage.configs.advice import notes
from presage.configs.check import check
from presage.configs.framework import Framework
from presage.configs.frameworks import framework, switches
from presage.configs.job import Job, Parallel, Recompute
from presage.configs.megatron import read_arguments
from presage.configs.model_table import read_model
from presage.configs.schema import (
    ClusterWords,
    FrameworkWords,
    JobWords,
    ParallelWords,
    RecomputeWords,
    TrainingWords,
    converted,
    known,
    merged,
    plain,
)
from presage.configs.torchtitan import read_titan
from presage.errors import InputError, PresageError
from presage.hardware import Gpu, Platform, platform
from presage.hardware.facts import load

if TYPE_CHECKING:
    from presage.embeddings.dlrm_job import DlrmJob

__all__ = ["Described", "described", "job_of", "read_any", "read_described", "read_transformer_job"]

Table = Mapping[str, Any]
OPTIMIZERS = {"adamw": "adam"}  # the same work
EVEN = ("megatron-core", "megatron-2021", "nemo")


class Described(NamedTuple):
    """A job, and what its owner should know: of arguments that were not understood, of what is unusual in it."""

    job: Job
    notes: tuple[str, ...]


def read_transformer_job(path: str | Path, overrides: Table | None = None, checked: bool = True) -> Job:
    """A job from its file. `overrides` go over the file, section by section: {"parallel": {"gpus": 1024}}."""
    return read_described(path, overrides, checked).job


def read_described(path: str | Path, overrides: Table | None = None, checked: bool = True) -> Described:
    """And the notes on it."""
    return described(load(Path(path)), Path(path), overrides, checked)


def described(table: Table, path: str | Path, overrides: Table | None = None, checked: bool = True) -> Described:
    """The same from what a file holds; files it names are beside `path`."""
    path = Path(path)
    known(path, table, JobWords, "")
    base, said = _foreign(path, table)
    try:
        job, more = job_of(merged(merged(base, table), overrides or {}), path)
        if checked:
            check(job)
    except InputError:
        raise
    except PresageError as e:
        raise InputError(path, str(e)) from e
    if checked:
        _even(path, job)
        more = (*more, *notes(job))
    return Described(job, (*said, *more))


def read_any(path: str | Path) -> Job | DlrmJob:
    """A job of any kind: recommendation jobs have [embeddings]."""
    from presage.embeddings.dlrm_job import read_job  # which loads the embeddings' models

    return read_job(path) if "embeddings" in load(Path(path)) else read_transformer_job(path)


def _even(path: Path, job: Job) -> None:
    """Megatron deals layers out evenly, or as it is told to."""
    p, layers = job.parallel, job.model.layers
    slots, more = p.pp * p.virtual, 2 if p.ends_as_layers else 0
    if job.framework.key not in EVEN or p.layers_as or (layers + more) % slots == 0:
        return
    counts = [n for chunk in zip(*job.stage_layers(), strict=True) for n in chunk]
    total = f"{layers} + 2 = {layers + 2}" if more else str(layers)
    ends = f", or ends_as_layers = true ({layers} + 2 is one)" if not more and (layers + 2) % slots == 0 else ""
    what = f"layers = pp x virtual x n: {total} is no multiple of {p.pp} x {p.virtual} = {slots}"
    raise InputError(path, f"{what}; give layers_as = {counts}{ends}", "parallel")


def _foreign(path: Path, table: Table) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the file of a framework says that this one refers to, in our words."""
    if "arguments" in table and "titan" in table:
        raise InputError(path, "give arguments or titan, not both", "titan")
    for key, read in (("arguments", read_arguments), ("titan", read_titan)):
        if key in table:
            if not isinstance(table[key], str):
                raise InputError(path, f"is {table[key]!r}: it should be the name of a file", key)
            return read(path.parent / table[key])
    return {}, ()


def job_of(table: Table, path: str | Path = "job") -> Described:
    """A job from the sections of a job file, not checked; files it names are beside `path`."""
    words = converted(path, {k: v for k, v in table.items() if k != "model"}, JobWords)
    fields = table.get("model", {})
    if not isinstance(fields, Mapping):
        raise InputError(path, f"is {fields!r}: it should be a table, [model]", "model")
    model, said = read_model(fields, path, words.name or _stem(path))
    where = _platform(path, words.cluster)
    software = _framework(path, words.framework, where.gpu)
    t = words.training
    if t.sequence is None:
        raise InputError(path, "is missing: the tokens of a sample", "training.sequence")
    parallel, gpus, dp = _parallel(path, words.parallel, software)
    job = Job(
        model=model,
        platform=where,
        gpus=gpus,
        sequence=t.sequence,
        micro_batch=t.micro_batch,
        global_batch=_global_batch(path, t, dp),
        parallel=parallel,
        precision=t.precision,
        recompute=_recompute(path, t),
        overlap=replace(software.overlap, **plain(words.overlap)),
        framework=software,
        optimizer=OPTIMIZERS.get(t.optimizer, t.optimizer),
        name=words.name or _stem(path) or model.name,
    )
    return Described(job, said)


def _global_batch(path: str | Path, t: TrainingWords, dp: int) -> int:
    """Samples a step, told by their number or by the number of microbatches; else one microbatch a replica."""
    counted = t.micro_batch * max(dp, 1) * (t.microbatches or 1)
    if t.global_batch is not None and t.microbatches is not None and t.global_batch != counted:
        sizes = f"{t.micro_batch} x {dp} x {t.microbatches} = {counted}"
        what = f"global_batch = micro_batch x dp x microbatches: {t.global_batch} is not {sizes}"
        raise InputError(path, what, "training.microbatches")
    return counted if t.global_batch is None else t.global_batch


def _stem(path: str | Path) -> str:
    return str(path.stem) if isinstance(path, Path) else ""


def _platform(path: str | Path, c: ClusterWords) -> Platform:
    if (c.platform is None) == (c.gpu is None):
        what = "give platform or gpu, not both" if c.gpu else "say what it runs on: platform = ..., or gpu = ..."
        raise InputError(path, what, "cluster")
    if c.platform is not None:
        name = str(Path(path).parent / c.platform) if c.platform.endswith(".toml") else c.platform
        return platform(name)
    from presage.hardware import cluster

    gpu = str(Path(path).parent / str(c.gpu)) if str(c.gpu).endswith(".toml") else str(c.gpu)
    return cluster(gpu, c.per_node, c.network_Gbps, fabric=c.fabric or "infiniband", domain=c.domain)


def _framework(path: str | Path, given: str | FrameworkWords, gpu: Gpu) -> Framework:
    words = FrameworkWords(name=given) if isinstance(given, str) else given
    name = words.name or "megatron-core"
    if name.endswith(".toml"):
        name = str(Path(path).parent / name)
    return framework(name, gpu, **switches(words))


def _parallel(path: str | Path, p: ParallelWords, software: Framework) -> tuple[Parallel, int, int]:
    """The degrees, GPUs in all, replicas."""
    one = p.tp * p.pp * p.cp
    gpus = p.gpus if p.gpus is not None else one * (p.dp or 1)
    dp = gpus // one if one > 0 else 0
    if p.dp is not None and p.dp * one != gpus:
        sizes = f"{p.tp} x {p.pp} x {p.cp} x {p.dp} = {p.dp * one}"
        raise InputError(path, f"gpus = tp x pp x cp x dp: {gpus} is not {sizes}", "parallel.dp")
    made = Parallel(
        tp=p.tp,
        sequence=p.tp > 1 and software.sequence if p.sequence_parallel is None else p.sequence_parallel,
        pp=p.pp,
        virtual=p.virtual,
        schedule=p.schedule or ("interleaved" if p.virtual > 1 else "1f1b"),
        cp=p.cp,
        ep=p.ep,
        expert_tp=p.expert_tp,
        zero=p.zero if p.zero is not None else 3 if p.fsdp else 0,
        fsdp=p.fsdp,
        shard=_shard(path, p, dp * p.cp),
        layers_as=tuple(p.layers_as),
        ends_as_layers=p.ends_as_layers,
    )
    return made, gpus, dp


def _shard(path: str | Path, p: ParallelWords, holders: int) -> int:
    """Ranks that share one copy of what is sharded, told by their number or by the number of copies."""
    if p.replicate is None:
        return p.shard or 0
    shard = p.shard or (holders // p.replicate if p.replicate > 0 else 0)
    if shard * p.replicate != holders:
        what = f"dp x cp = shard x replicate: {holders} is not {shard} x {p.replicate}"
        raise InputError(path, what, "parallel.replicate")
    return shard


def _recompute(path: str | Path, t: TrainingWords) -> Recompute:
    """A table, or a word: none, selective, selective:mlp+moe_act, full, every-2."""
    given = t.recompute
    if isinstance(given, RecomputeWords):
        return Recompute(given.mode, tuple(given.modules), given.share, given.offload)
    mode, _, modules = given.partition(":")
    if mode.startswith("every-"):
        count = mode.removeprefix("every-")
        if not count.isdigit() or not int(count):
            raise InputError(path, f"is {given!r}: every-2 is every second layer", "training.recompute")
        return Recompute("full", share=1 / int(count))
    return Recompute(mode, tuple(m.strip() for m in modules.replace("+", ",").split(",") if m.strip()))
