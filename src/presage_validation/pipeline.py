"""Claims on measured pipeline schedules: every iteration's time, with delays fitted on other iterations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from presage_validation import pipeline_schedules as pipeline
from presage_validation.pipeline_schedules import Delays, PipelineRun
from presage_validation.score import Result, Row, Skipped

__all__ = ["score_pipeline"]

WARM_UP = 1  # iterations at the start of a run that are not like the others


def score_pipeline(folder: str | Path) -> Result:
    """Iteration times from the measured forwards and backwards, beside the measured ones.

    `replay`: each half of the iterations (every other one) with the delays fitted on the other half. `replay_same`:
    with delays fitted on the same half. `replay_plain`: with no delays at all.
    """
    run = pipeline.read(folder)
    skipped = tuple(Skipped(f"iteration {i}", "warm-up") for i in run.iterations[:WARM_UP])
    kept = range(WARM_UP, len(run.iterations))
    halves = (list(kept[::2]), list(kept[1::2]))
    if not halves[1]:
        few = Skipped("all iterations", "fitting on some and scoring on others needs two after the warm-up")
        return Result("pipeline", str(folder), (), (*skipped, few))
    fits = [pipeline.fit_delays(run, half) for half in halves]
    rows = [
        *(r for half, fit in zip(halves, fits[::-1], strict=True) for r in _rows(run, "replay", half, fit)),
        *(r for half, fit in zip(halves, fits, strict=True) for r in _rows(run, "replay_same", half, fit)),
        *_rows(run, "replay_plain", list(kept), Delays()),
    ]
    return Result("pipeline", str(folder), tuple(rows), skipped)


def _rows(run: PipelineRun, metric: str, at: list[int], delays: Delays) -> Iterable[Row]:
    predicted, measured = pipeline.iteration_times(run, delays), run.measured
    group = Path(run.path).name
    return [Row(metric, group, str(run.iterations[k]), float(predicted[k]), float(measured[k])) for k in np.sort(at)]
