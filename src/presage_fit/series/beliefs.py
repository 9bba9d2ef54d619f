"""A fit as a noise model: its numbers with their 90% intervals, where `presage.noise.model` keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.noise.distribution import Distribution, Empirical, Fixed, LogNormal, Normal, Scaled
from presage.noise.model import Belief, CommonNoise, CredibleInterval, NoiseModel, ScheduledSlowdown, Stalls
from presage_fit.series.bulk import CELLS, SCORES

if TYPE_CHECKING:
    from presage_fit.series.model import SeriesFit

__all__ = ["belief_of"]

Floats = NDArray[np.float64]
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
        "common.drift_sd": CredibleInterval(*sorted(fit.prior.slope.interval(fit.slope_squares, fit.runs - 1))),
        "common.run_sd": CredibleInterval(run_low, run_high),
    }
    if isinstance(common.jitter, Scaled):
        factor = common.jitter.factor
        intervals["common.jitter.factor"] = CredibleInterval(factor * low / width, factor * high / width)
    return common, intervals


def _width(fit: SeriesFit) -> tuple[float, float, float]:
    """Of the residuals of a run, and the interval of a group's typical one."""
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
    """Of the mean of each event's factor."""
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
