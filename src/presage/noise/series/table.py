"""Sister runs side by side: one row a run, one column a step number, and which steps the schedule makes slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.logs import Event, StepLog

__all__ = ["LEAD", "Table", "kinds_of", "lead_of", "table_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAD = 5  # single steps at the start of a run that are named one by one


@dataclass(frozen=True, eq=False)
class Table:
    steps: Ints  # [records]
    seconds: Floats  # [runs, records], NaN where a run has no such record
    counts: Ints  # [records]: steps in each
    kinds: tuple[tuple[str, ...], ...]  # [runs][records]: '' for a plain step, else what makes it slow

    @cached_property
    def plain(self) -> NDArray[np.bool_]:
        """Records that are there and that nothing in the schedule makes slow."""
        return np.isfinite(self.seconds) & (np.array(self.kinds, dtype=object) == "")


def lead_of(log: StepLog) -> int:
    """How many records at the start are named one by one: a mean of many steps hides all but the first."""
    return LEAD if log.single else 1


def kinds_of(steps: Ints, events: Sequence[Event], lead: int, start: int | None = None) -> tuple[str, ...]:
    """What makes each record slow: its place at the start of the run, an event just before it, or nothing.

    In a mean of many steps (`lead` is 1) only the first event of a name can be seen.
    """
    first = int(steps[0]) if start is None else start
    at = {
        int(s): f"step {i + 1} of a run"
        for i, s in enumerate(steps)
        if i < lead and s - first < lead * max(1, _stride(steps))
    }
    seen: set[str] = set()
    for e in sorted(events, key=lambda e: e.after_step):
        if lead == 1 and e.name in seen:
            continue
        later = steps[np.searchsorted(steps, e.after_step, "right") :]
        name = f"after {'a later' if e.name in seen else 'the first'} {e.name}"
        seen.add(e.name)
        if len(later):
            at[int(later[0])] = name
    return tuple(at.get(int(s), "") for s in steps)


def _stride(steps: Ints) -> int:
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def table_of(logs: Sequence[StepLog]) -> Table:
    if not logs:
        raise PresageError("a series needs the log of at least one run")
    if len({x.kind for x in logs}) > 1:
        found = ", ".join(sorted({x.kind for x in logs}))
        raise PresageError(f"{logs[0].group}: logs of {found} cannot be fitted together")
    steps = np.unique(np.concatenate([x.steps for x in logs]))
    seconds = np.full((len(logs), len(steps)), np.nan)
    counts = np.ones(len(steps), np.int64)
    kinds = [[""] * len(steps) for _ in logs]
    for r, log in enumerate(logs):
        at = np.searchsorted(steps, log.steps)
        seconds[r, at], counts[at] = log.seconds, log.counts
        for k, kind in zip(at, kinds_of(log.steps, log.events, lead_of(log)), strict=True):
            kinds[r][k] = kind
    return Table(steps, seconds, counts, tuple(map(tuple, kinds)))
