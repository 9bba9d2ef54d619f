"""`presage plan`: the best parallelism for a training job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.job_source import GpuKind, OnPlatform, job_from_options, same_job
from presage.cli.options import Change, JobFile, Json, NoiseFile, RayAddress, Report, Seed, Workers, option, out_option
from presage.cli.output import bar, show_answer
from presage.cli.post_training import show_splits

if TYPE_CHECKING:
    from presage.configs.job import Job
    from presage.configs.job_file import ParsedJob
    from presage.search import SearchProgress

MS = 1e3


Keep = Annotated[list[str], option("--keep", "KNOB=VALUE,...", "Fix knobs, e.g. tp=8,recompute=none (repeatable).")]
Objective = Annotated[
    str,
    option(
        "--objective",
        "NAME",
        "Minimise the mean step time (mean), GPU-seconds per step (cost) or p95 step time (p95).",
        complete=complete.one_of(complete.OBJECTIVES),
    ),
]


def command(
    job: JobFile,
    gpus: Annotated[
        str | None, option("--gpus", "N[,N...]", "Number of GPUs (default: the file's); with several, the best.")
    ] = None,
    gpu: GpuKind = None,
    on: OnPlatform = None,
    top: Annotated[int, option("--top", "N", "Plans to list.", min=1)] = 10,
    micro_batch: Annotated[
        list[int], option("--micro-batch", "N", "Allow only this microbatch size (repeatable).", min=1)
    ] = [],  # noqa: B006
    keep: Keep = [],  # noqa: B006
    change: Change = [],  # noqa: B006
    objective: Objective = "mean",
    limit: Annotated[int | None, option("--limit", "N", "Evaluate at most N plans.", min=1)] = None,
    workers: Workers = 1,
    ray: RayAddress = None,
    noise: NoiseFile = None,
    seed: Seed = 0,
    out: Annotated[Path | None, out_option("--out", "PLAN.toml", "Write the best plan as a job file.")] = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Find the best parallelism for a job: every legal plan that fits in memory, ranked and explained.

    It chooses tensor, pipeline, context and expert parallelism, schedule, microbatch size, sharding and recomputation.
    Of a reinforcement-learning step ([rl]) it chooses how many GPUs train and how many decode.

    presage plan examples/jobs/llama3.1-405b.toml --workers 2

    presage plan llama3-70b --gpus 256 --gpu h200

    presage plan job.toml --gpus 1024 --keep tp=8,cp=1 --out best.toml --report plan.html

    presage plan job.toml --gpus 16384 --objective p95 --noise noise.toml
    """
    from presage.report.plan_answer import plan_answer
    from presage.search import parse_keep, search

    kept = parse_keep([*keep, *(f"micro_batch={n}" for n in micro_batch)])
    many = None if gpus is None else _numbers(gpus)
    parsed = _read(job, change, many, gpu, on)
    if parsed.rl is not None:
        away = {"--gpus": gpus, "--keep": keep, "--micro-batch": micro_batch, "--noise": noise, "--out": out}
        again = same_job(job, gpus, change, gpu, on)
        show_splits(parsed, top, seed, away | {"--objective": objective != "mean"}, (json, report, again))
        return
    read, cluster = parsed.job, {k: v for k, v in parsed.cluster.items() if v is not None}
    with _bar() as tell:
        result = search(
            read, many or [read.gpus], objective=objective, limit=limit, workers=workers, ray=ray, keep=kept, top=top,
            noise=noise, seed=seed, tell=tell,
        )  # fmt: skip
    if out is not None and result.best:
        _write(result.best[0].job, cluster, job, out)
    again = ["plan", *same_job(job, gpus, change, gpu, on), "--out", "best.toml"]
    then = [] if not result.best else again if out is None else ["job", out]
    show_answer(plan_answer(read, result), json, report, {"job of the best plan": out}, then=then)
    if not result.best:
        raise typer.Exit(1)


def _read(path: Path, change: list[str], many: list[int] | None, gpu: str | None, on: str | None) -> ParsedJob:
    """The job of a file or a model."""
    count = None if many is None or path.exists() else max(many)
    return job_from_options(path, count, change, checked=False, gpu=gpu, on=on, post_training=True)


def _numbers(text: str) -> list[int]:
    from presage.errors import PresageError

    try:
        return sorted({int(part.replace("_", "")) for part in text.split(",")})
    except ValueError:
        raise PresageError(f"--gpus {text}: should be a number of GPUs, or several such as 1024,2048") from None


def _write(best: Job, cluster: dict[str, Any], source: Path, path: Path) -> None:
    from presage.files import write_whole
    from presage.search import job_plan, plan_words
    from presage.search.job_toml import cluster_beside, job_toml

    comment = f"The best plan that `presage plan {source.name} --gpus {best.gpus}` found: {plan_words(job_plan(best))}"
    write_whole(path, job_toml(best, cluster_beside(cluster, source, path), comment).encode())


@contextmanager
def _bar() -> Iterator[Callable[[SearchProgress], None]]:
    """A progress bar with plans per second and the best step so far."""
    import time

    begun = time.perf_counter()
    with bar("surveying", 1.0) as shown:

        def tell(p: SearchProgress) -> None:
            speed = f"{p.plans / (time.perf_counter() - begun):,.0f} plans/s"
            best = f", best {p.best:.4g} s" if p.best < float("inf") else ""
            shown(p.done, p.total, p.what, speed + best)

        yield tell
