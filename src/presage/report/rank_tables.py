"""Rich tables of a prediction for many ranks."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from presage.prediction.rank_results import RankClass, RankResults
from presage.report.graph_tables import size
from presage.report.plain import plain_table
from presage.text import percent, seconds

__all__ = ["rank_table", "sent_table"]


def rank_table(m: RankResults, most: int = 16) -> Table:
    """Ranks that do the same in one row."""
    columns = ("ranks", "compute", "communication", "exposed", "wait", "host", "memory")
    table = plain_table("Ranks", "from rank", *columns, fold=False)
    for k in m.kinds[:most]:
        times = (seconds(x) for x in (k.compute, k.communication, k.exposed, k.wait, k.host))
        table.add_row(_rank(k), str(k.ranks), *times, size(k.peak_memory))
    if len(m.kinds) > most:
        table.add_row(f"and {len(m.kinds) - most} more")
    return table


def _rank(k: RankClass) -> str:
    how = [f"speed {k.speed:g}"] * (k.speed != 1) + [f"host x{k.pace:g}"] * (k.pace != 1)
    how += [f"{name}={value}" for name, value in (k.arguments or {}).items()]
    return escape(f"{k.rank}" + (f" ({', '.join(how)})" if how else ""))


def sent_table(m: RankResults, most: int = 8) -> Table:
    """Collectives of one kind and size in one row."""
    columns = ("group", "ranks", "size", "calls", "each", "bus GB/s", "share", "from")
    table = plain_table("Collectives of a rank", "collective", *columns, fold=False)
    total = sum(s.seconds * s.calls for s in m.collectives)
    for s in m.collectives[:most]:
        share = percent(s.seconds * s.calls / total) if total else ""
        source = "measured" if s.measured else "link facts"
        cells = (s.group, str(s.ranks), size(s.nbytes), str(s.calls), seconds(s.seconds), f"{s.busbw / 1e9:.0f}")
        table.add_row(s.name, *cells, share, source)
    if len(m.collectives) > most:
        table.add_row(f"and {len(m.collectives) - most} more")
    return table
