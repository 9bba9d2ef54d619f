"""The priors that ship: for single steps, for means of 32 steps (or about as many), for means between evaluations.

JSON, written by docs/make_steps.py.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from presage_fit.series.levels import LevelPrior
from presage_fit.series.prior import Scale, SeriesPrior
from presage_fit.step_logs import StepLog

__all__ = ["prior_of", "prior_table", "shipped"]

DATA = Path(str(files("presage"))) / "data" / "noise" / "series_prior.json"
STEPS, STRIDED, BLOCKS = "single steps", "means of 32 steps", "block means"
STRIDE = 32


def prior_table(prior: SeriesPrior) -> dict[str, Any]:
    """A prior as JSON can hold it."""
    return {f.name: _plain(getattr(prior, f.name)) for f in fields(prior)}


def _plain(value: Any) -> Any:
    if isinstance(value, Scale):
        return [float(f"{value.sd:.4g}"), value.dof]
    if isinstance(value, LevelPrior):
        return _plain(value.weights)
    if isinstance(value, np.ndarray):
        return (
            [_plain(x) for x in value] if value.ndim > 1 else [float(f"{x:.3g}") if abs(x) > 1e-6 else 0 for x in value]
        )
    return float(f"{value:.4g}") if isinstance(value, float) else value


def prior_of(table: dict[str, Any]) -> SeriesPrior:
    values: dict[str, Any] = dict(table)
    for name in ("slope", "bulk", "width", "event"):
        values[name] = Scale(*values[name])
    weights = np.array(values["levels"])
    values["levels"] = LevelPrior(weights / weights.sum())
    values["cells"] = np.array(values["cells"]) / np.sum(values["cells"])
    values["shape"] = np.array(values["shape"])
    return SeriesPrior(**values)


def shipped(log: StepLog) -> SeriesPrior:
    """What the groups of MLPerf Training v5.0 say of logs of this kind."""
    return _shipped(STEPS if log.single else BLOCKS if log.blocks else STRIDED)


@cache
def _shipped(kind: str) -> SeriesPrior:
    return prior_of(json.loads(DATA.read_text(encoding="utf-8"))[kind])
