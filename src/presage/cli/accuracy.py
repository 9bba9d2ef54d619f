"""`presage accuracy`: re-prove a claim on a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from presage.cli.common import Json, console, emit, status

KINDS = ("traces",)


def command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What to re-prove: " + ", ".join(KINDS) + ".")],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="The data: files or folders.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="ROWS.csv", help="Every prediction beside its measurement.")
    ] = None,
    json: Json = None,
) -> None:
    """Re-prove a claim on a data set of ours or of yours: n, MAPE, geomean, median, p90, max and bias.

    traces: replay of Kineto runs (a folder whose files are all ranks of one run is one run), of pipeline schedule
    folders, and of per-operation tables.

    presage accuracy traces ../shared/traces ../shared/h200/traces --out rows.csv
    """
    from presage.errors import PresageError

    if kind not in KINDS:
        raise PresageError(f"no accuracy kind {kind!r}: there is {', '.join(KINDS)}")
    from presage.accuracy.traces import score_traces

    with status("replaying"):
        result = score_traces(paths)
    if out is not None:
        _save(out, result.rows)
    if emit(json, result.to_json()):
        _print(result)


def _save(path: Path, rows: object) -> None:
    import csv
    import io

    from presage.accuracy.score import csv_lines
    from presage.files import write_whole

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(csv_lines(rows))  # type: ignore[arg-type]
    write_whole(path, text.getvalue().encode())


def _print(result: object) -> None:
    from presage.accuracy.score import Result
    from presage.report.tables import accuracy_table

    assert isinstance(result, Result)
    shown = console()
    shown.print(accuracy_table(result))
    by_reason: dict[str, list[str]] = {}
    for s in result.skipped:
        by_reason.setdefault(s.reason, []).append(s.row)
    for reason, found in by_reason.items():
        some = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        shown.print(f"skipped {len(found)}: {reason}: {some}", style="yellow")
