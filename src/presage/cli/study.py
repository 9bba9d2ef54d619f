"""`presage study`: a job on machines that are not built yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli.job import transformer_job
from presage.cli.options import (
    Change,
    Gpus,
    JobFile,
    Json,
    NoiseFile,
    Plot,
    RayAddress,
    Seed,
    Workers,
    with_common_options,
)
from presage.cli.output import console, emit, status

if TYPE_CHECKING:
    from presage.studies import Setup, Study

__all__ = ["app"]

app = typer.Typer(
    help="A job on machines that are not built yet: more GPUs, faster ones, larger NVLink domains, less power.",
    no_args_is_help=True,
)
Draws = Annotated[
    int, typer.Option("--draws", metavar="N", min=100, max=1_000_000, help="Steps that are drawn at each point.")
]


@app.command("scale")
@with_common_options
def scale(
    job: JobFile,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="N,N...", help="Numbers of GPUs.")
    ] = "8192,16384,32768,65536,131072,262144",
    strong: Annotated[
        bool, typer.Option("--strong", help="The batch stays, instead of growing with the GPUs.")
    ] = False,
    change: Change = [],  # noqa: B006
    noise: NoiseFile = None,
    draws: Draws = 20_000,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """What becomes of a step, its tail and the useful throughput from 8K to 256K GPUs?

    presage study scale examples/jobs/llama3.1-405b.toml --plot scale.svg
    """
    from presage.pool import opened
    from presage.studies import scale_study

    numbers = [int(n) for n in _numbers(gpus, "--gpus", "8192,65536", whole=True)]
    with status("drawing steps"), opened(workers, ray) as pool:
        found = scale_study(transformer_job(job, None, change), numbers, _setup(noise, draws, seed), strong, pool)
    _tell(found, plot, json)


@app.command("compute")
@with_common_options
def compute(
    job: JobFile,
    times: Annotated[str, typer.Option("--times", metavar="X,X...", help="As fast as the tensor cores are.")] = "1,2,4",
    memory: Annotated[bool, typer.Option("--memory", help="Memory's bandwidth grows as well.")] = False,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    noise: NoiseFile = None,
    draws: Draws = 20_000,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """GPUs that compute two and four times as fast on the same network: what bounds the step then?

    presage study compute examples/jobs/deepseek-v3.toml --memory --plot compute.svg
    """
    from presage.pool import opened
    from presage.studies import compute_study

    some = _numbers(times, "--times", "1,2,4")
    with status("drawing steps"), opened(workers, ray) as pool:
        found = compute_study(transformer_job(job, gpus, change), some, _setup(noise, draws, seed), memory, pool)
    _tell(found, plot, json)


@app.command("domain")
@with_common_options
def domain(
    job: JobFile,
    domains: Annotated[str, typer.Option("--domains", metavar="N,N...", help="GPUs that share NVLink.")] = "8,72",
    search: Annotated[bool, typer.Option("--search", help="The best plan of each beside the job's own.")] = False,
    workers: Workers = 1,
    ray: RayAddress = None,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    noise: NoiseFile = None,
    draws: Draws = 20_000,
    seed: Seed = 0,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """The same GPUs in NVLink domains of 8 or 72: what is that worth, with the same plan and with the best?

    presage study domain examples/jobs/deepseek-v3.toml --search --workers 2 --plot domain.svg
    """
    from presage.studies import domain_study

    sizes = [int(n) for n in _numbers(domains, "--domains", "8,72", whole=True)]
    with status("searching plans" if search else "drawing steps"):
        found = domain_study(
            transformer_job(job, gpus, change), sizes, _setup(noise, draws, seed), search, workers, ray
        )
    _tell(found, plot, json)


@app.command("power")
@with_common_options
def power(
    job: JobFile,
    caps: Annotated[
        str, typer.Option("--caps", metavar="X,X...", help="Shares of the power limit that GPUs get.")
    ] = "1,0.85,0.7",
    spread: Annotated[
        float,
        typer.Option(
            "--spread", metavar="X", min=0.01, max=100, help="Times as much spread between GPUs, and slow ones."
        ),
    ] = 2.0,
    placing: Annotated[bool, typer.Option("--placing/--no-placing", help="What placing could gain (slow).")] = True,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    noise: NoiseFile = None,
    draws: Draws = 20_000,
    seed: Seed = 0,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """GPUs that are given less power: slower on average, and further apart. What does each cost?

    presage study power examples/jobs/llama3.1-405b.toml --plot power.svg
    """
    from presage.studies import power_study

    some = _numbers(caps, "--caps", "1,0.85,0.7")
    with status("drawing steps"):
        found = power_study(transformer_job(job, gpus, change), some, _setup(noise, draws, seed), spread, placing)
    _tell(found, plot, json)


def _setup(noise: str | None, draws: int, seed: int) -> Setup:
    from presage.studies import Setup

    return Setup(noise, seed, draws)


def _numbers(text: str, option: str, write: str, whole: bool = False) -> list[float]:
    from presage.errors import PresageError

    try:
        found = [float(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < x < 1e9 and (not whole or x == int(x)) for x in found):
        raise PresageError(f"{option} {text}: write numbers as {write}")
    return sorted(set(found))


def _tell(found: Study, plot: Path | None, json: str | None) -> None:
    from rich.markup import escape

    from presage.cli.output import print_result
    from presage.report import study_tables as tables

    if plot is not None and found.points:
        tables.plot(found, plot)
    if emit(json, found.to_json()):
        print_result(tables.headline(found), [tables.study_table(found)], tables.remarks(found), None)
        if plot is not None and found.points:
            console().print(f"\nplot: {escape(str(plot))}", soft_wrap=True)
    if not found.points:
        raise typer.Exit(1)
