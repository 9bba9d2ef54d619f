"""Rich tables of a prediction. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from presage.prediction.breakdown import BreakdownPart, CostlyOps
from presage.prediction.rank_results import RankResults
from presage.prediction.step import StepResult
from presage.report.graph_tables import size
from presage.report.plain import plain_table
from presage.text import percent, seconds, shorten

__all__ = ["costly_table", "headline", "part_table", "remarks", "step_table"]

BOUND = {
    "gpu": "the GPU sets the pace",
    "host": "the GPU waits for the host",
    "communication": "the GPU waits for other GPUs",
}


def headline(p: StepResult) -> str:
    """What was asked, and the answer in one line."""
    given = ", ".join(f"{k}={v}" for k, v in p.arguments.items())
    where = p.gpu if p.many is None else f"{p.many.ranks} ranks ({p.many.strategy}) of {p.many.platform}"
    asked = f"[bold]{escape(p.source or 'graph')}[/bold]{escape(f' ({given})' if given else '')} on {escape(where)}"
    s = p.step
    return f"{asked}\n{seconds(s.p50)} a step, nine runs of ten between {seconds(s.p5)} and {seconds(s.p95)}"


def step_table(p: StepResult) -> Table:
    """The figures of the step."""
    table = plain_table("Step", "", "", "")
    table.show_header = False
    rows = [
        ("step time", seconds(p.step.p50), f"mean {seconds(p.step.mean)}"),
        ("GPU active", seconds(p.gpu_active), f"{percent(p.gpu_active / p.step.p50)} of the step"),
        ("host, by itself", seconds(p.host), f"{p.launches} launches"),
        ("bound", p.bound, BOUND[p.bound]),
        ("peak memory", size(p.peak_memory), f"of {size(p.memory)}"),
    ]
    if p.many is not None:
        rows[2:2] = _communication(p.many)
    for row in rows:
        table.add_row(*row)
    return table


def _communication(m: RankResults) -> list[tuple[str, str, str]]:
    return [
        ("communication", seconds(m.communication), "transfers, waits for other ranks not counted"),
        ("  exposed", seconds(m.exposed), "with no kernels beside"),
        ("wait for ranks", seconds(m.wait), "the longest of all ranks, with no kernels beside"),
    ]


def part_table(title: str, first: str, parts: Sequence[BreakdownPart], most: int = 20) -> Table:
    """Families or modules, largest first."""
    table = plain_table(title, first, "ops", "GPU", "share", "host", fold=False)
    for part in parts[:most]:
        cells = (str(part.ops), seconds(part.gpu), percent(part.share), seconds(part.host))
        table.add_row(escape(part.name), *cells)
    if len(parts) > most:
        table.add_row(f"and {len(parts) - most} more")
    return table


def costly_table(rows: Sequence[CostlyOps]) -> Table:
    """The ops that take the GPU longest, and how near its limits they run."""
    columns = ("phase", "calls", "GPU", "share", "of peak", "limit", "from")
    table = plain_table("Costliest ops", "op", *columns, fold=False)
    for r in rows:
        what = escape(shorten(f"{r.name.removeprefix('aten::')} {r.shapes}", 70))
        cells = (r.phase, str(r.calls), seconds(r.seconds), percent(r.share), percent(r.efficiency), r.limit, r.source)
        table.add_row(what, *cells)
    return table


def remarks(p: StepResult) -> list[str]:
    """What to know before trusting it."""
    out = []
    if p.peak_memory > p.memory:
        out.append(f"does not fit: {size(p.peak_memory)} are needed and the GPU has {size(p.memory)}")
    c = p.coverage
    if c.fallback_ops:
        rest = percent(1 - c.modelled_fraction)
        out.append(f"{rest} of the GPU time is of ops without a model (a roofline instead): {_some(c.fallback_ops)}")
    if c.unknown_host_ops:
        out.append(f"host time of ops never traced, from others of their kind: {_some(c.unknown_host_ops)}")
    return [*out, *(f"note: {note}" for note in p.notes)]


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
