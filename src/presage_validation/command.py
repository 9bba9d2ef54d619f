"""`presage accuracy`: re-prove a claim on a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from presage.cli import complete
from presage.cli.options import Json, RayAddress, Workers
from presage.cli.output import bar, console, emit, print_brief

if TYPE_CHECKING:
    from presage.pool import Pool
    from presage_validation.score import Skipped

KINDS = {
    "traces": "folders or files of traces: replay against the measured steps",
    "capture": "WORKLOADS.py TRACES_DIR: captured ops against the ops of a GPU run's traces",
    "workloads": "WORKLOADS.py MEASURED.json [TRACES_DIR]: predictions of whole training steps",
    "whatif": "PAIRS.py MEASURED...: what changes of training steps are worth, predicted against measured",
    "kernels": "a calibration pack's folder (held-out shapes), or tables of measured kernel times",
    "labels": "LABELS.json: predictions of whole float32 models on GPUs that were never calibrated",
    "collectives": "TABLE.csv: collective times as nccl-tests measures them",
    "embeddings": "GROUPS.json: times of table-batched embedding lookups, forward and backward",
    "sharding": "PLACEMENTS.json: which of several measured placements of tables is predicted to be fastest",
    "ranks": "WORKLOADS.py RUNS.csv: predictions of published training runs on several GPUs",
    "runs": "RUNS.csv: predictions of published training runs from their configurations, 1 to 10,000s of GPUs",
    "dlrm": "RUNS.csv: predictions of MLPerf's recommendation runs",
    "stragglers": "TABLE.csv...: spread of step times from per-operation tables, every second step left out",
    "steps": "LOGS...: step times of a left-out run, predicted from its sister runs",
    "temporal": "SERIES.json.gz: second halves of long kernel series, predicted from their first halves",
    "fleet": "GPUS.csv...: the slow end of fleets of GPUs, predicted from 50 of them",
}
WHOLE = ("collectives", "embeddings", "sharding", "dlrm")  # are not spread over processes
USER_CODE = ("capture", "workloads", "whatif", "ranks")  # import what a user wrote, and torch
Tell = Callable[[str], None]


Kind = Annotated[
    str,
    typer.Argument(metavar="KIND", help="What to check (see above).", autocompletion=complete.one_of(KINDS)),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="ROWS.csv", help="Write every prediction with its measurement.")
]


def command(
    kind: Kind,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="The data: files or folders.")],
    out: Out = None,
    workers: Workers = 1,
    ray: RayAddress = None,
    json: Json = None,
) -> None:
    """Check presage's accuracy on a data set: n, MAPE, geometric mean, median, p90, max and bias of the errors.

    Kinds and the data they take:
      traces       PATH...: replay against measured steps
      capture      WORKLOADS.py TRACES_DIR: captured ops against traced ops
      workloads    WORKLOADS.py MEASURED.json [TRACES_DIR]: steps from code
      whatif       PAIRS.py MEASURED...: steps with and without an edit
      kernels      PATH...: kernels of a pack (held-out shapes) or of tables
      labels       LABELS.json: float32 models on GPUs never calibrated
      collectives  TABLE.csv: collectives, with sizes and GPUs left out
      embeddings   GROUPS.json: groups of embedding tables
      sharding     PLACEMENTS.json: which measured placement is fastest
      ranks        WORKLOADS.py RUNS.csv: published multi-GPU runs, from code
      runs         RUNS.csv: published training runs, from their configs
      dlrm         RUNS.csv: MLPerf recommendation runs
      stragglers   TABLE.csv...: step times from tables of operations
      steps        LOGS...: step times of a run from those of its sister runs
      temporal     SERIES.json.gz: second half of a kernel series from the first
      fleet        GPUS.csv...: slow tail of a fleet from 50 of its GPUs

    What is fitted and what is left out for each kind: docs/accuracy_overview.md.

    presage accuracy traces ../shared/traces ../shared/h200/traces --out rows.csv
    """
    from presage.pool import open_pool

    _check(kind, workers > 1 or ray is not None)
    with _telling() as tell, open_pool(workers, ray, fresh=kind in USER_CODE) as pool:
        _RUN[kind](paths, out, json, tell, pool)


def _check(kind: str, spread: bool) -> None:
    """Raises for a kind that is not there, or that cannot be spread over processes."""
    from presage.errors import PresageError, near

    if kind not in KINDS:
        raise PresageError(f"unknown accuracy kind {kind!r}: choose from {', '.join(KINDS)}{near(kind, KINDS)}")
    if kind in WHOLE and spread:
        raise PresageError(f"accuracy {kind} cannot be spread over processes: omit --workers and --ray")


@contextmanager
def _telling() -> Iterator[Tell]:
    """What is being worked on, and where it is known how much is left."""
    with bar("reading") as shown:
        yield lambda name: shown(getattr(name, "done", 0), getattr(name, "total", None), name)


def _traces(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.traces import score_traces

    _finish(score_traces(paths, tell, pool=pool), out, json)


def _workloads(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.workloads import score_workloads

    traces = paths[2] if len(paths) == 3 else None
    _finish(score_workloads(*_pair(paths[:2], "workloads"), tell, traces, pool=pool), out, json)


def _kernels(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.kernels import score_kernels

    if len(paths) == 1 and paths[0].name == "labels.json":
        _labels(paths, out, json, tell, pool)
        return
    result = score_kernels(paths, tell, pool=pool)
    _finish(result, out, json)
    if json != "-":
        console().print(*result.notes, sep="\n")


def _whatif(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.tables import group_table, pair_table
    from presage_validation.whatif import score_whatif

    result = score_whatif(paths, tell, pool=pool)
    _check_scored(result.pairs, result.skipped)
    _show(result, out, json, pair_table(result), "", group_table(result))


def _labels(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.labels import PEER, score_labels

    result = score_labels(_one(paths, "labels"), tell, pool=pool)
    _check_scored(result.rows, result.skipped)
    _finish(result, out, json)
    if json != "-":
        console().print("NeuSight's own: " + ", ".join(f"{name} {value:.1%}" for name, value in PEER.items()))


def _collectives(paths: list[Path], out: Path | None, json: str | None, tell: Tell, _: Pool) -> None:
    from presage_validation.collectives import score_collectives

    _finish(score_collectives(_one(paths, "collectives"), tell), out, json)


def _embeddings(paths: list[Path], out: Path | None, json: str | None, tell: Tell, _: Pool) -> None:
    from presage_validation.embeddings import score_embeddings

    result = score_embeddings(_one(paths, "embeddings"), tell)
    _finish(result, out, json)
    if json != "-":
        console().print(*result.notes, sep="\n")


def _sharding(paths: list[Path], out: Path | None, json: str | None, tell: Tell, _: Pool) -> None:
    from presage_validation.sharding import score_sharding
    from presage_validation.tables import sharding_table

    result = score_sharding(_one(paths, "sharding"), tell)
    if out is not None:
        rows = [(t, p, str(r), n, f"{a:.9g}", f"{b:.9g}", f"{a / b - 1:.6g}") for t, p, r, n, a, b in result.ranks]
        _save(out, [("task", "placement", "rank", "phase", "predicted", "measured", "error"), *rows])
    if emit(json, result.to_json()):
        console().print(sharding_table(result))
        _print_skipped(result.skipped)


def _ranks(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage.pool import SERIAL
    from presage_validation.ranks import score_ranks

    two = None if pool == SERIAL else pool  # processes, where nothing else is asked for
    _finish(score_ranks(*_pair(paths, "ranks"), tell, pool=two), out, json)


def _runs(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.runs import score_runs

    _finish(score_runs(_one(paths, "runs"), tell, pool=pool), out, json)


def _dlrm(paths: list[Path], out: Path | None, json: str | None, tell: Tell, _: Pool) -> None:
    from presage_validation.dlrm import score_dlrm

    _finish(score_dlrm(_one(paths, "dlrm"), tell), out, json)


def _capture(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.capture import score_capture
    from presage_validation.tables import capture_table

    result = score_capture(*_pair(paths, "capture"), tell, pool=pool)
    if out is not None:
        rows = [("case", "phase", "side", "op", "kernel_seconds")]
        for case in result.cases:
            rows += [(case.case, p, "trace", str(op), f"{op.seconds:.9g}") for p, op in case.only_in_trace]
            rows += [(case.case, p, "capture", str(op), "") for p, op in case.only_in_capture]
        _save(out, rows)
    if emit(json, result.to_json()):
        _brief(result.to_json())
        console().print(capture_table(result.cases))
        _print_skipped(result.skipped)


def _stragglers(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.stragglers import score_stragglers
    from presage_validation.tables import effect_table, straggler_table

    result = score_stragglers(paths, tell, pool=pool)
    _check_scored(result.jobs, result.skipped)
    _show(result, out, json, straggler_table(result), "", effect_table(result))


def _steps(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.steps import score_steps
    from presage_validation.tables import step_tables, zero_table

    result = score_steps(paths, tell, pool=pool)
    tables = [x for table in step_tables(result) for x in (table, "")]
    rates = [f"{name}: {100 * value:.1f}%" for name, value in result.zero.metrics().items()]
    _show(result, out, json, *tables, zero_table(result.zero), *rates)


def _temporal(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.tables import temporal_table
    from presage_validation.temporal import score_temporal

    result = score_temporal(_one(paths, "temporal"), tell, pool=pool)
    _check_scored(result.rows, result.skipped)
    _show(result, out, json, temporal_table(result))


def _fleet(paths: list[Path], out: Path | None, json: str | None, tell: Tell, pool: Pool) -> None:
    from presage_validation.fleet import score_fleets
    from presage_validation.tables import fleet_table

    result = score_fleets(paths, tell, pool=pool)
    _show(result, out, json, fleet_table(result))


_RUN: dict[str, Callable[[list[Path], Path | None, str | None, Tell, Pool], None]] = {
    "traces": _traces,
    "capture": _capture,
    "workloads": _workloads,
    "whatif": _whatif,
    "kernels": _kernels,
    "labels": _labels,
    "collectives": _collectives,
    "embeddings": _embeddings,
    "sharding": _sharding,
    "ranks": _ranks,
    "runs": _runs,
    "dlrm": _dlrm,
    "stragglers": _stragglers,
    "steps": _steps,
    "temporal": _temporal,
    "fleet": _fleet,
}


def _one(paths: list[Path], kind: str) -> Path:
    from presage.errors import PresageError

    if len(paths) != 1:
        raise PresageError(f"accuracy {kind} takes one path: {KINDS[kind].split(':')[0]}")
    return paths[0]


def _pair(paths: list[Path], kind: str) -> tuple[Path, Path]:
    from presage.errors import PresageError

    if len(paths) != 2:
        raise PresageError(f"accuracy {kind} takes two paths: {KINDS[kind].split(':')[0]}")
    return paths[0], paths[1]


def _check_scored(scored: Sequence[Any], skipped: Sequence[Skipped]) -> None:
    """A mistake, where all that was given had to be left out."""
    from presage.errors import PresageError

    if not scored:
        row, why = (skipped[0].row, skipped[0].reason) if skipped else ("", "it is empty")
        why = why if row in why else f"{row}: {why}"
        raise PresageError(f"nothing could be scored: {why}")


def _finish(result: Any, out: Path | None, json: str | None) -> None:
    from presage_validation.score import csv_lines
    from presage_validation.tables import accuracy_table

    if out is not None:
        _save(out, list(csv_lines(result.rows)))
    if emit(json, result.to_json()):
        _brief(result.to_json())
        console().print(accuracy_table(result))
        for name, value in result.rates.items():
            console().print(f"{name}: {100 * value:.0f}%")
        _print_skipped(result.skipped)


def _show(result: Any, out: Path | None, json: str | None, *shown: Any) -> None:
    """Results that are no rows of errors: their lines in a file, then JSON, or tables and what was left out."""
    if out is not None:
        _save(out, result.lines())
    if emit(json, result.to_json()):
        _brief(result.to_json())
        for part in shown:
            console().print(part)
        _print_skipped(result.skipped)


def _brief(value: dict[str, Any]) -> None:
    """Under --quiet: a line for each metric."""
    for name, told in value.get("metrics", {}).items():
        numbers = told if isinstance(told, dict) else {"": told}
        some = (f"{k} {v:.4g}".strip() for k, v in numbers.items() if isinstance(v, int | float))
        print_brief(f"{name}: {', '.join(some)}")


def _save(path: Path, lines: Sequence[Sequence[str]]) -> None:
    import csv
    import io

    from presage.files import write_whole

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_whole(path, text.getvalue().encode())


def _print_skipped(skipped: Sequence[Skipped]) -> None:
    """Rows left out, those with one reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for s in skipped:
        by_reason.setdefault(s.reason, []).append(s.row)
    for reason, found in by_reason.items():
        some = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        console().print(f"skipped {len(found)}: {reason}: {some}", style="yellow")
