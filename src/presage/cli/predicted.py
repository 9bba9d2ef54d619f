"""What commands do with a prediction: print it, and draw its timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from presage.cli.common import answer, console

if TYPE_CHECKING:
    from rich.table import Table

    from presage.engine import Timeline
    from presage.prediction.step import StepResult

__all__ = ["draw", "show", "tell"]


def draw(timeline: Timeline, found: StepResult, path: Path) -> None:
    """Write the timeline for Perfetto: a process for each kind of rank."""
    from presage.files import write_whole
    from presage.traces.perfetto import timeline_trace

    names = {0: f"predicted: {found.source}"}
    if found.many is not None:
        names = {k.rank: _named(k.rank, k.ranks) for k in found.many.kinds}
    write_whole(path, timeline_trace(timeline, names))


def _named(rank: int, ranks: int) -> str:
    return f"rank {rank}" + (f" (and {ranks - 1} like it)" if ranks > 1 else "")


def show(found: StepResult, trace: Path | None, more: Sequence[Table]) -> None:
    """Print a prediction: the step, the ranks where there are several, these tables, and what to know."""
    from presage.report import prediction_tables as tables
    from presage.report.rank_tables import rank_table, sent_table

    ranks = [rank_table(found.many), sent_table(found.many)] if found.many is not None else []
    tell(tables.headline(found), [tables.step_table(found), *ranks, *more], tables.remarks(found), trace)


def tell(headline: Any, tables: Iterable[Table], remarks: Iterable[str], trace: Path | None) -> None:
    """The answer, then its tables, then what to know, then where the timeline is."""
    from rich.markup import escape

    answer(headline)
    out = console()
    for table in tables:
        out.print()
        out.print(table)
    for remark in remarks:
        out.print(f"\n{escape(remark)}", soft_wrap=True)
    if trace is not None:
        out.print(f"\ntimeline: {escape(str(trace))} (open it at ui.perfetto.dev)", soft_wrap=True)
