"""`presage study`: a job on hardware that does not exist yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.job_source import transformer_job
from presage.cli.options import (
    Change,
    Gpus,
    HelpCommand,
    JobFile,
    Json,
    NoiseFile,
    Plot,
    RayAddress,
    Seed,
    Workers,
    option,
    with_common_options,
)
from presage.cli.output import show_answer, status

if TYPE_CHECKING:
    from presage.studies import Study

app = typer.Typer(
    help="Explore hardware that does not exist yet, and what noise, slow nodes and hot racks do.",
    no_args_is_help=True,
)
Draws = Annotated[int, option("--draws", "N", "Steps to draw per point.", min=100, max=1_000_000)]
StudyCall = Callable[..., Any]  # the study of a job and a setup, and of a pool where the command has --workers
POOL: dict[str, tuple[Any, Any]] = {"workers": (Workers, 1), "ray": (RayAddress, None)}
COMMON: dict[str, tuple[Any, Any]] = {
    "change": (Change, []), "noise": (NoiseFile, None), "draws": (Draws, 20_000), "seed": (Seed, 0),
}  # fmt: skip
OUTPUT: dict[str, tuple[Any, Any]] = {"plot": (Plot, None), "json": (Json, None)}


def _command(name: str, pooled: bool = False) -> Callable[[Callable[..., StudyCall]], Callable[..., None]]:
    """A command of the options that a function has, and of those that all studies have."""

    def add(study: Callable[..., StudyCall]) -> Callable[..., None]:
        own = inspect.signature(study, eval_str=True).parameters
        every = {"job": (JobFile, inspect.Parameter.empty), **{n: (p.annotation, p.default) for n, p in own.items()}}
        every |= ({} if "gpus" in own else {"gpus": (Gpus, None)}) | COMMON | (POOL if pooled else {}) | OUTPUT

        @wraps(study)
        def run(**values: Any) -> None:
            from presage.pool import open_pool
            from presage.studies import StudySetup

            asked = study(**{n: values[n] for n in own})
            setup = StudySetup(values["noise"], values["seed"], values["draws"])
            with (
                status("searching plans" if values.get("search") else "drawing steps"),
                open_pool(**{n: values[n] for n in POOL} if pooled else {}) as pool,
            ):
                job = transformer_job(values["job"], None if "gpus" in own else values["gpus"], values["change"])
                result = asked(job, setup, pool) if pooled else asked(job, setup)
            _show(result, values["plot"], values["json"])

        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=k)
                for n, (k, d) in every.items()
            ]
        )
        app.command(name, cls=HelpCommand)(with_common_options(run))
        return run

    return add


@_command("scale", pooled=True)
def scale(
    gpus: Annotated[str, option("--gpus", "N,N...", "GPU counts to study.")] = "8192,16384,32768,65536,131072,262144",
    strong: Annotated[
        bool, option("--strong", "", "Strong scaling: keep the global batch instead of growing it with the GPUs.")
    ] = False,
) -> StudyCall:
    """Step time, its tail and goodput from 8K to 256K GPUs.

    presage study scale examples/jobs/llama3.1-405b.toml --plot scale.svg
    """
    from presage.studies import scale_study

    numbers = [int(n) for n in _numbers(gpus, "--gpus", "8192,65536", whole=True)]
    return lambda job, setup, pool: scale_study(job, numbers, setup, strong, pool)


@_command("compute", pooled=True)
def compute(
    times: Annotated[str, option("--times", "X,X...", "Compute speed relative to today.")] = "1,2,4",
    memory: Annotated[bool, option("--memory", "", "Scale the memory bandwidth as well.")] = False,
) -> StudyCall:
    """Step time and its bound with GPUs that compute two and four times as fast on the same network.

    presage study compute examples/jobs/deepseek-v3.toml --memory --plot compute.svg
    """
    from presage.studies import compute_study

    some = _numbers(times, "--times", "1,2,4")
    return lambda job, setup, pool: compute_study(job, some, setup, memory, pool)


@_command("domain")
def domain(
    domains: Annotated[str, option("--domains", "N,N...", "GPUs per NVLink domain.")] = "8,72",
    search: Annotated[bool, option("--search", "", "Also search the best plan for each.")] = False,
    workers: Workers = 1,
    ray: RayAddress = None,
) -> StudyCall:
    """Gain of larger NVLink domains (8 or 72 GPUs), with the same plan and with the best.

    presage study domain examples/jobs/deepseek-v3.toml --search --workers 2 --plot domain.svg
    """
    from presage.studies import domain_study

    sizes = [int(n) for n in _numbers(domains, "--domains", "8,72", whole=True)]
    return lambda job, setup: domain_study(job, sizes, setup, search, workers, ray)


@_command("power")
def power(
    caps: Annotated[str, option("--caps", "X,X...", "Power caps, as shares of the TDP.")] = "1,0.85,0.7",
    spread: Annotated[
        float, option("--spread", "X", "Factor on the GPU-to-GPU spread and the share of slow GPUs.", min=0.01, max=100)
    ] = 2.0,
    placing: Annotated[
        bool, option("--placing/--no-placing", "", "Also search placements, which is slow (--no-placing: skip).")
    ] = True,
) -> StudyCall:
    """Cost of capping the power of GPUs, which makes them slower and further apart.

    presage study power examples/jobs/llama3.1-405b.toml --plot power.svg
    """
    from presage.studies import power_study

    some = _numbers(caps, "--caps", "1,0.85,0.7")
    return lambda job, setup: power_study(job, some, setup, spread, placing)


@_command("noise")
def noise_command(
    degree: Annotated[int, option("--degree", "N", "Ranks of each kind of parallelism.", min=2, max=1024)] = 8,
) -> StudyCall:
    """Which parallelism minds noise most: DP, TP, PP, CP and EP on the same GPUs, under the same noise.

    presage study noise examples/jobs/own_model.toml --plot noise.svg
    """
    from presage.studies import noise_study

    return lambda job, setup: noise_study(job, degree, setup)


@_command("slow-node")
def slow_node(
    factors: Annotated[
        str, option("--factors", "X,X...", "Times as long as usual that the node's GPUs take.")
    ] = "1.02,1.05,1.1,1.2,1.35",
) -> StudyCall:
    """Cost of one slow node, in the pipeline stage where it hurts most and where it hurts least.

    presage study slow-node examples/jobs/llama3.1-405b.toml --plot slow.svg
    """
    from presage.studies import slow_node_study

    some = _numbers(factors, "--factors", "1.05,1.2")
    return lambda job, setup: slow_node_study(job, some, setup)


@_command("hot-rack")
def hot_rack(
    factor: Annotated[
        float, option("--factor", "X", "Times as long as usual that its GPUs take.", min=1, max=100)
    ] = 1.1,
    rack: Annotated[int, option("--rack", "N", "GPUs of the rack.", min=1, max=1_000_000)] = 32,
    uplink: Annotated[
        float, option("--uplink", "X", "Times as long as usual that transfers over its uplink take.", min=1, max=100)
    ] = 1.0,
) -> StudyCall:
    """Cost of a hot rack by how the job lies on it, and of a slow uplink, which all that wait for it share.

    presage study hot-rack examples/jobs/llama3.1-405b.toml --factor 1.1 --rack 64 --uplink 2 --plot rack.svg
    """
    from presage.studies import hot_rack_study

    return lambda job, setup: hot_rack_study(job, factor, rack, uplink, setup)


def _numbers(text: str, option: str, write: str, whole: bool = False) -> list[float]:
    from presage.errors import PresageError

    try:
        numbers = [float(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < x < 1e9 and (not whole or x == int(x)) for x in numbers):
        raise PresageError(f"{option} {text}: should be numbers such as {write}")
    return sorted(set(numbers))


def _show(result: Study, plot: Path | None, json: str | None) -> None:
    from presage.report.study_answer import plot_study, study_answer

    plot = plot if result.points else None
    if plot is not None:
        plot_study(result, plot)
    show_answer(study_answer(result), json, files={"plot": plot})
    if not result.points:
        raise typer.Exit(1)
