"""`presage sensitivity`: which kernel, collective, stage or noise source the step time depends on most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli.options import Change, Gpus, JobFile, Json, NoiseFile, Plot, RayAddress, Report, Seed, Workers
from presage.cli.output import check_report, command_line, console, emit, pool_progress, write_report

if TYPE_CHECKING:
    from presage.prediction.draws.sensitivity import Sensitivity
    from presage.report.html import Page

__all__ = ["command"]


def command(
    job: JobFile,
    noise: NoiseFile = None,
    gpus: Gpus = None,
    change: Change = [],  # noqa: B006
    draws: Annotated[
        int, typer.Option("--draws", metavar="N", min=100, max=1_000_000, help="Steps to draw per variant.")
    ] = 4000,
    seed: Seed = 0,
    workers: Workers = 1,
    ray: RayAddress = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="Rows of each table and bars of the plot.")
    ] = 12,
    plot: Plot = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Rank kernels, collectives, stages and noise sources by the change in p95 if each were steady, or 10% faster.

    presage sensitivity examples/jobs/llama3.1-405b.toml --plot sensitivity.svg

    presage sensitivity job.toml --noise noise.toml --draws 8000
    """
    from presage.cli.job import transformer_job
    from presage.pool import BESIDE, opened
    from presage.prediction.draws.distribution import belief_of
    from presage.prediction.draws.draw import without_fitted_stragglers
    from presage.prediction.draws.sensitivity import sensitivity
    from presage.prediction.draws.step_model import step_model
    from presage.report import sensitivity_tables as tables

    check_report(report)
    shape = step_model(transformer_job(job, gpus, change))
    belief, source = belief_of(shape.job, shape.seconds, noise)
    with pool_progress("drawing steps", opened(workers, ray, BESIDE)) as pool:
        found = sensitivity(without_fitted_stragglers(shape, belief.noise), belief.noise, seed, draws, pool)
    if plot is not None:
        tables.plot(found, plot, top)
    if emit(json, tables.value(found) | {"noise": source, "seed": seed}):
        _print(found, top, source, plot)
    write_report(report, lambda: _page(found, source), json != "-")


def _page(found: Sensitivity, source: str) -> Page:
    from presage.report.html.sensitivity_page import sensitivity_page

    return sensitivity_page(found, source, command_line())


def _print(found: Sensitivity, top: int, source: str, plot: Path | None) -> None:
    from rich.markup import escape

    from presage.cli.output import print_result
    from presage.report import sensitivity_tables as tables

    shown = [tables.class_table(found, top), tables.source_table(found, top)]
    if found.of("stage"):
        shown.append(tables.stage_table(found, top))
    print_result(tables.headline(found), shown, [*tables.remarks(found), f"noise: {source}"], None)
    if plot is not None:
        console().print(f"\nplot: {escape(str(plot))}", soft_wrap=True)
