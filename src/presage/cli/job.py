"""`presage job`: step time, memory and cost of a transformer training job, from its config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from presage.cli.job_source import GpuKind, OnPlatform, job_from_options, same_job
from presage.cli.options import (
    Change,
    Draws,
    Gpus,
    JobFile,
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

if TYPE_CHECKING:
    from presage.noise.distribution import Distribution
    from presage.prediction.draws.distribution import StepDistribution
    from presage.prediction.jobs.job_prediction import JobResult

# What makes microbatches differ.
Lengths = Annotated[
    Path | None, option("--lengths", "FILE", "Document lengths in tokens, one per line: makes microbatches differ.")
]
Packed = Annotated[bool, option("--packed/--padded", "", "Pack documents into sequences (--padded: one per sequence).")]
Skew = Annotated[
    float | None, option("--expert-skew", "S", "Log-normal sigma of expert load (0.3 is mild imbalance).", min=0)
]


Tokens = Annotated[str | None, option("--tokens", "N", "Tokens to train on, e.g. 15T: adds days, energy and cost.")]
Pue = Annotated[float | None, option("--pue", "X", "Power usage effectiveness: facility W per GPU W (default: 1.0).")]
Flops = Annotated[
    str | None,
    option("--flops", "NAME", "FLOPs convention of MFU: '6N + causal attention' (default), 'full attention' or '6N'."),
]


def command(
    job: JobFile,
    gpus: Gpus = None,
    gpu: GpuKind = None,
    on: OnPlatform = None,
    change: Change = [],  # noqa: B006
    tokens: Tokens = None,
    price: Price = None,
    power: Annotated[
        float | None, option("--power", "W", "Average power per GPU under load, W (default: TDP).")
    ] = None,
    pue: Pue = None,
    flops: Flops = None,
    trace: TraceOut = None,
    draws: Draws = 0,
    lengths: Lengths = None,
    packed: Packed = True,
    skew: Skew = None,
    noise: NoiseFile = None,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Predict a training job from its config: step time, memory, and with --tokens the days, energy and cost.

    presage job examples/jobs/llama3.1-405b.toml --tokens 15T --price 2.5

    presage job llama3-8b --gpus 64 --gpu h100

    presage job examples/jobs/llama3.1-405b.toml --draws 10000 --report job.html

    presage job job.toml --gpus 4096 --set parallel.pp=8 --set training.recompute=full --trace out.json
    """
    from presage.prediction.jobs.cost import parse_tokens
    from presage.prediction.jobs.job_flops import DEFAULT
    from presage.prediction.jobs.job_prediction import predict_job
    from presage.report.job_answer import job_answer

    many = None if tokens is None else parse_tokens(tokens)
    terms = {"power_W": power, "price_per_gpu_hour": price, "pue": pue}
    result = predict_job(job_from_options(job, gpus, change, terms, gpu=gpu, on=on), convention=flops or DEFAULT)
    if trace is not None:
        write_timeline(result, trace)
    data = lengths is not None or skew is not None
    load = _load(result, lengths, packed, skew, seed) if data else None
    spread = _draw_distribution(result, noise, draws, seed, load, (workers, ray)) if draws or noise or data else None
    with status("drawing steps"):
        answer = job_answer(replace(result, noise=noise, spread=spread), many, report is not None)
    verb = ["plan"] if tokens is None else ["run", "--tokens", tokens]
    then = [*verb[:1], *same_job(job, gpus, change, gpu, on), *verb[1:]]
    show_answer(answer, json, report, {"timeline": trace}, then=then)


def _load(result: JobResult, lengths: Path | None, packed: bool, skew: float | None, seed: int) -> Distribution:
    from presage.prediction.draws.data_dependence import microbatch_load, read_lengths

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
