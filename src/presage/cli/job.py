"""`presage job`: step time, memory and cost of a transformer training job, from its config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from presage.cli.graph import Arguments, Limit, Module, StepAt, StepFunction
from presage.cli.job_from import FromCode, FromRanks, JobOut, JobWords, from_code
from presage.cli.job_source import GpuKind, OnPlatform, job_from_options, same_job
from presage.cli.options import (
    Change,
    Draws,
    Gpus,
    HostName,
    Json,
    NoiseFile,
    Price,
    RayAddress,
    Report,
    Seed,
    TraceOut,
    Workers,
    option,
)
from presage.cli.output import pool_progress, show_answer, status, write_timeline
from presage.cli.post_training import Where, show_post_training
from presage.errors import PresageError
from presage.scripts import LIMIT

if TYPE_CHECKING:
    from presage.configs.job_file import ParsedJob
    from presage.noise.distribution import Distribution
    from presage.prediction.draws.distribution import StepDistribution
    from presage.prediction.jobs.job_prediction import JobResult
    from presage.report.answer import Answer

# What makes microbatches differ.
Lengths = Annotated[
    Path | None, option("--lengths", "FILE", "Document lengths in tokens, one per line: makes microbatches differ.")
]
Packed = Annotated[bool, option("--packed/--padded", "", "Pack documents into sequences (--padded: one per sequence).")]
Skew = Annotated[
    float | None, option("--expert-skew", "S", "Log-normal sigma of expert load (0.3 is mild imbalance).", min=0)
]


FarQuantiles = Annotated[
    list[float],
    option("--quantile", "P", "Another quantile of the step, e.g. 0.999, with its error and a bound (repeatable)."),
]
Tokens = Annotated[str | None, option("--tokens", "N", "Tokens to train on, e.g. 15T: adds days, energy and cost.")]
Pue = Annotated[float | None, option("--pue", "X", "Power usage effectiveness: facility W per GPU W (default: 1.0).")]
Flops = Annotated[
    str | None,
    option("--flops", "NAME", "FLOPs convention of MFU: '6N + causal attention' (default), 'full attention' or '6N'."),
]
Power = Annotated[float | None, option("--power", "W", "Average power per GPU under load, W (default: TDP).")]


def command(
    job: JobWords = [],  # noqa: B006
    gpus: Gpus = None,
    gpu: GpuKind = None,
    on: OnPlatform = None,
    host: HostName = None,
    change: Change = [],  # noqa: B006
    tokens: Tokens = None,
    price: Price = None,
    power: Power = None,
    pue: Pue = None,
    flops: Flops = None,
    trace: TraceOut = None,
    draws: Draws = 0,
    quantile: FarQuantiles = [],  # noqa: B006
    lengths: Lengths = None,
    packed: Packed = True,
    skew: Skew = None,
    noise: NoiseFile = None,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    code: FromCode = None,
    module: Module = None,
    arg: Arguments = [],  # noqa: B006
    ranks: FromRanks = 1,
    step_function: StepFunction = "",
    step_at: StepAt = None,
    limit: Limit = LIMIT,
    out: JobOut = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Predict a training job from its config: step time, memory, and with --tokens the days, energy and cost.

    --from reads the config from your own code: it runs the code without a GPU, as `presage predict` does, writes the
    job file that describes it, and compares the step that the code takes with the step that the file gives.

    presage job examples/jobs/llama3.1-405b.toml --tokens 15T --price 2.5

    presage job llama3-8b --gpus 64 --gpu h100

    presage job examples/jobs/llama3.1-405b.toml --draws 10000 --quantile 0.999 --report job.html

    presage job job.toml --gpus 4096 --host my_host.toml --set parallel.pp=8 --trace out.json

    presage job --from train.py --ranks 64 --platform dgx-h100 --out job.toml -- --batch 4
    """
    if code is not None or module is not None:
        away = {"--gpus": gpus, "--tokens": tokens, "--trace": trace, "--draws": draws, "--noise": noise}
        named = (code, job, arg, module, step_function, step_at, limit)
        from_code(named, ranks, gpu, on, change, out, json, report, away | {"--host": host})
        return
    path = _one_job(job, {"--arg": arg, "--ranks": ranks > 1, "--out": out})
    terms = {"power_W": power, "price_per_gpu_hour": price, "pue": pue}
    parsed = job_from_options(path, gpus, change, terms, gpu=gpu, on=on, host=host, post_training=True)
    if wrong := [q for q in quantile if not 0 < q < 1]:
        raise PresageError(f"--quantile {wrong[0]:g}: should be between 0 and 1, such as 0.999")
    drawn = _Drawn(draws, lengths, packed, skew, noise, seed, (workers, ray), tuple(quantile))
    verb = ["plan"] if tokens is None else ["run", "--tokens", tokens]
    then = [*verb[:1], *same_job(path, gpus, change, gpu, on), *verb[1:]]
    _show(parsed, {"--tokens": tokens, "--flops": flops}, drawn, trace, (json, report, then))


def _one_job(words: list[str], away: dict[str, object]) -> Path:
    """The job file or model that the words name."""
    if not words:
        raise PresageError(
            "missing argument JOB.toml|MODEL, as in: presage job examples/jobs/llama3.1-405b.toml; or --from TRAIN.py"
        )
    if len(words) > 1:
        raise PresageError(f"unexpected extra argument {words[1]}: one job at a time")
    if given := [name for name, value in away.items() if value]:
        raise PresageError(f"{given[0]} goes with --from TRAIN.py, which reads a job from code")
    return Path(words[0])


class _Drawn(NamedTuple):
    """Options of drawn steps."""

    draws: int
    lengths: Path | None
    packed: bool
    skew: float | None
    noise: str | None
    seed: int
    where: tuple[int, str | None]
    quantiles: tuple[float, ...]


def _show(parsed: ParsedJob, terms: dict[str, str | None], d: _Drawn, trace: Path | None, where: Where) -> None:
    """Predict the job, or its reinforcement-learning step, and show it."""
    if parsed.rl is not None:
        away = {"--trace": trace, "--lengths": d.lengths, "--expert-skew": d.skew, "--noise": d.noise}
        show_post_training(parsed, d.draws, d.seed, {**terms, **away}, where)
        return
    json, report, then = where
    answer, files = _answer(parsed, terms["--tokens"], terms["--flops"], d, trace, report)
    show_answer(answer, json, report, files, then=then)


def _answer(
    parsed: ParsedJob, tokens: str | None, flops: str | None, d: _Drawn, trace: Path | None, report: Path | None
) -> tuple[Answer, dict[str, Path | None]]:
    from presage.prediction.jobs.cost import parse_tokens
    from presage.prediction.jobs.job_flops import DEFAULT
    from presage.prediction.jobs.job_prediction import predict_job
    from presage.report.job_answer import job_answer

    many = None if tokens is None else parse_tokens(tokens)
    result = predict_job(parsed, convention=flops or DEFAULT)
    if trace is not None:
        write_timeline(result, trace)
    data = d.lengths is not None or d.skew is not None
    load = _load(result, d.lengths, d.packed, d.skew, d.seed) if data else None
    wanted = d.draws or d.noise or data or d.quantiles
    spread = _draw_distribution(result, d.noise, d.draws, d.seed, load, d.where) if wanted else None
    spread = replace(spread, extremes=d.quantiles) if spread else None
    with status("drawing steps"):
        return job_answer(replace(result, noise=d.noise, spread=spread), many, report is not None), {"timeline": trace}


def _load(result: JobResult, lengths: Path | None, packed: bool, skew: float | None, seed: int) -> Distribution:
    from presage.configs.lengths import read_lengths
    from presage.prediction.draws.data_dependence import microbatch_load

    return microbatch_load(result.job, None if lengths is None else read_lengths(lengths), packed, skew, seed)


def _draw_distribution(
    result: JobResult,
    noise: str | None,
    draws: int,
    seed: int,
    load: Distribution | None,
    where: tuple[int, str | None],
) -> StepDistribution:
    from presage.pool import THREADS_2, open_pool
    from presage.prediction.draws.distribution import predict_distribution

    with pool_progress("drawing steps", open_pool(*where, THREADS_2)) as pool:
        return predict_distribution(result, noise, draws or 10_000, seed, load, pool)
