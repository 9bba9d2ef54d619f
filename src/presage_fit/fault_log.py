"""Logs of node faults: when each node was out of service, and why, seen up to a day.

A CSV table with the columns `node`, `start_day`, `end_day` (empty: not yet back) and, where known, `class`. Nodes that
never failed have no row, so how many there are has to be known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError, PresageError
from presage.files.csv_table import number, read_table

Floats = NDArray[np.float64]
COLUMNS = ("node", "start_day", "end_day")
KNOWN_NODES = {"stepfun": 400, "infinitehbd": 400}  # of published logs, by what their names begin with
FEWEST = 20  # faults
NEAR_START = 20.0  # days: a log that begins later than this begins at its first fault


@dataclass(frozen=True, eq=False)
class FaultLog:
    """Faults of a fleet from day `begin` to day `end`; one entry a fault, days that are not known yet are infinite."""

    name: str
    nodes: int
    begin: float
    end: float
    node: NDArray[np.int64]
    start: Floats
    back: Floats
    kinds: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def days(self) -> float:
        return self.end - self.begin

    @property
    def new(self) -> NDArray[np.bool_]:
        """Faults that began in these days."""
        return np.asarray(self.start >= self.begin)

    @property
    def open(self) -> NDArray[np.bool_]:
        """Nodes not back at the end: how long they are away is known to be longer only."""
        return np.asarray(~np.isfinite(self.back))

    @property
    def hours(self) -> Floats:
        """How long each fault lasted, or has lasted so far."""
        return np.asarray(24 * (np.minimum(self.back, self.end) - self.start))

    @property
    def rate(self) -> float:
        """Faults per node-day."""
        return float(self.new.sum()) / (self.nodes * self.days)

    def counts(self) -> NDArray[np.int64]:
        """Faults of each node, nodes without any included."""
        return np.asarray(np.bincount(self.node[self.new], minlength=self.nodes))

    def up_days(self) -> Floats:
        """Days that each node was in service; where faults of a node overlap, time counts once."""
        up, until = np.full(self.nodes, float(self.days)), np.full(self.nodes, float(self.begin))
        for i in np.argsort(self.start):
            node, end = self.node[i], min(self.back[i], self.end)
            up[node] -= max(0.0, end - max(self.start[i], until[node]))
            until[node] = max(until[node], end)
        return up

    def share_lost(self) -> float:
        """Share of node time out of service."""
        return float(1 - self.up_days().mean() / self.days)

    def away(self) -> Floats:
        """Nodes out of service at noon of each day."""
        noon = np.arange(floor(self.begin), ceil(self.end)) + 0.5
        out = (self.start[:, None] <= noon) & (self.back[:, None] > noon)
        return np.asarray([len(np.unique(self.node[at])) for at in out.T], np.float64)

    def between(self, begin: float, end: float) -> FaultLog:
        """The days from `begin` to `end`, as someone on the last of them sees them."""
        kept = (self.start < end) & (self.back > begin) & ((self.start >= begin) | (self.back > begin))
        kept |= (self.start >= begin) & (self.start < end)
        back = np.where(self.back[kept] > end, inf, self.back[kept])
        kinds = tuple(k for k, keep in zip(self.kinds, kept, strict=True) if keep)
        return FaultLog(self.name, self.nodes, begin, end, self.node[kept], self.start[kept], back, kinds)


def is_fault_log(path: Path) -> bool:
    """Whether the first line of a file has the columns of one."""
    try:
        with path.open(encoding="utf-8", errors="replace") as f:
            names = [c.strip() for c in f.readline().split(",")]
    except OSError:
        return False
    return set(COLUMNS) <= set(names)


def read_fault_log(path: str | Path, nodes: int | None = None) -> FaultLog:
    """A CSV file; the days of an unfinished log end with its last event."""
    path = Path(path)
    names, rows = read_table(path)
    missing = [c for c in COLUMNS if c not in names]
    if missing:
        raise InputError(path, f"has no column {', '.join(missing)}: a log of faults has {', '.join(COLUMNS)}")
    nodes = nodes or next((n for k, n in KNOWN_NODES.items() if path.name.lower().startswith(k)), None)
    if nodes is None:
        raise InputError(path, "says nothing of nodes that never failed: give the size of the fleet with --nodes N")
    faults, skipped = [], []
    for line, row in rows:
        start, end = number(row["start_day"]), number(row["end_day"])
        if not row["node"] or start is None or (end is not None and end < start):
            skipped.append((f"line {line}", "needs a node, a start_day, and an end_day that is not before it"))
            continue
        before = (row.get("started_before_split") or "").strip().lower() in ("yes", "true", "1")
        faults.append((row["node"], start, inf if end is None else end, row.get("class") or "fault", before))
    return _log(path, nodes, faults, tuple(skipped))


def _log(
    path: Path, nodes: int, faults: Sequence[tuple[str, float, float, str, bool]], skipped: tuple[tuple[str, str], ...]
) -> FaultLog:
    if len(faults) < FEWEST:
        raise InputError(path, f"has {len(faults)} faults: it takes {FEWEST} at least to tell rates and repairs")
    number_of = {name: i for i, name in enumerate(dict.fromkeys(f[0] for f in faults))}
    if len(number_of) > nodes:
        raise InputError(path, f"has faults of {len(number_of)} nodes, more than the {nodes} of the fleet")
    first = min((f[1] for f in faults if not f[4]), default=0.0)
    before = [f[1] for f in faults if f[4]]
    begin = 0.0 if first < NEAR_START and not before else float(floor(first))
    known = [d for f in faults for d in f[1:3] if d < inf]
    return FaultLog(
        path.name,
        nodes,
        begin,
        float(ceil(max(known))),
        np.array([number_of[f[0]] for f in faults]),
        np.array([f[1] for f in faults]),
        np.array([f[2] for f in faults]),
        tuple(f[3] for f in faults),
        skipped,
    )


def by_class(log: FaultLog, fewest: int = 8) -> tuple[str, ...]:
    """The class of each fault; those with few faults are one class, `other`."""
    counts = Counter(log.kinds)
    return tuple(k if counts[k] >= fewest else "other" for k in log.kinds)


def check_follows(first: FaultLog, second: FaultLog) -> None:
    """Refuse a second log that does not go on where the first ends."""
    if abs(second.begin - first.end) > 2:
        raise PresageError(
            f"{second.name} begins on day {second.begin:g}, {first.name} ends on day {first.end:g}: give one log, "
            "or two of the same fleet of which the second goes on where the first ends, with the same day 0"
        )
