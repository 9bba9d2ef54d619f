"""`presage job --from`: the job file that describes a training script, and how far its prediction agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli.graph import captured, step_name
from presage.cli.options import option, out_option
from presage.cli.output import console, show_answer, status
from presage.errors import PresageError

if TYPE_CHECKING:
    from presage.cli.graph import StepName
    from presage.graph.graph import Graph
    from presage.hardware import Platform
    from presage.prediction.from_code.describe import CodeJob
    from presage.prediction.step import StepResult

CODE = "From code"
DRAWS, STEPS = 200, 8
JobWords = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB.toml|MODEL",
        show_default=False,
        help="A job file (see docs/jobs.md), or a model such as llama3-8b. With --from: the script's own arguments, "
        "after --.",
    ),
]
FromCode = Annotated[
    str | None,
    option(
        "--from",
        "TRAIN.py|FILE.py:FUNCTION",
        "Describe this transformer's training code, named as for `presage predict`.",
        panel=CODE,
    ),
]
FromRanks = Annotated[
    int, option("--ranks", "N", "Run the code as torchrun starts it with so many ranks.", panel=CODE, min=1)
]
JobOut = Annotated[
    Path | None,
    out_option("--out", "JOB.toml", "Write the job file here (default: print it).", panel=CODE),
]


def from_code(
    named: tuple[str | None, Sequence[str], Sequence[str], str | None, str, int | None, float],
    ranks: int,
    gpu: str | None,
    on: str | None,
    change: Sequence[str],
    out: Path | None,
    json: str | None,
    report: Path | None,
    away: Mapping[str, object],
) -> None:
    """Describe code as a job file, write that, and answer with both predictions."""
    from presage.configs.schema import merge_sections, parse_overrides
    from presage.prediction.from_code.agreement import compare_with_code
    from presage.prediction.from_code.code_work import with_code_work
    from presage.prediction.from_code.describe import describe
    from presage.report.code_job_answer import code_job_answer

    if given := [name for name, value in away.items() if value]:
        hint = "--ranks N" if given[0] == "--gpus" else f"presage job JOB.toml {given[0]} ... once it is written"
        raise PresageError(f"{given[0]} goes with a job file, not with --from: {hint}")
    step, place = step_name(*named), _platform(gpu, on)
    graphs = _graphs(step, place, ranks)
    described = describe(graphs, ranks, place, _job_name(step))
    with status(f"predicting {step.name}"):
        code = _predicted(graphs, place, ranks)
        described = with_code_work(described, code, described.parse(step.name).job)
        changes = parse_overrides(list(change), described.table)
        described = replace(described, table=merge_sections(described.table, changes))
        result = compare_with_code(code, described, described.parse(step.name))
    text = job_text(step, described)
    if out is not None:
        from presage.files import write_whole

        write_whole(out, text.encode())
    show_answer(code_job_answer(result), json, report, {"job file": out}, then=["plan", out] if out else [])
    if out is None and json != "-":
        console().print(f"\n{text}", soft_wrap=True, markup=False, end="")


def _job_name(step: StepName) -> str:
    return Path(step.name.partition(":")[0]).stem or "job"


def _platform(gpu: str | None, on: str | None) -> Platform:
    from presage.cli.ranks import parse_rank_options
    from presage.hardware import platform

    many = parse_rank_options(gpu, on, 2, None, 1, [], [])  # the platform of several ranks of this GPU
    assert many is not None
    return platform(many.platform)


def _graphs(step: StepName, place: Platform, ranks: int) -> list[Graph]:
    from presage.capture.variants import Variant
    from presage.prediction.api import rank_graphs

    if ranks == 1:
        return [captured(step, place.gpu.key)]
    seen = Variant(per_node=place.domain, ranks=ranks)
    graphs = rank_graphs(lambda r: captured(step, place.gpu.key, replace(seen, rank=r)), ranks)
    if not graphs[0].groups:
        raise PresageError(
            f"{step.name} does not communicate: leave out --ranks; the file that it gives takes `presage job JOB.toml "
            f"--gpus {ranks}`"
        )
    return graphs


def _predicted(graphs: list[Graph], place: Platform, ranks: int) -> StepResult:
    from presage.prediction.api import predict, predict_ranks

    if ranks == 1:
        return predict(graphs[0], gpu=place.gpu.key, draws=DRAWS, steps=STEPS)
    return predict_ranks(graphs, ranks, platform=place, draws=DRAWS, steps=STEPS)


def job_text(step: StepName, described: CodeJob) -> str:
    """The job file: where it is from and what it assumes as comments, then its sections."""
    from presage.search.job_toml import table_toml

    words = " ".join(map(str, step.words()))
    lines = [f"Read from `{words}` by `presage job --from`."]
    lines += [f"Assumed: {what}." for what in described.assumed]
    lines += [f"Not described: {what}." for what in described.unsaid]
    return "".join(f"# {line}\n" for line in lines) + "\n" + table_toml(_plain(described.table))


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Sections without keys that were taken away."""
    return {k: _plain(v) if isinstance(v, Mapping) else v for k, v in table.items() if v is not None}
