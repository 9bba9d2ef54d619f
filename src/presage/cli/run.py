"""`presage run`: when a whole training run ends, with failures, checkpoints and a deadline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any

from presage.cli import complete
from presage.cli.job_source import GpuKind, OnPlatform, job_from_options, same_job
from presage.cli.options import Change, Gpus, JobFile, Json, NoiseFile, Price, RayAddress, Report, Seed, Workers, option
from presage.cli.output import pool_progress, show_answer
from presage.errors import PresageError

if TYPE_CHECKING:
    from presage.configs.job_file import ParsedJob
    from presage.prediction.jobs.job_prediction import JobResult
    from presage.runs.run import TrainingRun
    from presage.runs.whole import RunResult

GB, DAY = 1e9, 86400.0
LONGEST = 1_000_000_000  # steps
FAILURES, CHECKPOINTS = "Failures", "Checkpoints"

Tokens = Annotated[str | None, option("--tokens", "N", "Tokens to train on, e.g. 15T.")]
Steps = Annotated[int | None, option("--steps", "N", "Steps to train for (instead of --tokens).", min=1, max=LONGEST)]
Deadline = Annotated[
    str | None, option("--deadline", "60d|DATE", "Deadline: a duration or a date; prints the chance of meeting it.")
]
Start = Annotated[str | None, option("--start", "DATE", "Start date, for a deadline that is a date (default: today).")]
FailureSet = Annotated[
    str | None,
    option(
        "--failures", "NAME|FILE.toml", "Failure rates (default: llama3).", panel=FAILURES, complete=complete.failures
    ),
]
Rate = Annotated[
    float | None,
    option("--rate", "R", "Failures per 1,000 node-days, all kinds together.", panel=FAILURES, min=0, max=1e9),
]
Superlinear = Annotated[
    bool,
    option(
        "--superlinear",
        "",
        "Let the failure rate per node grow with the job, as Meta saw up to 98K GPUs.",
        panel=FAILURES,
    ),
]
RestartSeconds = Annotated[
    float | None,
    option(
        "--restart-seconds",
        "S",
        "Time from detecting a failure to the next step, s.",
        panel=FAILURES,
        min=0.001,
        max=1e9,
    ),
]
SaveSeconds = Annotated[
    float | None, option("--checkpoint-seconds", "S", "Pause per checkpoint, s.", panel=CHECKPOINTS, min=0, max=1e9)
]
Background = Annotated[
    float,
    option("--background", "SHARE", "Share of checkpoint writing that overlaps training (0 to 1).", panel=CHECKPOINTS),
]
Storage = Annotated[
    float | None, option("--storage-GBps", "X", "Checkpoint write bandwidth, GB/s.", panel=CHECKPOINTS, min=0.001)
]
Every = Annotated[
    str | None,
    option(
        "--interval", "auto|N|30min", "Checkpoint interval: best (default), in steps, or a time.", panel=CHECKPOINTS
    ),
]
SpareNodes = Annotated[
    int | None,
    option("--spares", "N", "Spare nodes (default: one is always ready).", panel=FAILURES, min=0, max=1_000_000),
]
PolicyNames = Annotated[
    str | None,
    option(
        "--policy",
        "NAME[,NAME...]",
        "What to do about failures: restart, spares=N, hot-spare=N, elastic[=REPLICAS], in-memory-checkpoint, "
        "async-checkpoint, evict=N, burn-in=HOURS, watch=MINUTES (join with +); several are compared; compare: all.",
        panel=FAILURES,
    ),
]
StepSeconds = Annotated[
    float | None,
    option("--step-seconds", "S", "Use this measured step time instead of the prediction, s.", min=1e-6, max=1e9),
]
ModelError = Annotated[
    bool,
    option("--model-error/--no-model-error", "", "Include presage's own uncertainty (--no-model-error leaves it out)."),
]
Draws = Annotated[int, option("--draws", "N", "Runs to draw.", min=1, max=1_000_000)]


def command(
    job: JobFile,
    tokens: Tokens = None,
    steps: Steps = None,
    deadline: Deadline = None,
    start: Start = None,
    failures: FailureSet = None,
    rate: Rate = None,
    superlinear: Superlinear = False,
    restart: RestartSeconds = None,
    save: SaveSeconds = None,
    background: Background = 0.0,
    storage: Storage = None,
    interval: Every = None,
    spares: SpareNodes = None,
    policy: PolicyNames = None,
    noise: NoiseFile = None,
    step: StepSeconds = None,
    model_error: ModelError = True,
    price: Price = None,
    gpus: Gpus = None,
    gpu: GpuKind = None,
    on: OnPlatform = None,
    change: Change = [],  # noqa: B006
    draws: Draws = 2000,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Predict when a training run ends, with failures, checkpoints, spares and stalls, and the chance of a deadline.

    presage run examples/jobs/llama3.1-405b.toml --tokens 15T --deadline 60d --price 2.5

    presage run job.toml --steps 500000 --failures our_cluster.toml --interval 30min --spares 16
    presage run job.toml --steps 500000 --policy compare
    """
    from presage.prediction.jobs.job_prediction import predict_job
    from presage.report.run_answer import run_answer
    from presage.runs.run import checkpoints_of
    from presage.runs.sets import chosen_reliability
    from presage.runs.steps import step_times
    from presage.runs.whole import predict_run

    read = job_from_options(job, gpus, change, {"price_per_gpu_hour": price}, gpu=gpu, on=on)
    asked = _run_section(read)
    noise, failures = noise or asked.get("noise"), failures or asked.get("failures")
    predicted = replace(predict_job(read), noise=noise)
    kind = chosen_reliability(failures, _or(rate, asked, "rate"), _or(restart, asked, "restart_seconds"), superlinear)
    many = _steps(predicted, tokens or (None if steps else asked.get("tokens")), steps)
    saves = checkpoints_of(predicted.job, kind, save, background, None if storage is None else storage * GB)
    until = _until(deadline or asked.get("deadline"), start)
    times, source = step_times(predicted, noise, bool(kind.slow), seed)
    times = times if step is None else times.measured(step)
    result = predict_run(predicted, many, kind, saves, times, _or(spares, asked, "spares"), draws, seed, until)
    run = _interval(result.run, interval or asked.get("interval") or "auto", model_error)
    result = _with_policies(replace(result, run=run, noise=source), policy)
    then = ["sensitivity", *same_job(job, gpus, change, None, None)] if gpu is None and on is None else []
    show_answer(run_answer(_computed(result, workers, ray)), json, report, then=then)


def _with_policies(result: RunResult, text: str | None) -> RunResult:
    """The result with policies to compare; a single one is that of the run itself."""
    from presage.runs.policies import COMPARE, policy_runs

    if text is None:
        return result
    found = policy_runs(text, result.run, result.job.job)
    if len(found) > 1 or text.strip() == COMPARE:
        return replace(result, policies=found)
    before = policy_runs("restart", result.run, result.job.job)
    return replace(result, run=found[0].run, policies=(*before, *found))


def _computed(result: RunResult, workers: int, ray: str | None) -> RunResult:
    from presage.pool import open_pool

    with pool_progress("drawing runs", open_pool(workers, ray)) as pool:
        return result.computed(pool)


def _steps(predicted: JobResult, tokens: str | None, steps: int | None) -> int:
    from math import ceil

    from presage.prediction.jobs.cost import parse_tokens

    if (tokens is None) == (steps is None):
        raise PresageError("give the length of the run: --tokens 15T, or --steps 500000")
    many = steps or ceil(parse_tokens(tokens or "") / predicted.job.tokens)
    if many > LONGEST:
        raise PresageError(f"--tokens {tokens}: that is {many:,} steps, more than {LONGEST:,}")
    return many


def _interval(run: TrainingRun, interval: str, model_error: bool) -> TrainingRun:
    """The run with the given checkpoint interval, with or without presage's own uncertainty."""
    from presage.runs.run import with_interval

    with _named("--interval"):
        run = with_interval(run, interval)
    return run if model_error else run.exact()


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Puts the option's name before what is wrong with its value."""
    try:
        yield
    except PresageError as e:
        raise PresageError(f"{option} {e}") from e


def _or(option: Any, asked: dict[str, Any], name: str) -> Any:
    return asked.get(name) if option is None else option


def _run_section(job: ParsedJob) -> dict[str, Any]:
    """The [run] of a job file, whose options are the defaults of this command's; files in it are beside the job's."""
    found = dict(job.run)
    for name in ("noise", "failures"):
        if str(found.get(name, "")).endswith(".toml"):
            found[name] = str(job.path.parent / str(found[name]))
    return found


def _until(text: str | None, start: str | None) -> float | None:
    """Seconds from the start to the deadline."""
    from presage.runs.run import parse_duration

    if text is None:
        return None
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text.strip()):
        with _named("--deadline"):
            return parse_duration(text, "60d, 900h or a date such as 2027-03-31")
    first = datetime.now(UTC).date() if start is None else _date(start, "--start")
    days = (_date(text, "--deadline") - first).days
    if days <= 0:
        raise PresageError(f"--deadline {text}: should be after the start, {first}")
    return days * DAY


def _date(text: str, option: str) -> date:
    try:
        return date.fromisoformat(text.strip())
    except ValueError as e:
        raise PresageError(f"{option} {text}: write a date as 2027-03-31") from e
