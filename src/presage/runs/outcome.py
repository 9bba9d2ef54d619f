"""RunOutcome: drawn runs, with wall-clock time by cause, failures, cost and energy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.runs.failures import DAY
from presage.runs.run import TrainingRun

Floats = NDArray[np.float64]
CAUSES = ("steps", "stalls", "slow", "degraded", "checkpoints", "lost", "detection", "spares", "restart")
DOWN = ("detection", "spares", "restart")  # while GPUs do nothing
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Stops:
    """Statistics of the stops of one class."""

    name: str
    planned: bool
    per_node_day: float
    count: float  # on average
    low: float  # 5th percentile
    high: float
    seconds: float  # they cost, on average

    @property
    def each(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass(frozen=True, eq=False)
class RunOutcome:
    """One number a draw in each array; all are seconds but for counts."""

    run: TrainingRun
    parts: Mapping[str, Floats]  # by cause: they add up to the wall-clock time
    counts: Floats  # [class, draw]: failures
    costs: Floats  # [class, draw]: seconds lost to them: work again, detection, spares, restart
    never: NDArray[np.bool_]  # draws that failures let hardly move: they have no end

    @staticmethod
    def joined(some: Sequence[RunOutcome]) -> RunOutcome:
        """Outcomes of one run, joined."""
        if len(some) == 1:
            return some[0]
        parts = {c: np.concatenate([o.parts[c] for o in some]) for c in some[0].parts}
        counts, costs = (np.concatenate([getattr(o, k) for o in some], axis=1) for k in ("counts", "costs"))
        return RunOutcome(some[0].run, parts, counts, costs, np.concatenate([o.never for o in some]))

    @property
    def wall(self) -> Floats:
        return np.where(self.never, np.inf, sum(self.parts[c] for c in CAUSES))

    @property
    def draws(self) -> int:
        return int(self.counts.shape[1])

    @property
    def failures(self) -> Floats:
        """Number of unplanned stops."""
        return self._of(planned=False)

    @property
    def planned(self) -> Floats:
        return self._of(planned=True)

    def _of(self, planned: bool) -> Floats:
        rows = [i for i, f in enumerate(self.run.reliability.failures) if f.planned == planned]
        return np.asarray(self.counts[rows].sum(axis=0))

    def stops(self) -> tuple[Stops, ...]:
        """Stops by class."""
        risk, classes = self.run.risk, self.run.reliability.failures
        rates = risk.rates * DAY / risk.nodes
        low, high = quantiles(self.counts, [0.05, 0.95], axis=1)
        count, cost = self.counts.mean(axis=1), self.costs.mean(axis=1)
        numbers = zip(rates, count, low, high, cost, strict=False)
        return tuple(Stops(f.name, f.planned, *map(float, row)) for f, row in zip(classes, numbers, strict=True))

    @property
    def ettr(self) -> Floats:
        """Effective training time ratio: share of wall-clock time in steps that count, however slow."""
        p = self.parts
        return np.asarray((p["steps"] + p["stalls"] + p["slow"] + p["degraded"]) / self.wall)

    @property
    def goodput(self) -> Floats:
        """Share of wall-clock time that the run would take without failures, stalls and slow episodes."""
        return np.asarray(self.parts["steps"] / self.wall)

    @property
    def step(self) -> Floats:
        """Seconds of an average step of each draw, stalls and slow episodes with it."""
        p = self.parts
        return np.asarray((p["steps"] + p["stalls"] + p["slow"] + p["degraded"]) / self.run.steps)

    def done_by(self, seconds: float) -> float:
        """The share of draws that are done by then."""
        return float((self.wall <= seconds).mean())

    def quantile(self, p: float) -> float:
        """A quantile of the wall-clock time."""
        return float(quantiles(self.wall, p))

    def quantile_error(self, p: float) -> float:
        """The standard error of a quantile of the wall-clock time, from draws around it."""
        half = np.sqrt(p * (1 - p) / self.draws)
        low, high = quantiles(self.wall, [max(0.0, p - half), min(1.0, p + half)])
        return float(high - low) / 2 if high < np.inf else float("nan")

    def cost(self, price: float) -> Floats:
        """Cost at a price per GPU-hour, spares included."""
        spares = ((self.run.spares or 0) + self.run.policy.hot) * self.run.reliability.node_gpus
        return np.asarray(self.wall / HOUR * (self.run.gpus + spares) * price)

    def energy(self, watts: float, idle: float) -> Floats:
        """Energy in J, from the power of all GPUs while computing and while waiting."""
        down = np.asarray(sum(self.parts[c] for c in DOWN)) + self.parts["checkpoints"]
        return np.asarray((self.wall - down) * watts + down * idle)


def quantiles(values: Floats, p: Sequence[float] | float, axis: int | None = None) -> Floats:
    """Values among those given, which may be infinite."""
    return np.asarray(np.quantile(values, np.asarray(p), axis=axis, method="inverted_cdf"))
