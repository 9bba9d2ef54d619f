"""The file formats behind `read_logs`: MLPerf records as JSON, Megatron-LM's text, CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from presage.errors import WRONG_VALUE, InputError, PresageError
from presage.files.reading import parse_json
from presage_fit.step_logs import Event, Floats, Logs, StepLog, step_log

__all__ = ["read_csv", "read_megatron", "read_mlperf"]

META = (
    "submitter",
    "system",
    "benchmark",
    "accelerator",
    "n_gpus",
    "gpus_per_node",
    "nodes",
    "global_batch",
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


def _evaluations(run: Mapping[str, Any], steps: Floats, ends: Floats | None) -> list[Event]:
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
            found.append(Event("validation", int(after), float(v.get("seconds") or 0.0)))
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
    events = [Event(name, step) for step, _, name in part if name]
    return step_log(run, group, steps, [t for _, t, _ in part], max(1, stride), events)


def _first(row: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((row[n] for n in names if row.get(n)), None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
