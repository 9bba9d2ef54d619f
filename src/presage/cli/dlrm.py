"""`presage dlrm`: a step of a recommendation job on its ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from presage.cli import complete
from presage.cli.options import Json, RunDraws, SearchSeconds, ShardingOut, TraceOut, option
from presage.cli.output import show_answer, write_timeline
from presage.cli.shard import search_bar

if TYPE_CHECKING:
    from presage.embeddings.dlrm_ranks import DlrmRanks
    from presage.prediction.step import StepResult

MS = 1e3


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file (see docs/sharding.md).")],
    ranks: Annotated[int | None, option("--ranks", "N", "Number of GPUs (overrides the file).", min=1)] = None,
    batch: Annotated[int | None, option("--batch", "B", "Global batch (overrides the file).", min=1)] = None,
    platform: Annotated[
        str | None, option("--platform", "NAME", "Platform (overrides the file).", complete=complete.platforms)
    ] = None,
    plan: Annotated[
        str | None,
        option("--plan", "PLAN", "Sharding plan: auto, a heuristic's name or a .json file (overrides the file)."),
    ] = None,
    seconds: SearchSeconds = 20.0,
    draws: RunDraws = 200,
    out: ShardingOut = None,
    trace: TraceOut = None,
    json: Json = None,
) -> None:
    """Predict a step of a recommendation (DLRM) job: sharded embedding tables, data-parallel dense layers.

    Every rank has its own lookups; indices, pooled rows and gradients are exchanged by all-to-all.

    presage dlrm examples/dlrm/criteo.toml

    presage dlrm job.toml --ranks 16 --plan size_lookup_greedy --trace out.json
    """
    from presage.embeddings.dlrm_job import read_job
    from presage.embeddings.dlrm_ranks import dlrm_ranks, predict_dlrm
    from presage.errors import InputError
    from presage.hardware.facts import load_toml
    from presage.report.shard_answer import dlrm_answer

    if "model" in load_toml(job):
        raise InputError(job, f"is not a recommendation job: use presage job {job}")
    given = {"ranks": ranks, "batch": batch, "platform": platform, "plan": plan}
    asked = replace(read_job(job), **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    with search_bar() as tell:
        team = dlrm_ranks(asked, seconds=seconds, tell=tell)
        result = predict_dlrm(team, draws=draws)
    _files(team, result, out, trace)
    show_answer(dlrm_answer(team, result), json, files={"timeline": trace})


def _files(team: DlrmRanks, result: StepResult, out: Path | None, trace: Path | None) -> None:
    if out is not None:
        from presage.embeddings.table_files import save_plan

        save_plan(team.plan, team.job.tables, out)
    if trace is not None:
        write_timeline(result, trace)
