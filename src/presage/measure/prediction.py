"""What was predicted of a step: read from `presage predict --json`, or asked of the presage that is installed here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError
from presage.files.reading import read_json

MOST = 1e18  # of a number in a prediction
NEEDED = ("msgspec", "numba", "typer", "rich")
CALL = "from presage.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step as predicted, in seconds and bytes; empty or None where it was not told."""

    step: dict[str, float] = field(default_factory=dict)  # by mean, p5, p50, p95
    gpu_active: float | None = None
    peak_memory: int | None = None
    families: dict[str, float] = field(default_factory=dict)  # GPU time


def read(path: str | Path) -> Prediction:
    """From a file that `presage predict --json` wrote."""
    try:
        return from_json(read_json(path))
    except ValueError as e:
        raise InputError(path, f"is not what presage predict --json writes: {e}") from e


def from_json(value: Any) -> Prediction:
    """From what `presage predict --json` writes; ValueError where it is something else."""
    if not isinstance(value, dict) or not isinstance(value.get("step_ms"), dict):
        raise ValueError("no step_ms in it")
    breakdown = value.get("breakdown") or {}
    if not isinstance(breakdown, dict) or not all(isinstance(part, dict) for part in breakdown.values()):
        raise ValueError("breakdown should be an object of objects")
    step = {name: _seconds(value["step_ms"], name) for name in ("mean", "p5", "p50", "p95")}
    peak = _number(value, "peak_memory_bytes")
    return Prediction(
        {name: x for name, x in step.items() if x is not None},
        _seconds(value, "gpu_active_ms"),
        None if peak is None else int(peak),
        {name: _seconds(part, "ms") or 0.0 for name, part in breakdown.items()},
    )


def can_predict() -> bool:
    """Whether all of presage is installed here, and not only what measuring needs."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def predict(step: Sequence[str], argv: Sequence[str], gpu: str, host: str | None = None) -> Prediction:
    """Ask this presage, in a process of its own that sees no GPU. `step`: words that name it; `argv`: a script's."""
    where = ["--gpu", gpu, *(["--host", host] if host else [])]
    asked = ["predict", *step, *where, "--json", "-", *(["--", *argv] if argv else [])]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run([sys.executable, "-c", CALL, *asked], capture_output=True, text=True, env=environment)
    if said.returncode:
        lines = said.stderr.strip().splitlines() or ["no reason given"]
        raise PresageError(lines[-1].removeprefix("presage: "))
    try:
        return from_json(json.loads(said.stdout))
    except ValueError as e:
        raise PresageError(f"presage predict wrote something else than its JSON: {e}") from e


def _seconds(table: dict[str, Any], name: str) -> float | None:
    value = _number(table, name)
    return None if value is None else 1e-3 * value


def _number(table: dict[str, Any], name: str) -> float | None:
    value = table.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} is {value!r}, not a number")
    if value is not None and not abs(value) < MOST:
        raise ValueError(f"{name} is {value!r}, not a finite number")
    return value
