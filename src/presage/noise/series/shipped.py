"""The priors that ship: one for single steps, one for means, as JSON. Written by docs/make_steps.py."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from presage.noise.series.levels import LevelPrior
from presage.noise.series.prior import Scale, SeriesPrior

__all__ = ["prior_of", "prior_table", "shipped"]

DATA = Path(__file__).resolve().parents[2] / "data" / "noise" / "series_prior.json"
STEPS, MEANS = "single steps", "means"


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
    for name in {"slope", "bulk", "width", "event"} & set(values):
        values[name] = Scale(*values[name])
    weights = np.array(values["levels"])
    values["levels"] = LevelPrior(weights / weights.sum())
    values["cells"] = np.array(values["cells"]) / np.sum(values["cells"])
    values["shape"] = np.array(values["shape"])
    return SeriesPrior(**values)


@cache
def shipped(single: bool) -> SeriesPrior:
    """What the groups of MLPerf Training v5.0 say."""
    return prior_of(json.loads(DATA.read_text(encoding="utf-8"))[STEPS if single else MEANS])
