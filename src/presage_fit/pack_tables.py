"""Rich tables of calibration packs. Knows no physics: it prints values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table

from presage.report.terminal import plain_table
from presage.text import percent, seconds, shorten, size
from presage_fit.pack import Pack, Row

__all__ = ["error_table", "family_table", "origin_table", "spreads"]


def origin_table(pack: Pack) -> Table:
    """Where a pack comes from."""
    h = pack.header
    table = plain_table("Pack", "", "", left=2)
    rows = {
        "folder": ", ".join(map(str, pack.folders)),
        "GPU": f"{h.gpu}, {h.sms} SMs, {size(h.memory_bytes)}, L2 {size(h.l2_bytes)}",
        "power limit": f"{h.power_limit_W:g} W" if h.power_limit_W else "not recorded",
        "software": f"torch {h.torch}, CUDA {h.cuda}, cuDNN {h.cudnn}, Python {h.python}",
        "driver": h.driver or "not recorded",
        "host": h.host,
        "date": h.date,
        "merged from": f"{len(h.parts)} packs" if h.parts else "",
        "small tables": ", ".join(sorted(pack.tables)) or "none",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, escape(value))
    return table


def family_table(pack: Pack) -> Table:
    """Each family's draws: how many, which failed, how far repeats lie apart."""
    columns = ("draws", "errors", "repeated", "ops", "shortest", "longest", "spread p50", "p90")
    table = plain_table("Sweeps", "family", *columns, fold=False)
    for name, rows in sorted(pack.families.items()):
        table.add_row(escape(name), *_cells(rows))
    table.add_row("total", *_cells([r for rows in pack.families.values() for r in rows]), style="bold")
    return table


def error_table(pack: Pack, most: int = 10) -> Table:
    """What the failed draws ended with, the most common first."""
    counts = Counter((name, r.error) for name, rows in pack.families.items() for r in rows if r.error is not None)
    table = plain_table("Draws that failed", "family", "error", "draws", left=2)
    for (name, error), n in counts.most_common(most):
        table.add_row(escape(name), escape(shorten(error or "", 100)), str(n))
    if len(counts) > most:
        table.add_row("", f"and {len(counts) - most} other errors", "")
    return table


def _cells(rows: Sequence[Row]) -> list[str]:
    times = [op.seconds for r in rows for op in r.ops]
    counts = (len(rows), sum(r.error is not None for r in rows), sum(r.repeat > 0 for r in rows), len(times))
    ends = (min(times), max(times)) if times else (float("nan"),) * 2
    return [*map(str, counts), *map(seconds, ends), *(percent(s) for s in spreads(rows))]


def spreads(rows: Sequence[Row]) -> tuple[float, float]:
    """Median and 90th percentile over the ops of (largest - smallest repeat) / median."""
    found = [op.spread / op.seconds for r in rows for op in r.ops if op.seconds > 0 and op.n > 1]
    if not found:
        return float("nan"), float("nan")
    return float(np.percentile(found, 50)), float(np.percentile(found, 90))
