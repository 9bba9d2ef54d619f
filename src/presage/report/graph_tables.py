"""Rich tables of what a graph holds. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from presage.graph.summary import SummaryRow, collapsed
from presage.report.plain import plain_table
from presage.text import amount, size

__all__ = ["amount", "family_table", "module_table", "phase_table", "size"]


def module_table(rows: Sequence[SummaryRow], total: SummaryRow) -> Table:
    """Modules with all that is in them; equal neighbours ('layer.0' to 'layer.11') share a row that holds their sum."""
    columns = ("ops", "kernels", "FLOPs fwd", "FLOPs bwd", "bytes moved", "parameters", "activations")
    table = plain_table("Modules", "module", *columns, fold=False)
    above: list[str] = []  # names of the rows this one is inside of
    for row in collapsed(rows):
        above = [*above[: row.depth], row.name]
        table.add_row("  " * row.depth + escape(_label(row, above)), *_cells(row))
    table.add_row("total", *_cells(total), style="bold")
    return table


def _label(row: SummaryRow, above: Sequence[str]) -> str:
    """The module's own name: its parent stands above it."""
    name = row.name.removeprefix(f"{above[row.depth - 1]}.") if row.depth else row.name
    return f"{name}  ({row.alike} alike)" if row.alike > 1 else name


def _cells(row: SummaryRow) -> list[str]:
    return [
        str(row.ops),
        str(row.kernels),
        amount(row.flops_forward),
        amount(row.flops_backward),
        size(row.moved),
        amount(row.parameters),
        size(row.saved_bytes),
    ]


def phase_table(rows: Sequence[SummaryRow], total: SummaryRow) -> Table:
    return _work_table("Phases", "phase", [*rows, total], total)


def family_table(rows: Sequence[SummaryRow], total: SummaryRow) -> Table:
    return _work_table("Families of ops (those that launch kernels)", "family", rows, total)


def _work_table(title: str, first: str, rows: Sequence[SummaryRow], total: SummaryRow) -> Table:
    table = plain_table(
        title, first, "ops", "kernels", "FLOPs", "share", "read", "written", "share", "FLOPs/byte", fold=False
    )
    for r in rows:
        intensity = f"{r.flops / r.moved:.4g}" if r.moved and r.flops else "-"
        shares = (_share(r.flops, total.flops), _share(r.moved, total.moved))
        cells = (amount(r.flops), shares[0], size(r.read), size(r.written), shares[1], intensity)
        table.add_row(r.name, str(r.ops), str(r.kernels), *cells, style="bold" if r is total else None)
    return table


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if part and whole else "-"
