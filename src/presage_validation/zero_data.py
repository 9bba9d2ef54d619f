"""How far p95 is above p50 in a job of which no step was seen: predicted from GPU, nodes and step time alone.

Split: the laws' constants come from the systems that ship, without those of the machine that is scored (all of a site's
systems are left out together). The step time given is the measured median: how well that is predicted is another claim.
So are the number of steps and where evaluations fall, as a config tells them. Records that are means are means of drawn
steps: jitter averages out, what goes with the step before less, drift and the schedule's slow steps stay, a stall is
shared by the steps of its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import Belief
from presage.noise.priors import architecture_of, machine_of, step_prior
from presage_fit.series.simulate import believed_steps
from presage_fit.series.table import kinds_of, lead_of
from presage_fit.step_logs import Logs, StepLog

__all__ = ["WITHIN", "ZeroData", "ZeroRow", "score_zero_data"]

Floats = NDArray[np.float64]
WITHIN = 0.015
CUT = 5  # steps at the start of a run that are not scored
GROUPS = 300  # drawn systems behind each prediction
MOST = 400  # records drawn of a run


@dataclass(frozen=True)
class ZeroRow:
    """p95 over p50, less 1, of all steps of a group's runs."""

    group: str
    architecture: str
    nodes: float
    step_seconds: float
    measured: float
    predicted: float  # middle one of drawn systems
    low: float  # 90% of drawn systems
    high: float

    @property
    def hit(self) -> bool:
        return abs(self.predicted - self.measured) <= WITHIN


@dataclass(frozen=True)
class ZeroData:
    rows: tuple[ZeroRow, ...] = ()

    def metrics(self) -> dict[str, float]:
        if not self.rows:
            return {}
        return {
            "zero_data_within_1.5pt": float(np.mean([r.hit for r in self.rows])),
            "zero_data_median_error": float(np.median([abs(r.predicted - r.measured) for r in self.rows])),
            "zero_data_interval_90_coverage": float(np.mean([r.low <= r.measured <= r.high for r in self.rows])),
        }

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(r) | {"hit": r.hit} for r in self.rows]


def score_zero_data(logs: Logs, seed: int = 0) -> ZeroData:
    """Groups whose nodes and GPUs are known; not those of means between evaluations, of which too few are in a run."""
    groups = [g for g in logs.groups().values() if not g[0].blocks and _known(g[0]) and len({x.kind for x in g}) == 1]
    return ZeroData(tuple(_row(g, np.random.default_rng([seed, i])) for i, g in enumerate(groups)))


def _known(log: StepLog) -> bool:
    nodes = log.meta.get("nodes")
    return isinstance(nodes, int | float) and nodes > 0 and bool(log.meta.get("accelerator"))


def _row(runs: Sequence[StepLog], rng: np.random.Generator) -> ZeroRow:
    meta, stride = runs[0].meta, runs[0].stride
    cut = CUT if runs[0].single else 1  # a mean of many steps holds the first ones in its first record
    pool = np.concatenate([x.seconds[min(cut, len(x.seconds) - 1) :] for x in runs])
    seconds, nodes = float(np.median(pool)), float(meta["nodes"])
    architecture = architecture_of(str(meta["accelerator"]))
    machine = machine_of(str(meta.get("submitter")), str(meta.get("system")))
    belief = step_prior(architecture, nodes, seconds, [machine])
    records = max(1, min(MOST, max(len(x.seconds) for x in runs) - cut))
    drawn = believed_steps(belief, seconds, nodes, records * stride, rng, GROUPS, len(runs))
    drawn = drawn.reshape(GROUPS, len(runs), records, stride).mean(axis=3)
    drawn = (drawn + _scheduled(runs, belief, seconds, cut, records, rng)).reshape(GROUPS, -1)
    above = np.quantile(drawn, 0.95, axis=1) / np.median(drawn, axis=1) - 1
    low, middle, high = (float(q) for q in np.quantile(above, [0.05, 0.5, 0.95]))
    measured = float(np.quantile(pool, 0.95)) / seconds - 1
    return ZeroRow(runs[0].group, architecture, nodes, seconds, measured, middle, low, high)


def _scheduled(
    runs: Sequence[StepLog], belief: Belief, seconds: float, cut: int, records: int, rng: np.random.Generator
) -> Floats:
    """[drawn systems, runs, records]: seconds that the schedule adds to each record after the first ones."""
    added = np.zeros((GROUPS, len(runs), records))
    for event in belief.noise.scheduled:
        excess = np.maximum(event.factor.sample(rng, GROUPS) - 1, 0.0) * seconds / runs[0].stride
        for r, log in enumerate(runs):
            kinds = kinds_of(log.steps, log.events, lead_of(log))[cut : cut + records]
            for k in [k for k, kind in enumerate(kinds) if kind == event.name]:
                added[:, r, k] = excess
    return added
