"""The job that a command is about: a job file, or a model by name, with the overrides that options give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from presage.cli import complete
from presage.cli.options import option
from presage.errors import InputError, PresageError, near

if TYPE_CHECKING:
    from presage.configs.job import Job
    from presage.configs.job_file import JobTable, ParsedJob

DEFAULT_PLATFORM = "dgx-h100"
PER_NODE = 8
GpuKind = Annotated[
    str | None, option("--gpu", "NAME", "Kind of GPU, in its usual nodes (overrides the file).", complete=complete.gpus)
]
OnPlatform = Annotated[
    str | None,
    option(
        "--platform --on",
        "NAME",
        "Platform to run on: see `presage platforms` (overrides the file).",
        complete=complete.platforms,
    ),
]


def job_from_options(
    path: Path,
    gpus: int | None,
    change: list[str],
    terms: dict[str, float | None] | None = None,
    checked: bool = True,
    *,
    gpu: str | None = None,
    on: str | None = None,
    host: str | None = None,
    post_training: bool = False,
) -> ParsedJob:
    """The job of a file or of a known model, with the overrides that options give; a model gets the best usual plan.
    Reinforcement-learning steps are refused unless the command takes them."""
    from presage.configs.models import preset_key

    if path.suffix == ".py":
        raise InputError(path, f"is code, not a job file: use presage predict {path}, or presage job --from {path}")
    cluster, notes = _cluster(gpu, on)
    if host is not None:
        change = [*change, f"cluster.host={_absolute(host)}"]
    model = None if path.exists() else preset_key(str(path))
    if model is not None:
        return _preset_job(model, gpus, change, cluster, terms, checked, notes)
    if not path.exists() and not path.suffix:
        raise _no_job(path)
    from presage.configs.job_file import JobTable, training_alone

    file = JobTable.read(path)
    if file.has_embeddings:
        raise InputError(path, f"is a recommendation job: use presage dlrm {path}")
    parsed = file.parse(_overrides(file, change, gpus, cluster, terms), checked)
    parsed = parsed if post_training else training_alone(parsed)
    return parsed._replace(notes=(*notes, *parsed.notes))


def _absolute(host: str) -> str:
    """A host's name, or the whole path of its file: others are relative to the job's."""
    return str(Path(host).absolute()) if host.endswith((".toml", ".json")) else host


def same_job(path: Path, gpus: int | str | None, change: list[str], gpu: str | None, on: str | None) -> list[object]:
    """The words that name this job on the command line, for a command to try next."""
    given = {"--gpus": gpus, "--gpu": gpu, "--platform": on}
    words = [word for name, value in given.items() if value is not None for word in (name, value)]
    return [path, *words, *(word for pair in change for word in ("--set", pair))]


def transformer_job(path: Path, gpus: int | None, change: list[str]) -> Job:
    """The job of a file or of a known model, with the overrides that options give."""
    return job_from_options(path, gpus, change).job


def _overrides(
    file: JobTable, change: list[str], gpus: int | None, cluster: dict[str, Any], terms: dict[str, float | None] | None
) -> dict[str, Any]:
    from presage.configs.schema import parse_overrides

    out = parse_overrides(change, file.table)
    if gpus is not None:
        out["parallel"] = {"dp": None} | out.get("parallel", {}) | {"gpus": gpus}
    given = {k: v for k, v in (terms or {}).items() if v is not None}
    out["cluster"] = cluster | out.get("cluster", {}) | given
    return out


def _cluster(gpu: str | None, on: str | None) -> tuple[dict[str, Any], list[str]]:
    """The [cluster] that --gpu or --platform asks for, and notes on what was chosen."""
    from presage.hardware import cluster, gpu_choice
    from presage.hardware import gpu as gpu_of
    from presage.hardware import platform as platform_of

    if on is not None:
        place = platform_of(on)
        if gpu is not None and gpu_of(gpu).key != place.gpu.key:
            raise PresageError(f"--platform {on} has {place.gpu.name}: omit --gpu, or choose another platform")
        return {"platform": str(Path(on).absolute()) if on.endswith(".toml") else on, "gpu": None}, []
    if gpu is None:
        return {}, []
    chip = gpu_of(gpu)
    place = cluster(chip, PER_NODE)
    taken = f"{choice}; " if (choice := gpu_choice(gpu)) else ""
    notes = [f"{taken}platform {place.key} ({place.name}), --platform NAME for another"]
    name = str(Path(gpu).absolute()) if gpu.endswith(".toml") else chip.key
    unset: dict[str, Any] = dict.fromkeys(("platform", "network_Gbps", "fabric", "domain"))
    return unset | {"gpu": name, "per_node": PER_NODE}, notes


def _preset_job(
    model: str,
    gpus: int | None,
    change: list[str],
    cluster: dict[str, Any],
    terms: dict[str, float | None] | None,
    checked: bool,
    notes: list[str],
) -> ParsedJob:
    """A known model, trained with usual settings by the best usual plan, and notes on what was chosen."""
    from presage.configs.preset_job import preset_job

    if gpus is None:
        raise PresageError(f"{model} is a model: give the number of GPUs, e.g. {model} --gpus 64 --gpu h100")
    if not cluster:
        cluster, notes = (
            {"platform": DEFAULT_PLATFORM},
            [f"platform {DEFAULT_PLATFORM}: --gpu or --platform for another"],
        )
    file = preset_job(model, gpus, {k: v for k, v in cluster.items() if v is not None})
    overrides = _overrides(file, change, None, {}, terms)
    parsed = file.parse(overrides, checked=False)
    job = parsed.job
    samples = f"{job.global_batch:,} samples of {job.sequence:,} tokens per step"
    notes = [*notes, f"{samples}, --set training.global_batch=N or training.sequence=N for others"]
    if not checked:
        return parsed._replace(notes=tuple(notes))
    best, how = _planned(job, overrides)
    return parsed._replace(job=best, notes=(*how, *notes, *parsed.notes))


def _planned(job: Job, overrides: dict[str, Any]) -> tuple[Job, list[str]]:
    """The job with the best usual plan; what --set gives of the plan stays."""
    from presage.cli.output import status
    from presage.search import job_plan, plan_words, quick_plan
    from presage.search.plans import KNOBS, knob

    training = {k: v for k, v in overrides.get("training", {}).items() if k in ("micro_batch", "recompute")}
    given = [k for k in {**overrides.get("parallel", {}), **training} if k in KNOBS]
    with status("choosing a plan"):
        best = quick_plan(job, {k: frozenset({knob(job_plan(job), k)}) for k in given})
    plan = f"plan {plan_words(job_plan(best))}, the fastest of the usual ones that fit"
    return best, [f"{plan}; --set parallel.tp=N for another, `presage plan` searches all"]


def _no_job(path: Path) -> PresageError:
    from presage.configs.models import presets

    hint = near(str(path), presets())
    known = f"there is no such file, and no model of that name{hint or '; one that is known is llama3-8b'}"
    return PresageError(f"{path}: {known} (`presage examples FOLDER` copies job files to start from)")
