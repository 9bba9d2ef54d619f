"""Logs of step times as files hold them: MLPerf records, Megatron-LM's text, plain CSV; all become `StepLog`s.

A record is one step, or the mean of `counts` steps where a framework logs only every n-th. Step numbers count from 0
in MLPerf's files and from 1 in Megatron-LM's, as logged. Files that cannot be used end in one sentence; runs inside a
file that cannot be used are named in `Logs.skipped` and the rest is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.errors import PresageError
from presage.files.reading import read_bytes

__all__ = ["Event", "Logs", "StepLog", "read_logs"]

MOST = 256 << 20  # bytes of a log
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Event:
    """Something that happens between steps and makes the next one slow: an evaluation, a checkpoint."""

    name: str
    after_step: int  # the last step before it
    seconds: float = 0.0  # its own, not a step's


@dataclass(frozen=True, eq=False)
class StepLog:
    """Consecutive step times of one run."""

    run: str
    group: str  # runs of one configuration on one machine share it
    steps: Ints  # numbers, rising
    seconds: Floats
    counts: Ints  # how many steps each record is the mean of
    events: tuple[Event, ...] = ()
    blocks: bool = False  # records are means between two evaluations, not of a fixed number of steps
    ends: Floats | None = None  # seconds from the job's start to each record's end, where known
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.steps):
            raise PresageError(f"{self.run}: a log of step times needs at least one above 0 seconds")

    @property
    def stride(self) -> int:
        """Steps in a record."""
        return int(np.median(self.counts))

    @property
    def single(self) -> bool:
        return not self.blocks and self.stride == 1

    @property
    def kind(self) -> str:
        """Logs of different kinds are never pooled."""
        return "single steps" if self.single else "block means" if self.blocks else f"means of {self.stride} steps"

    @property
    def total(self) -> float:
        """Seconds of all its steps, without what is between them."""
        return float(self.seconds @ self.counts)

    @property
    def clock(self) -> Floats:
        """Seconds from the job's start to each record's end, as far as known."""
        if self.ends is not None:
            return self.ends
        pauses = np.zeros(len(self.steps) + 1)
        for e in self.events:
            pauses[np.searchsorted(self.steps, e.after_step, "right")] += e.seconds
        return np.asarray(np.cumsum(self.seconds * self.counts + pauses[:-1]))

    def means(self, stride: int) -> StepLog:
        """As if only the mean of every `stride` records had been logged, with the number of the last of them."""
        n = len(self.steps) // stride * stride
        if not n:
            raise PresageError(f"{self.run}: has fewer than {stride} records")
        counts = self.counts[:n].reshape(-1, stride)
        seconds = (self.seconds[:n].reshape(-1, stride) * counts).sum(axis=1) / counts.sum(axis=1)
        ends = None if self.ends is None else self.ends[stride - 1 : n : stride]
        return replace(
            self, steps=self.steps[stride - 1 : n : stride], seconds=seconds, counts=counts.sum(axis=1), ends=ends
        )

    def cut(self, first: int) -> StepLog:
        """Without its first records."""
        ends = None if self.ends is None else self.ends[first:]
        steps, seconds, counts = self.steps[first:], self.seconds[first:], self.counts[first:]
        return replace(self, steps=steps, seconds=seconds, counts=counts, ends=ends)


@dataclass(frozen=True)
class Logs:
    """What was read, and what could not be."""

    logs: tuple[StepLog, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # which run, why

    def groups(self) -> dict[str, tuple[StepLog, ...]]:
        found: dict[str, list[StepLog]] = {}
        for log in self.logs:
            found.setdefault(log.group, []).append(log)
        return {name: tuple(logs) for name, logs in found.items()}


def step_log(
    run: str,
    group: str,
    steps: ArrayLike,
    seconds: ArrayLike,
    counts: ArrayLike | int = 1,
    events: Iterable[Event] = (),
    blocks: bool = False,
    ends: ArrayLike | None = None,
    meta: Mapping[str, Any] | None = None,
) -> StepLog:
    """A log of the records that are numbers above 0, in the order of their steps; of two for one step the later one."""
    number = np.atleast_1d(np.asarray(steps, np.int64))
    time = np.atleast_1d(np.asarray(seconds, np.float64))
    count = np.broadcast_to(np.asarray(counts, np.int64), time.shape)
    good = np.flatnonzero(np.isfinite(time) & (time > 0))
    _, last = np.unique(number[good][::-1], return_index=True)
    keep = good[::-1][last]
    end = None if ends is None else np.asarray(ends, np.float64)[keep]
    return StepLog(run, group, number[keep], time[keep], count[keep], tuple(events), blocks, end, dict(meta or {}))


def read_logs(paths: Sequence[str | Path], column: str | None = None, unit: str | None = None) -> Logs:
    """All runs of some files; `column` and `unit` (s, ms, us) name the step times of a CSV file."""
    from presage_fit.step_log_formats import read_csv, read_megatron, read_mlperf

    found: list[StepLog] = []
    skipped: list[tuple[str, str]] = []
    for path in map(Path, paths):
        text = _text(path)
        if text.lstrip()[:1] in ("{", "["):
            part = read_mlperf(path, text)
        elif "elapsed time per iteration" in text:
            part = read_megatron(path, text)
        else:
            part = read_csv(path, text, column, unit)
        found += part.logs
        skipped += part.skipped
    if not found:
        why = f": {skipped[0][0]}: {skipped[0][1]}" if skipped else ""
        raise PresageError(f"no step times in {', '.join(map(str, paths)) or 'no files'}{why}")
    return Logs(tuple(found), tuple(skipped))


def _text(path: Path) -> str:
    return read_bytes(path, MOST).decode("utf-8-sig", "replace")
