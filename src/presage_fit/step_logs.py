"""Logs of step times as files hold them: MLPerf records, Megatron-LM's text, plain CSV; all become `StepLog`s.

A record is one step, or the mean of `counts` steps where a framework logs only every n-th. Step numbers count from 0
in MLPerf's files and from 1 in Megatron-LM's, as logged. Files that cannot be used end in one sentence; runs inside a
file that cannot be used are named in `Logs.skipped` and the rest is read.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.errors import WRONG_VALUE, InputError, PresageError
from presage.files.reading import parse_json, read_bytes

MOST = 256 << 20  # bytes of a log
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LogEvent:
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
    events: tuple[LogEvent, ...] = ()
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
    events: Iterable[LogEvent] = (),
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


# The file formats behind `read_logs`: MLPerf records as JSON, Megatron-LM's text, CSV.

META = (
    "submitter",
    "system",
    "benchmark",
    "accelerator",
    "n_gpus",
    "gpus_per_node",
    "nodes",
    "interconnect",
    "host_network",
    "framework",
    "global_batch",
    "seq_len",
    "parallel",
)
MEGATRON = re.compile(r"iteration\s+(\d{1,15})\s*/\s*\d+.*?elapsed time per iteration \(ms\):\s*([0-9.eE+-]+)")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
TIMES = ("seconds", "step_seconds", "step_time", "step_time_s", "time_s", "time", "s", "iteration_time", "duration")
STEPS = ("step", "iteration", "iter", "global_step")
RUNS = ("run", "run_id", "job")
MOST_STEP = 2**53
GROUPS = ("group", "system", "config")


def read_mlperf(path: Path, text: str) -> Logs:
    """Runs with single steps (or means of a fixed number of them), else with means between evaluations."""
    runs = parse_json(text, path)
    runs = runs.get("runs") if isinstance(runs, dict) else runs
    if not isinstance(runs, list) or not all(isinstance(r, dict) for r in runs):
        raise InputError(path, "needs a list of runs, each with its steps or blocks", "runs")
    logs, skipped = [], []
    for i, run in enumerate(runs):
        name = "/".join(str(run.get(k, "?")) for k in ("submitter", "system", "benchmark", "run"))
        try:
            logs.append(_mlperf_run(run, name))
        except WRONG_VALUE as e:
            skipped.append((name if "?" not in name else f"run {i}", _reason(e)))
    return Logs(tuple(logs), tuple(skipped))


def _reason(e: Exception) -> str:
    return (
        str(e)
        if isinstance(e, _Unusable | PresageError)
        else f"a field has not the form it should have: {type(e).__name__} {e}"
    )


class _Unusable(ValueError):
    """A run that has nothing to read."""


def _mlperf_run(run: Mapping[str, Any], name: str) -> StepLog:
    group = name.rsplit("/", 1)[0]
    meta = {k: run.get(k) for k in META}
    if run.get("steps"):
        table = np.array([[r[0], r[1]] for r in run["steps"]], np.float64)
        counts = run.get("step_stride") or (int(np.median(np.diff(table[:, 0]))) if len(table) > 1 else 1)
        logged = np.array(run.get("step_end_s") or [], np.float64)
        ends = logged if len(logged) == len(table) and np.isfinite(logged).all() else None
        clock = None if ends is None else ends + float(run.get("init_s") or 0.0)
        events = _evaluations(run, table[:, 0], ends)
        log = step_log(name, group, table[:, 0], table[:, 1], counts, events, ends=clock, meta=meta)
    elif run.get("blocks"):
        table = np.array([[b[0], b[1]] for b in run["blocks"]], np.float64)
        log = step_log(name, group, np.arange(len(table)), table[:, 1], _counts(run, table), blocks=True, meta=meta)
    else:
        raise _Unusable("neither steps nor blocks are logged")
    return log


def _evaluations(run: Mapping[str, Any], steps: Floats, ends: Floats | None) -> list[LogEvent]:
    """Where each evaluation falls: as logged, else from the times of the records, else from its samples."""
    found = []
    for v in run.get("validation") or []:
        after, start = v.get("after_step"), v.get("start_s")
        if after is None and start is not None and ends is not None:
            before = np.flatnonzero(ends <= start + 1e-3)
            after = steps[before[-1]] if len(before) else None
        if after is None and v.get("samples") and run.get("global_batch"):
            after = v["samples"] // run["global_batch"] - 1
        if after is not None:
            found.append(LogEvent("validation", int(after), float(v.get("seconds") or 0.0)))
    return found


def _counts(run: Mapping[str, Any], table: Floats) -> list[int]:
    """Steps in each block: its span, without the evaluations in it, over its mean."""
    spans = np.diff(table[:, 0], prepend=0.0)
    for v in run.get("validation") or []:
        k = int(np.searchsorted(table[:, 0], v["start_s"] + 1e-2)) if v.get("start_s") is not None else len(spans)
        if k < len(spans):
            spans[k] -= v.get("seconds") or 0.0
    return [max(1, round(float(s / m))) if m > 0 else 1 for s, m in zip(spans, table[:, 1], strict=True)]


def read_megatron(path: Path, text: str) -> Logs:
    """One run, or several where iteration numbers start again; a record is the mean of those since the last."""
    lines = [(int(m[1]), _number(m[2])) for m in map(MEGATRON.search, text.splitlines()) if m]
    found = [(step, ms * 1e-3) for step, ms in lines if ms is not None and ms > 0]
    if not found:
        raise InputError(path, "has no line with both 'iteration N/M' and 'elapsed time per iteration (ms): X'")
    parts: list[list[tuple[int, float]]] = [[]]
    for step, seconds in found:
        if parts[-1] and step <= parts[-1][-1][0]:
            parts.append([])
        parts[-1].append((step, seconds))
    names = [path.name if len(parts) == 1 else f"{path.name}#{i + 1}" for i in range(len(parts))]
    return Logs(tuple(_megatron_run(n, str(path.parent), p) for n, p in zip(names, parts, strict=True)))


def _megatron_run(name: str, group: str, part: list[tuple[int, float]]) -> StepLog:
    steps = np.array([s for s, _ in part])
    stride = int(np.median(np.diff(steps))) if len(steps) > 1 else 1
    return step_log(name, group, steps, [t for _, t in part], max(1, stride))


def read_csv(path: Path, text: str, column: str | None = None, unit: str | None = None) -> Logs:
    """A column of seconds (or ms); the run, the group, the step and what came after it where there are such columns."""
    try:
        table = [r for r in csv.reader(io.StringIO(text)) if r and not r[0].lstrip().startswith("#")]
    except csv.Error as e:
        raise InputError(path, f"is not a table of step times: {e}") from e
    if not table:
        raise InputError(path, "is empty")
    if len(table[0]) == 1 and _number(table[0][0]) is not None:
        table.insert(0, [column or "seconds"])
    header = [h.strip().lower() for h in table[0]]
    times, factor = _time_column(path, header, column, unit)
    rows = [dict(zip(header, (c.strip() for c in r), strict=False)) for r in table[1:]]
    return _csv_runs(path, rows, times, factor)


def _time_column(path: Path, header: list[str], column: str | None, unit: str | None) -> tuple[str, float]:
    named = [column.lower()] if column else [h for h in header if h.removesuffix("_ms").removesuffix("_us") in TIMES]
    named = named or [h for h in header if h in ("ms", "us") or h.endswith(("_ms", "_us", "_s", "(ms)", "(s)"))]
    if not named or named[0] not in header:
        asked = f"no column {column!r}" if column else "no column of step times (seconds, step_time, ms, ...)"
        raise InputError(path, f"{asked} among {', '.join(header)}: name it")
    guess = next((u for u in ("ms", "us") if named[0].endswith((u, f"({u})"))), "s")
    if (unit or guess) not in SECONDS:
        raise InputError(path, f"unknown unit {unit!r}: choose from {', '.join(SECONDS)}")
    return named[0], SECONDS[unit or guess]


def _csv_runs(path: Path, rows: list[dict[str, str]], times: str, factor: float) -> Logs:
    runs: dict[tuple[str, str], list[tuple[int, float, str]]] = {}
    bad = []
    for i, row in enumerate(rows):
        seconds = _number(row.get(times, ""))
        key = (_first(row, GROUPS) or path.stem, _first(row, RUNS) or path.stem)
        mine = runs.setdefault(key, [])
        step = _number(_first(row, STEPS) or str(len(mine)))
        if seconds is None or seconds <= 0 or step is None or not abs(step) < MOST_STEP:
            bad.append((f"{path.name} line {i + 2}", "no step time above 0"))
            continue
        mine.append((int(step), seconds * factor, row.get("event", "")))
    if not any(runs.values()):
        raise InputError(path, "has no step time above 0", times)
    return Logs(tuple(_csv_run(g, r, part) for (g, r), part in runs.items() if part), tuple(bad))


def _csv_run(group: str, run: str, part: list[tuple[int, float, str]]) -> StepLog:
    steps = [s for s, _, _ in part]
    stride = int(np.median(np.diff(np.unique(steps)))) if len(set(steps)) > 1 else 1
    events = [LogEvent(name, step) for step, _, name in part if name]
    return step_log(run, group, steps, [t for _, t, _ in part], max(1, stride), events)


def _first(row: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((row[n] for n in names if row.get(n)), None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
