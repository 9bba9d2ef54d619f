"""The claims on whole training steps, captured without a GPU, against what a GPU measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from presage.accuracy.score import Result, Row, Skipped
from presage.errors import InputError, PresageError
from presage.graph.memory import profile
from presage.traces.jsonfile import read_bytes

__all__ = ["measured_cases", "score_workloads"]


def score_workloads(
    workloads: str | Path, measured: str | Path, tell: Callable[[str], None] = lambda _: None
) -> Result:
    """Capture every measured case of a workloads file and predict its peak memory."""
    from presage.capture import capture, load_cases

    rows: list[Row] = []
    skipped: list[Skipped] = []
    functions = load_cases(workloads)
    for name, runs in measured_cases(measured).items():
        tell(name)
        if name not in functions:
            skipped.append(Skipped(name, f"{Path(workloads).name} has no such case"))
            continue
        try:
            memory = profile(capture(functions[name], source=f"{workloads}:{name}"))
        except PresageError as e:
            skipped.append(Skipped(name, str(e)))
            continue
        for metric, key, value in (
            ("peak_memory", "peak_alloc", memory.peak_allocated),
            ("peak_reserved", "peak_reserved", memory.peak_reserved),
        ):
            seen = [r[key] for r in runs if key in r]
            if seen:
                rows.append(Row(metric, name, key, float(value), float(np.median(seen))))
    return Result("workloads", f"{workloads} {measured}", tuple(rows), tuple(skipped))


def measured_cases(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each case: a file holds one run a case, or several by name."""
    try:
        found = msgspec.json.decode(read_bytes(Path(path)))
    except msgspec.DecodeError as e:
        raise InputError(path, f"not JSON ({e})") from e
    cases = found.get("cases") if isinstance(found, dict) else None
    if not isinstance(cases, dict):
        raise InputError(path, "no such object in the file", "cases")
    out = {}
    for name, case in cases.items():
        runs = [case] if "step_ms" in case or "error" in case else list(case.values())
        out[name] = [r for r in runs if "error" not in r]
    return out
