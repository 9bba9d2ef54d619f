"""`presage shard`: which rank holds which embedding table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli import complete
from presage.cli.options import Json, Report, SearchSeconds, ShardingOut, option
from presage.cli.output import bar, show_answer

if TYPE_CHECKING:
    from presage.embeddings import Table
    from presage.embeddings.sharding_plan import ShardingProblem
    from presage.hardware import Platform

MS, GIB = 1e3, 1024.0**3
DEMO_BATCH = 4096  # a rank
OBJECTIVES = ("embeddings", "step")


def command(
    tables: Annotated[
        str,
        typer.Argument(
            metavar="TABLES.json|FILE.py:FUNCTION|JOB.toml",
            help="Tables, as written by `presage indices --json`, code that looks them up, a job, or 'demo'.",
        ),
    ],
    ranks: Annotated[int, option("--ranks", "N", "Number of GPUs to shard over.", min=1)],
    platform: Annotated[
        str,
        option(
            "--platform", "NAME", "Platform (see `presage platforms`), or a .toml file.", complete=complete.platforms
        ),
    ] = "dgx-h200",
    batch: Annotated[
        int | None, option("--batch", "B", "Global batch, in samples (default: that of the file).", min=1)
    ] = None,
    memory: Annotated[
        float | None, option("--memory", "GiB", "GPU memory for tables, GiB (default: 80% of the GPU's).", min=0.001)
    ] = None,
    optimizer: Annotated[
        str, option("--optimizer", "NAME", "Optimizer of the tables: rowwise_adagrad or sgd.")
    ] = "rowwise_adagrad",
    lengths: Annotated[str, option("--lengths", "NAME", "Distribution of bag lengths: fixed or poisson.")] = "fixed",
    objective: Annotated[
        str, option("--objective", "WHAT", "What is made short: embeddings, or step (of a JOB.toml).")
    ] = "embeddings",
    seconds: SearchSeconds = 20.0,
    seed: Annotated[int, option("--seed", "K", "Random seed.", min=0)] = 0,
    out: ShardingOut = None,
    report: Report = None,
    json: Json = None,
) -> None:
    """Shard embedding tables over GPUs: table-wise, column-wise, row-wise or data-parallel, whichever is fastest.

    The cost is the embedding part of a step: all-to-all of indices, lookups, all-to-all of pooled rows, gradients,
    updates; the slowest rank sets the length of each phase. The plans of the usual heuristics are listed too.

    presage shard tables.json --ranks 16 --platform dgx-h100 --batch 65536

    presage shard train.py:build --ranks 8

    presage shard job.toml --ranks 16 --objective step

    presage shard demo --ranks 4
    """
    if _whole_step(objective):
        _by_step(tables, ranks, batch, seconds, out, json)
        return
    problem = _problem(tables, ranks, platform, batch, memory, optimizer, lengths)
    from presage.embeddings.sharding_search import search
    from presage.embeddings.table_files import save_plan
    from presage.report.shard_answer import shard_answer

    with search_bar() as tell:
        result = search(problem, seconds=seconds, seed=seed, tell=tell)
    if out is not None:
        save_plan(result.plan, problem.tables, out)
    show_answer(shard_answer(problem, result), json, report, {"plan": out})


def _whole_step(objective: str) -> bool:
    if objective not in OBJECTIVES:
        raise typer.BadParameter(f"{objective!r}: choose from {', '.join(OBJECTIVES)}", param_hint="--objective")
    return objective == "step"


def _by_step(given: str, ranks: int, batch: int | None, seconds: float, out: Path | None, json: str | None) -> None:
    """Plans of a job by its whole step."""
    from dataclasses import replace

    from presage.embeddings.dlrm_job import read_job
    from presage.embeddings.step_plans import step_plans
    from presage.embeddings.table_files import save_plan
    from presage.errors import PresageError
    from presage.report.step_plans_answer import step_plans_answer

    if not given.endswith(".toml"):
        raise PresageError(f"--objective step needs the whole model: give a recommendation job (.toml), not {given}")
    read = read_job(given)
    job = replace(read, ranks=ranks, batch=batch or read.batch)
    with search_bar() as tell:
        plans = step_plans(job, seconds=seconds, tell=tell)
    if out is not None:
        save_plan(plans[0].plan, job.tables, out)
    show_answer(step_plans_answer(job, plans), json, files={"plan": out})


def _problem(
    given: str, ranks: int, name: str, batch: int | None, memory: float | None, optimizer: str, lengths: str
) -> ShardingProblem:
    from presage.embeddings.sharding_plan import ShardingProblem
    from presage.embeddings.table_files import read_tables
    from presage.errors import PresageError
    from presage.hardware import platform

    place = platform(name)
    path = Path(given)
    counted: int | None
    if given == "demo" and not path.exists():
        tables, counted = _demo(ranks, place)
    else:
        tables, counted = _of_code(given) if ".py:" in given else _of_job(given) or read_tables(path)
    if batch is None and counted is None:
        raise PresageError(f"{path} has no batch: give --batch")
    return ShardingProblem(tables, batch or counted or 0, ranks, place, (memory or 0.0) * GIB, optimizer, lengths)


def _of_job(given: str) -> tuple[tuple[Table, ...], int | None] | None:
    """The tables and the batch of a recommendation job; None where the file is none."""
    from presage.embeddings.dlrm_job import read_job

    if not given.endswith(".toml"):
        return None
    job = read_job(given)
    return job.tables, job.batch


def _of_code(source: str) -> tuple[tuple[Table, ...], int | None]:
    """The tables that code on one GPU looks rows up in, and its batch."""
    from presage.costs.lookups.captured import captured_tables
    from presage.prediction.api import step_graph

    return captured_tables(step_graph(source))


def _demo(ranks: int, place: Platform) -> tuple[tuple[Table, ...], int]:
    """A random sharding task."""
    import numpy as np

    from presage.costs.lookups.table import draw_task

    return draw_task(ranks, float(place.gpu.memory), np.random.default_rng(0)), DEMO_BATCH * ranks


@contextmanager
def search_bar() -> Iterator[Callable[[float, float], None]]:
    """A progress bar with the best step so far."""
    with bar("searching", 1.0) as shown:
        yield lambda done, best: shown(done, note=f"best {best * MS:.4g} ms")
