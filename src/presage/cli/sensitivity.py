"""`presage sensitivity`: which kernel, collective, stage or noise source the step time depends on most."""

from __future__ import annotations

from typing import Annotated

from presage.cli.options import Change, Gpus, JobFile, Json, NoiseFile, Plot, RayAddress, Report, Seed, Workers, option
from presage.cli.output import pool_progress, show_answer


def command(
    job: JobFile,
    noise: NoiseFile = None,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    draws: Annotated[int, option("--draws", "N", "Steps to draw per variant.", min=100, max=1_000_000)] = 4000,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    top: Annotated[int, option("--top", "N", "Rows of each table and bars of the plot.", min=1)] = 12,
    plot: Plot = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Rank kernels, collectives, stages and noise sources by the change in p95 if each were steady, or 10% faster.

    presage sensitivity examples/jobs/llama3.1-405b.toml --plot sensitivity.svg

    presage sensitivity job.toml --noise noise.toml --draws 8000
    """
    from presage.cli.job_source import transformer_job
    from presage.pool import THREADS_2, open_pool
    from presage.prediction.draws.sensitivity import job_sensitivity
    from presage.report.sensitivity_answer import plot_sensitivity, sensitivity_answer

    parsed = transformer_job(job, gpus, change)
    with pool_progress("drawing steps", open_pool(workers, ray, THREADS_2)) as pool:
        result = job_sensitivity(parsed, noise, seed, draws, pool)
    if plot is not None:
        plot_sensitivity(result, plot, top)
    show_answer(sensitivity_answer(result, top), json, report, {"plot": plot})
