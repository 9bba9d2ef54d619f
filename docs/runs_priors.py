"""The part of docs/runs.md on the prior of the fitted factors: errors had it been narrower, wider or absent."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import runs_text as text

from presage.configs.job import Job
from presage.prediction.jobs.efficiency import shipped_efficiency

ROOT = Path(__file__).resolve().parent.parent
PRIORS = (0.05, 0.10, 0.15, 0.25, 100.0)


def fit_tool() -> Any:
    spec = importlib.util.spec_from_file_location("fit_runs", ROOT / "tools" / "fit_runs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Rows = list[tuple[str, Job, float]]


@dataclass(frozen=True)
class Line:
    """Errors of rows in logarithms about a fit, and how they change with each factor's."""

    rows: Rows
    base: np.ndarray
    slopes: np.ndarray


def priors(paths: Sequence[Path]) -> Iterator[str]:
    """Left-out errors of the first table with other widths of the prior, linearised about the fit that ships to all."""
    fit, e = fit_tool(), shipped_efficiency()
    x = np.log([getattr(e, name) for name in fit.NAMES])
    kept = [row for one in paths for row in fit.read(one)]
    fit.MOST = sys.maxsize
    rows = fit.read(paths[0])
    some, every = Line(kept, *fit.linear(kept, x)), Line(rows, *fit.linear(rows, x))
    shown = [s for s in text.BARS if any(s == r[0] for r in rows)]
    yield f"| width | GEMMs | backward | experts | median | MAPE | {' | '.join(shown)} |"
    yield "|" + "---|" * (6 + len(shown))
    for width in PRIORS:
        fit.PRIOR |= {"product": width, "backward": width}
        whole = fit.factors(fit.solved(kept, some.base, some.slopes, x, ""))
        head = ["none" if PRIORS[-1] == width else f"{width:.2f}", *(f"{v:.3f}" for v in whole)]
        yield f"| {' | '.join(head)} | {prior_cells(errors_left_out(fit, some, every, x), shown)}"


def errors_left_out(fit: Any, some: Line, every: Line, x: np.ndarray) -> dict[str, np.ndarray]:
    found = {}
    for source in dict.fromkeys(r[0] for r in every.rows):
        at = fit.solved(some.rows, some.base, some.slopes, x, source)
        mine = np.array([r[0] == source for r in every.rows])
        found[source] = np.abs(np.exp(every.base[mine] + every.slopes[mine] @ (at - x)) - 1)
    return found


def prior_cells(found: Mapping[str, np.ndarray], shown: list[str]) -> str:
    whole = np.concatenate(list(found.values()))
    marks = [(float(np.median(whole)), text.MEDIAN), (float(whole.mean()), text.MAPE)]
    marks += [(float(found[s].mean()), text.BARS[s]) for s in shown]
    return " | ".join(f"{v:.1%}" if v <= bar else f"**{v:.1%}**" for v, bar in marks) + " |"
