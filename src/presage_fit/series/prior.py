"""What other groups of runs say about a group of which only two or three runs are known.

Split: a prior for a group is learned from other groups only (`learn`); the one that ships is learned from all groups of
MLPerf Training v5.0, single steps and block means apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.noise.priors import skewed_shape
from presage_fit.random_effects import EffectEstimate, sd_estimate
from presage_fit.series.residuals import CELLS, LevelPrior, learn_levels

if TYPE_CHECKING:
    from presage_fit.series.model import SeriesFit
import json
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from presage.noise.distribution import Distribution, Empirical, Fixed, LogNormal, Normal, Scaled
from presage.noise.model import Belief, CommonNoise, CredibleInterval, NoiseModel, ScheduledSlowdown, Stalls
from presage.noise.priors import SCORES
from presage_fit.step_logs import StepLog

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """A standard deviation that is about `sd`, known as well as from `dof` deviations (scaled inverse chi-square)."""

    sd: float
    dof: float

    def variances(self, rng: np.random.Generator, squares: float, dof: float, draws: int) -> Floats:
        """Draws of the variance, after deviations whose squares sum up to `squares`."""
        return np.asarray((self.dof * self.sd**2 + squares) / rng.chisquare(self.dof + dof, draws))

    def posterior(self, squares: float, dof: float) -> EffectEstimate:
        """What it is after deviations whose squares sum up to `squares`."""
        return sd_estimate((self.dof * self.sd**2 + squares) / (self.dof + dof), self.dof + dof)

    def estimate(self, squares: float, dof: float) -> float:
        return self.posterior(squares, dof).value


def _flat() -> Floats:
    return np.full(len(CELLS), 1.0 / len(CELLS))


@dataclass(frozen=True, eq=False)
class SeriesPrior:
    levels: LevelPrior = field(default_factory=LevelPrior)  # of sister runs
    slope: Scale = Scale(0.001, 2.0)  # their own drifts
    bulk: Scale = Scale(0.001, 1.0)  # width of a group's residuals
    width: Scale = Scale(0.35, 4.0)  # of the logarithm of their residuals' widths
    event: Scale = Scale(0.25, 3.0)  # an event's excess in sister runs, of the excess
    cells: Floats = field(default_factory=_flat)
    shape: Floats = field(default_factory=skewed_shape)
    shape_weight: float = 40.0  # residuals it counts as
    stall_rate: float = 0.01  # a record
    stall_weight: float = 0.5  # records x rate it counts as
    dispersion: float = 0.8  # of stalls between runs: 1 / variance of the runs' rates over their mean
    stall_seconds: float = 1.0  # median
    stall_log_sd: float = 1.4
    stall_seconds_weight: float = 3.0  # stalls it counts as
    groups: int = 0  # learned from


def learn(fits: Sequence[SeriesFit]) -> SeriesPrior:
    """From other groups' fits."""
    start = SeriesPrior()
    if len(fits) < 3:
        return start
    rates = np.array([(f.stalls.counts.sum() + 0.3) / max(1, f.stalls.records.sum()) for f in fits])
    sizes = [np.log(f.stalls.seconds) for f in fits if len(f.stalls.seconds)]
    pooled = np.concatenate(sizes) if sizes else np.array([])
    return SeriesPrior(
        levels=learn_levels([f.level_evidence for f in fits if f.runs > 1]),
        slope=_scale([(f.slope_squares, f.runs - 1) for f in fits], start.slope),
        bulk=_scale([(f.bulk.dof * f.bulk.width**2, f.bulk.dof) for f in fits], start.bulk),
        width=_scale([(f.width_squares, f.runs - 1) for f in fits if not f.shared.few], start.width),
        event=_scale([(e.squares, e.dof) for f in fits for e in f.events.values()], start.event),
        cells=_cells([f.bulk.evidence for f in fits]),
        shape=np.mean([f.bulk.shape for f in fits if f.bulk.scored >= 20] or [start.shape], axis=0),
        stall_rate=float(np.exp(np.log(rates).mean() + np.log(rates).var() / 2)),
        stall_weight=float(np.clip(1 / max(float(np.log(rates).var()), 0.1), 0.2, 5.0)),
        dispersion=start.dispersion,
        stall_seconds=float(np.exp(np.median(pooled))) if len(pooled) >= 5 else start.stall_seconds,
        stall_log_sd=float(pooled.std()) if len(pooled) >= 5 else start.stall_log_sd,
        groups=len(fits),
    )


def _scale(seen: Sequence[tuple[float, float]], start: Scale) -> Scale:
    """The scale and its dof that make the groups' sums of squares likeliest (each over its dof is an F variable)."""
    from scipy.special import betaln

    pairs = [(s, d) for s, d in seen if d > 0 and s >= 0]
    if len(pairs) < 3:
        return start
    squares, dofs = (np.array(v, np.float64) for v in zip(*pairs, strict=True))
    squares = np.maximum(squares, 1e-18)
    middle = float(np.median(squares / dofs)) or start.sd**2
    best = (-np.inf, start)
    for dof in (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0):
        for var in middle * np.exp(np.linspace(-2.5, 2.5, 51)):
            f = squares / (dof * var)
            fit = np.sum(dofs / 2 * np.log(f) - (dofs + dof) / 2 * np.log1p(f) - betaln(dofs / 2, dof / 2))
            best = max(best, (float(fit), Scale(float(np.sqrt(var)), dof)), key=lambda b: b[0])
    return best[1]


def _cells(evidence: Sequence[Floats]) -> Floats:
    """How often each cell is the case: from a flat start, five rounds of expectation and maximisation."""
    weights = _flat()
    each = np.array([np.exp(e - e.max()) for e in evidence])
    for _ in range(5):
        posterior = each * weights
        weights = (posterior / posterior.sum(axis=1, keepdims=True)).mean(axis=0)
    return np.asarray(0.9 * weights + 0.1 * _flat())


# ---- The priors that ship: for single steps, for means of 32 steps (or about as many), for means between evaluation

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


# A fit as a noise model: its numbers with their 90% intervals, where `presage.noise.model` keeps them.

POINTS = 32  # values that stand for the jitter's shape


def belief_of(fit: SeriesFit, source: str) -> Belief:
    """Common effects, stalls and scheduled slow steps; jitter and events of means are those of the means."""
    common, intervals = _common(fit)
    stalls, more = _stalls(fit)
    scheduled = tuple(ScheduledSlowdown(kind, _factor(fit, kind)) for kind in fit.events)
    sources = dict.fromkeys(("common", "stalls", "scheduled"), source)
    noise = NoiseModel(common=common, stalls=stalls, scheduled=scheduled)
    return Belief(noise, intervals | more | _event_intervals(fit), sources)


def _common(fit: SeriesFit) -> tuple[CommonNoise, dict[str, CredibleInterval]]:
    phi, share = (np.array(v) for v in zip(*CELLS, strict=True))
    run, run_low, run_high = fit.levels.spread()
    slope = fit.prior.slope.estimate(fit.slope_squares, fit.runs - 1)
    width, low, high = _width(fit)
    unit = _unit_shape(fit)
    kept = fit.cells * share
    part = float(kept.sum())
    least, most = _interval(share, fit.cells)
    common = CommonNoise(
        sd=float(np.sqrt(part) * width * unit.std()),
        correlation=float(kept @ phi / part) if part > 0 else 0.0,
        drift=_drift(fit),
        drift_sd=slope,
        run_sd=run,
        jitter=_jitter(unit, width * fit.level * float(np.sqrt(1 - part))),
    )
    off = 1.645 * slope / float(np.sqrt(fit.runs))
    intervals = {
        "common.drift": CredibleInterval(common.drift - off, common.drift + off),
        "common.sd": CredibleInterval(
            float(np.sqrt(least) * low * unit.std()), float(np.sqrt(most) * high * unit.std())
        ),
        "common.correlation": CredibleInterval(*_interval(phi, kept)) if part > 0 else CredibleInterval(0.0, 0.99),
        "common.drift_sd": fit.prior.slope.posterior(fit.slope_squares, fit.runs - 1).interval,
        "common.run_sd": CredibleInterval(run_low, run_high),
    }
    if isinstance(common.jitter, Scaled):
        factor = common.jitter.factor
        intervals["common.jitter.factor"] = CredibleInterval(factor * low / width, factor * high / width)
    return common, intervals


def _width(fit: SeriesFit) -> tuple[float, float, float]:
    """Width of the residuals of a run, and the interval of a group's typical one."""
    prior, dof = fit.prior, fit.bulk.dof
    between = prior.width.estimate(fit.width_squares, fit.runs - 1) / np.sqrt(fit.runs)
    sd = float(np.hypot(between, 1 / np.sqrt(2 * (prior.bulk.dof + dof))))
    middle = prior.bulk.estimate(dof * fit.bulk.width**2, dof) * float(np.mean(fit.bulk.spread))
    return middle, middle * float(np.exp(-1.645 * sd)), middle * float(np.exp(1.645 * sd))


def _unit_shape(fit: SeriesFit) -> Floats:
    """Evenly likely residuals, in widths, the middle one 0."""
    from scipy.special import ndtri

    values = np.interp(ndtri((np.arange(POINTS) + 0.5) / POINTS), SCORES, fit.shape)
    return np.asarray(values - np.median(values))


def _jitter(unit: Floats, seconds: float) -> Distribution:
    if seconds < 1e-9 or not unit.any():
        return Fixed(0.0)
    return Scaled(Empirical(np.round(unit, 4)), seconds, 0.0)


def _drift(fit: SeriesFit) -> float:
    """From the first step to the last, by the straight line through the shared curve."""
    curve = fit.shared.curve
    if len(curve.steps) < 3:
        return 0.0
    place = (curve.steps - curve.steps[0]) / max(1.0, float(curve.steps[-1] - curve.steps[0]))
    return float(np.polyfit(place, curve.values, 1)[0] + fit.shared.slopes.mean())


def _stalls(fit: SeriesFit) -> tuple[Stalls, dict[str, CredibleInterval]]:
    from scipy.special import gammaincinv

    shape, scale = fit.stall_rate()
    hours = fit.nodes * fit.level * fit.stride / 3600
    median, log_sd, n = _seconds(fit)
    low, high = (float(gammaincinv(shape, p)) * scale / hours for p in (0.05, 0.95))
    error = 1.645 * log_sd / np.sqrt(n)
    return Stalls(shape * scale / hours, LogNormal(median, log_sd)), {
        "stalls.per_node_hour": CredibleInterval(low, high),
        "stalls.seconds.median": CredibleInterval(median * float(np.exp(-error)), median * float(np.exp(error))),
    }


def _seconds(fit: SeriesFit) -> tuple[float, float, float]:
    """Median and spread of stalls seen and of those of the prior, and how many that is."""
    prior, logs = fit.prior, np.log(fit.stalls.seconds)
    w, n = prior.stall_seconds_weight, len(logs)
    center = (logs.sum() + w * np.log(prior.stall_seconds)) / (n + w)
    off = np.sum((logs - center) ** 2) + w * (prior.stall_log_sd**2 + (np.log(prior.stall_seconds) - center) ** 2)
    return float(np.exp(center)), float(np.sqrt(off / (n + w))), n + w


def _factor(fit: SeriesFit, kind: str) -> Distribution:
    e = fit.events[kind]
    return Normal(1 + e.excess, e.size * fit.prior.event.estimate(e.squares, e.dof))


def _event_intervals(fit: SeriesFit) -> dict[str, CredibleInterval]:
    """Intervals of the mean of each event's factor."""
    found = {}
    for i, e in enumerate(fit.events.values()):
        error = 1.645 * e.size * fit.prior.event.estimate(e.squares, e.dof) / np.sqrt(e.seen)
        found[f"scheduled.{i}.factor.center"] = CredibleInterval(
            1 + e.excess - float(error), 1 + e.excess + float(error)
        )
    return found


def _interval(values: Floats, weights: Floats) -> tuple[float, float]:
    """The middle 90% of weights on grid points, each of which stands for the stretch half way to its neighbours."""
    points = np.unique(values)
    total = np.array([weights[values == p].sum() for p in points])
    edges = np.concatenate([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]])
    low, high = np.interp((0.05, 0.95), np.append(0.0, np.cumsum(total) / total.sum()), edges)
    return float(low), float(high)
