"""Job files: TOML of a model, how it is trained, spread and on what; or with a framework's own file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from presage.configs.check import check, job_notes
from presage.configs.frameworks import Framework, framework, switches
from presage.configs.job import Job, Recompute
from presage.configs.lengths import parse_lengths
from presage.configs.megatron import read_arguments
from presage.configs.models import read_model
from presage.configs.nemo_rl import read_nemo_rl
from presage.configs.post_training import PostTraining, read_post_training, training_defaults
from presage.configs.recipes import SCALING_NAMES, Recipe
from presage.configs.schema import (
    ClusterConfig,
    FrameworkConfig,
    JobConfig,
    LoraConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainingConfig,
    check_keys,
    convert_section,
    given_fields,
    merge_sections,
)
from presage.configs.torchtitan import read_titan
from presage.configs.tuning import ATTENTION, FULL, METHODS, Tuning, tuned_matrices
from presage.configs.verl import read_verl
from presage.errors import InputError, PresageError
from presage.hardware import Gpu, Platform, platform
from presage.hardware.facts import load_toml
from presage.parallel.dispatchers import dispatcher_name
from presage.parallel.plan import DEGREES, DegreeError, ParallelPlan, count_gpus, count_sharing
from presage.parallel.schedules import SCHEDULES, default_schedule, schedule_name

Table = Mapping[str, Any]
OPTIMIZERS = {"adamw": "adam"}  # the same work
BALANCES = ("zigzag", "head-tail", "none")  # the first two are one
EVEN = ("megatron-core", "megatron-2021", "nemo")
FOREIGN = {"arguments": read_arguments, "titan": read_titan, "verl": read_verl, "nemo_rl": read_nemo_rl}


class ParsedJob(NamedTuple):
    """A job, what its owner should know (arguments not understood, what is unusual in it), its [cluster] and [run]."""

    job: Job
    notes: tuple[str, ...] = ()
    cluster: Table = MappingProxyType({})
    path: Path = Path("job")
    run: Table = MappingProxyType({})
    rl: PostTraining | None = None  # of a reinforcement-learning step


class JobTable(NamedTuple):
    """A job file as read from disk, parsed once."""

    path: Path
    table: Table

    @staticmethod
    def read(path: str | Path) -> JobTable:
        return JobTable(Path(path), load_toml(Path(path)))

    @property
    def has_embeddings(self) -> bool:
        """Whether it describes a recommendation job, which presage.embeddings reads."""
        return "embeddings" in self.table

    def parse(self, overrides: Table | None = None, checked: bool = True) -> ParsedJob:
        """The job. `overrides` go over the file, section by section: {"parallel": {"gpus": 1024}}."""
        path, table = self
        check_keys(path, table, JobConfig, "")
        base, foreign = _foreign(path, table)
        sections = training_defaults(merge_sections(merge_sections(base, table), overrides or {}), path)
        if "model" not in sections and (why := [note for note in foreign if "not a preset" in note]):
            raise InputError(path, f"is missing: {why[0]}", "model")
        try:
            job, notes = job_from_sections(sections, path)
            rl, assumed = read_post_training(sections.get("rl"), job, path)
            if checked:
                check(job)
        except InputError:
            raise
        except PresageError as e:
            raise InputError(path, str(e)) from e
        if checked:
            _check_even(path, job)
            notes = (*notes, *(job_notes(job) if rl is None else ()))
        notes = (*foreign, *notes, *assumed)
        return ParsedJob(job, notes, sections.get("cluster", {}), path, sections.get("run", {}), rl)


def read_transformer_job(path: str | Path, overrides: Table | None = None, checked: bool = True) -> Job:
    """A job from its file. `overrides` go over the file, section by section: {"parallel": {"gpus": 1024}}."""
    return training_alone(read_job_file(path, overrides, checked)).job


def training_alone(parsed: ParsedJob) -> ParsedJob:
    """The job, unless it is a reinforcement-learning step, of which training is only a part."""
    if parsed.rl is not None:
        what = (
            "is a reinforcement-learning step: presage job and presage plan take it; for its training alone remove it"
        )
        raise InputError(parsed.path, what, "rl")
    return parsed


def read_job_file(path: str | Path, overrides: Table | None = None, checked: bool = True) -> ParsedJob:
    """A job from its file, with the notes on it."""
    return JobTable.read(path).parse(overrides, checked)


def _check_even(path: Path, job: Job) -> None:
    """Raise where Megatron cannot split the layers evenly."""
    uneven = job.parallel.uneven_layers(job.model.layers, job.model.predicted)
    if uneven and job.framework.key in EVEN:
        raise InputError(path, uneven, "parallel")


def _foreign(path: Path, table: Table) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Sections read from the framework's own file that the job file names."""
    named = [key for key in FOREIGN if key in table]
    if len(named) > 1:
        raise InputError(path, f"give {named[0]} or {named[1]}, not both", named[1])
    for key in named:
        if not isinstance(table[key], str):
            raise InputError(path, f"is {table[key]!r}: it should be the name of a file", key)
        return FOREIGN[key](path.parent / table[key])
    return {}, ()


def job_from_sections(table: Table, path: str | Path = "job") -> tuple[Job, tuple[str, ...]]:
    """A job from the sections of a job file, not checked, and notes on it; files it names are beside `path`."""
    words = convert_section(path, {k: v for k, v in table.items() if k != "model"}, JobConfig)
    fields = table.get("model", {})
    if not isinstance(fields, Mapping):
        raise InputError(path, f"is {fields!r}: it should be a table, [model]", "model")
    model, notes = read_model(fields, path, words.name or _stem(path))
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
        overlap=replace(software.overlap, **given_fields(words.overlap)),
        framework=software,
        optimizer=OPTIMIZERS.get(t.optimizer, t.optimizer),
        name=words.name or _stem(path) or model.name,
        host=_host(path, words.cluster.host or ""),
        tuning=_tuning(path, t),
        recipe=_recipe(t),
        lengths=_lengths(path, t),
        balanced=_balanced(path, words.parallel),
    )
    return job, notes


def _recipe(t: TrainingConfig) -> Recipe:
    scaling = SCALING_NAMES.get(t.scaling or "", t.scaling or "")
    return Recipe(scaling, t.muon_steps, t.muon, t.host_optimizer, t.host_overlap)


def _lengths(path: str | Path, t: TrainingConfig) -> tuple[int, ...]:
    try:
        return parse_lengths(t.lengths, path) if t.lengths else ()
    except InputError:
        raise
    except PresageError as e:
        raise InputError(path, str(e), "training.lengths") from e


def _balanced(path: str | Path, p: ParallelConfig) -> bool:
    """Whether context-parallel ranks have as much attention each."""
    if p.cp_balance not in BALANCES:
        raise InputError(path, f"is {p.cp_balance!r}: choose from {', '.join(BALANCES)}", "parallel.cp_balance")
    return p.cp_balance != "none"


def _tuning(path: str | Path, t: TrainingConfig) -> Tuning:
    """Which weights are trained: all, or adapters beside frozen ones."""
    method = t.tune or ("lora" if t.lora else "full")
    method = {"sft": "full"}.get(method, method)
    if method not in METHODS:
        raise InputError(path, f"is {t.tune!r}: choose from {', '.join((*METHODS, 'sft'))}", "training.tune")
    if method == "full":
        if t.lora:
            raise InputError(
                path, f'does nothing with tune = {t.tune!r}: leave it out, or tune = "lora"', "training.lora"
            )
        return FULL
    w = t.lora or LoraConfig()
    base = w.base or ("nf4" if method == "qlora" else "16bit")
    try:
        targets = tuned_matrices(w.targets) if w.targets else ATTENTION
    except PresageError as e:
        raise InputError(path, str(e), "training.lora.targets") from e
    return Tuning("lora", w.rank, targets, base, w.adapter_bits, w.dropout, w.residual_bits)


def _host(path: str | Path, name: str) -> str:
    """A host's name, or its file beside the job's."""
    return str(Path(path).parent / name) if name.endswith((".toml", ".json")) else name


def _global_batch(path: str | Path, t: TrainingConfig, dp: int) -> int:
    """Samples per step: as given, by the number of microbatches, or one microbatch per replica."""
    counted = t.micro_batch * max(dp, 1) * (t.microbatches or 1)
    if t.global_batch is not None and t.microbatches is not None and t.global_batch != counted:
        sizes = f"{t.micro_batch} x {dp} x {t.microbatches} = {counted}"
        what = f"global_batch = micro_batch x dp x microbatches: {t.global_batch} is not {sizes}"
        raise InputError(path, what, "training.microbatches")
    return counted if t.global_batch is None else t.global_batch


def _stem(path: str | Path) -> str:
    return str(path.stem) if isinstance(path, Path) else ""


def _platform(path: str | Path, c: ClusterConfig) -> Platform:
    if (c.platform is None) == (c.gpu is None):
        what = "give platform or gpu, not both" if c.gpu else "say what it runs on: platform = ..., or gpu = ..."
        raise InputError(path, what, "cluster")
    if c.platform is not None:
        name = str(Path(path).parent / c.platform) if c.platform.endswith(".toml") else c.platform
        return platform(name)
    from presage.hardware import cluster

    gpu = str(Path(path).parent / str(c.gpu)) if str(c.gpu).endswith(".toml") else str(c.gpu)
    return cluster(gpu, c.per_node, c.network_Gbps, fabric=c.fabric or "infiniband", domain=c.domain)


def _framework(path: str | Path, given: str | FrameworkConfig, gpu: Gpu) -> Framework:
    words = FrameworkConfig(name=given) if isinstance(given, str) else given
    name = words.name or "megatron-core"
    if name.endswith(".toml"):
        name = str(Path(path).parent / name)
    return framework(name, gpu, **switches(words))


def _parallel(path: str | Path, p: ParallelConfig, software: Framework) -> tuple[ParallelPlan, int, int]:
    """The degrees, GPUs in all, replicas."""
    schedule = schedule_name(p.schedule or default_schedule(p.virtual))
    virtual = SCHEDULES[schedule].virtual_of(p.virtual) if schedule in SCHEDULES else p.virtual
    plan = ParallelPlan(
        **{name: getattr(p, name) for name in DEGREES} | {"virtual": virtual},
        sequence_parallel=p.tp > 1 and software.sequence if p.sequence_parallel is None else p.sequence_parallel,
        schedule=schedule,
        zero=p.zero if p.zero is not None else 3 if p.fsdp else 0,
        fsdp=p.fsdp,
        dispatcher=dispatcher_name(p.dispatcher) if p.dispatcher else "",
        layers_as=tuple(p.layers_as),
        ends_as_layers=p.ends_as_layers,
    )
    try:
        gpus = count_gpus(plan, p.gpus, p.dp)
        dp = plan.dp(gpus) if plan.replica_gpus > 0 else 0
        return replace(plan, shard=count_sharing(dp * p.cp, p.shard, p.replicate)), gpus, dp
    except DegreeError as e:
        raise InputError(path, e.equation, f"parallel.{e.key}") from e


def _recompute(path: str | Path, t: TrainingConfig) -> Recompute:
    """A table, or a word: none, selective, selective:mlp+moe_act, full, every-2."""
    given = t.recompute
    if isinstance(given, RecomputeConfig):
        return Recompute(given.mode, tuple(given.modules), given.share, given.offload)
    mode, _, modules = given.partition(":")
    if mode.startswith("every-"):
        count = mode.removeprefix("every-")
        if not count.isdigit() or not int(count):
            raise InputError(path, f"is {given!r}: every-2 is every second layer", "training.recompute")
        return Recompute("full", share=1 / int(count))
    return Recompute(mode, tuple(m.strip() for m in modules.replace("+", ",").split(",") if m.strip()))
