"""Sister runs side by side: one row a run, one column a step number, and which steps the schedule makes slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage_fit.series.drift import FEW
from presage_fit.step_logs import Event, StepLog

__all__ = ["LEAD", "Table", "kinds_of", "lead_of", "table_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAD = 5  # single steps at the start of a run that are named one by one


@dataclass(frozen=True, eq=False)
class Table:
    steps: Ints  # [records]
    seconds: Floats  # [runs, records], NaN where a run has no such record
    counts: Ints  # [records]: steps in each
    clock: Floats  # [runs, records]: seconds from the job's start to the record's end
    kinds: tuple[tuple[str, ...], ...]  # [runs][records]: '' for a plain step, else what makes it slow
    shared_events: bool = False  # events are at the same records in all runs: a curve through these knows them

    @cached_property
    def plain(self) -> NDArray[np.bool_]:
        """Records that are there and that nothing in the schedule makes slow."""
        return np.asarray(np.isfinite(self.seconds) & np.array([[k == "" for k in row] for row in self.kinds]))


def lead_of(log: StepLog) -> int:
    """How many records at the start are named one by one: a mean of many steps hides all but the first."""
    return LEAD if log.single else 1


def kinds_of(steps: Ints, events: Sequence[Event], lead: int) -> tuple[str, ...]:
    """What makes each record slow: its place at the start of the run, an event just before it (or in it), or nothing.

    In a mean of many steps (`lead` is 1) only the first event of a name can be seen.
    """
    kinds = [f"step {i + 1} of a run" if i < lead else "" for i in range(len(steps))]
    seen: set[str] = set()
    for e in sorted(events, key=lambda e: e.after_step):
        later, next_one = e.name in seen, int(np.searchsorted(steps, e.after_step, "right"))
        seen.add(e.name)
        if next_one < len(steps) and not (later and lead == 1):
            kinds[next_one] = f"after {'a later' if later else 'the first'} {e.name}"
    return tuple(kinds)


def table_of(logs: Sequence[StepLog]) -> Table:
    if not logs:
        raise PresageError("a series needs the log of at least one run")
    if len({x.kind for x in logs}) > 1:
        found = ", ".join(sorted({x.kind for x in logs}))
        raise PresageError(f"{logs[0].group}: logs of {found} cannot be fitted together")
    steps = np.unique(np.concatenate([x.steps for x in logs]))
    seconds, clock = (np.full((len(logs), len(steps)), np.nan) for _ in range(2))
    counts = np.ones(len(steps), np.int64)
    kinds = [[""] * len(steps) for _ in logs]
    alike = _alike(logs, len(steps))
    for r, log in enumerate(logs):
        at = np.searchsorted(steps, log.steps)
        seconds[r, at], counts[at], clock[r, at] = log.seconds, log.counts, log.clock
        for k, kind in zip(at, kinds_of(log.steps, () if alike else log.events, lead_of(log)), strict=True):
            kinds[r][k] = kind
    return Table(steps, seconds, counts, clock, tuple(map(tuple, kinds)), alike)


def _alike(logs: Sequence[StepLog], records: int) -> bool:
    """Few means, each event in the same record of all runs."""
    if logs[0].single or records >= FEW:
        return False
    least = min(len(x.steps) for x in logs)
    where = [{int(np.searchsorted(x.steps, e.after_step, "right")) for e in x.events} for x in logs]
    return len({frozenset(k for k in w if k < least) for w in where}) == 1
