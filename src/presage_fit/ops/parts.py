"""How much of a difference between averages is real, and what is chance: shares that are kept of raw effects.

The average of a replica over 20 steps differs from the others' even if all replicas are alike. Of every raw effect the
share `1 - chance / seen` is kept, both variances, with chance taken one standard error above its mean: so an effect
seen in a few hundred noisy microbatches is no larger than it is. Units far from all others (a slow GPU) are kept whole:
they say nothing about the others. What all columns of a microbatch share (`load`) and how they differ from it are
judged apart: their chance differs a hundredfold where sequences vary in length.

Arrays are (..., columns, steps); NaN where a cell has no such operation.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Share = tuple[float, float]  # of the load, and of what columns differ by
FLOOR = 1e-2  # shorter than this share of its level counts as this: logarithms of nothing are of no use
LEAST_LEVEL = 1e-3  # of a column's average
FAR = 4.0  # standard deviations from the others, and of chance, from which on a unit is one of its own
ALIKE = 0.8  # replicas whose microbatches' loads correlate more than this have the same microbatches
SEEN = 20  # microbatches of a replica, to tell


def averaged(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    """The mean of what is there, 0 where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nan_to_num(np.nanmean(values, axis=axis)))


def variances(values: Floats, axis: int) -> Floats:
    """Over an axis, without the loss of freedom by the mean; NaN where there are not two values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanvar(values, axis=axis, ddof=1))


@dataclass(frozen=True, eq=False)
class Channels:
    """Columns weighted by their seconds: what they share and what is left."""

    weight: Floats  # by column, adding up to 1

    def split(self, values: Floats) -> tuple[Floats, Floats]:
        """What channels have in common (by their weights), and what is left of each."""
        there = np.isfinite(values)
        weight = np.where(there, self.weight[:, None], 0.0)
        total = weight.sum(axis=-2, keepdims=True)
        load = (weight * np.nan_to_num(values)).sum(axis=-2, keepdims=True)
        load = np.where(total > 0, load / np.maximum(total, 1e-300), np.nan)
        return load, values - load

    def kept(self, values: Floats, share: Share) -> Floats:
        """So much of what is common, and so much of the rest."""
        load, rest = self.split(values)
        return np.asarray(share[0] * load + share[1] * rest)

    def variances(self, values: Floats, axis: int) -> Share:
        """Over an axis and averaged over the others: of the load, and of the rest with every column by its weight."""
        load, rest = (averaged(variances(x, axis)[..., None], _all_but_columns(x, axis)) for x in self.split(values))
        return float(load.sum()), float((rest * self.weight).sum())


def _all_but_columns(values: Floats, axis: int) -> tuple[int, ...]:
    """The axes to average over once `axis` is gone and one is put at the end: all but that of the columns."""
    gone = axis % values.ndim
    columns = values.ndim - 2 - (gone < values.ndim - 2)
    return tuple(k for k in range(values.ndim) if k != columns)


def real(seen: Share, chance: Share, units: float) -> Share:
    """The shares to keep, of differences between so many units."""
    over = 1 + np.sqrt(2 / max(units - 1, 1))
    a, b = (min(1.0, max(0.0, 1 - over * c / s)) if s > 0 else 0.0 for s, c in zip(seen, chance, strict=True))
    return a, b


def levels(seconds: Floats) -> tuple[Floats, Channels]:
    """What stays from step to step: (replicas, microbatches, columns) of (..., steps), and the columns' weights.

    A column's average, a replica's difference from it (its stages' too: columns differ by stage), that of a place in
    the order of microbatches, and that of each single operation.
    """
    if not seconds.size:
        return np.zeros(seconds.shape[:3]), Channels(np.zeros(seconds.shape[2]))
    mean = averaged(seconds, (0, 1, 3))
    channels = Channels(mean / mean.sum() if mean.sum() > 0 else np.full(len(mean), 1 / max(len(mean), 1)))
    relative = seconds / np.maximum(mean, 1e-300)[:, None]
    left = relative - averaged(relative, (0, 1))
    out = np.ones(seconds.shape[:3])
    for axis in (1, 0, None):
        effect = left if axis is None else np.expand_dims(averaged(left, axis), axis)
        lasting = _lasting(channels, effect.reshape(-1, *effect.shape[-2:])).reshape(effect.shape[:-1])
        out = out + lasting
        left = left - lasting[..., None]
    return np.maximum(out, LEAST_LEVEL) * mean, channels


def _lasting(channels: Channels, effect: Floats) -> Floats:
    """The real part of the mean over steps: (units, columns) of (units, columns, steps).

    Columns far from other units' (those of one slow stage) do not count in what a unit's columns share.
    """
    far = _far(*_means(effect))
    usual = np.where(far & ~far.all(axis=1, keepdims=True), False, True)
    load = channels.split(np.where(usual[..., None], effect, np.nan))[0]
    return _real_means(load, np.ones(1)) + _real_means(effect - load, channels.weight)


def _means(effect: Floats) -> tuple[Floats, Floats]:
    """Over steps, and their variances by chance."""
    return averaged(effect, -1), np.nan_to_num(variances(effect, -1)) / effect.shape[-1]


def _far(mean: Floats, chance: Floats) -> NDArray[np.bool_]:
    middle = np.median(mean, axis=0)
    wide = np.maximum(1.4826 * np.median(np.abs(mean - middle), axis=0), np.sqrt(np.median(chance, axis=0)))
    return np.asarray(np.abs(mean - middle) > FAR * wide)


def _real_means(effect: Floats, weight: Floats) -> Floats:
    mean, chance = _means(effect)
    far = _far(mean, chance)
    bulk = np.where(far, np.nan, mean)
    seen = float((np.nan_to_num(variances(bulk, 0)) * weight).sum())
    typical = float((averaged(np.where(far, np.nan, chance), 0) * weight).sum())
    share = real((seen, 0.0), (typical, 0.0), len(mean))[0]
    center = averaged(bulk, 0)
    return np.asarray(center + np.where(far, 1.0, share) * (mean - center))


@dataclass(frozen=True, eq=False)
class Split:
    """Logarithms of seconds over their levels as nested effects, each of its real size.

    `step` (columns, steps), `replica` (replicas, columns, steps) in a step, `own` (replicas, microbatches, columns,
    steps) of each microbatch. `even`: replicas differ less than chance lets them, as where microbatches are balanced.
    """

    step: Floats
    replica: Floats
    own: Floats
    together: int  # neighbouring replicas with the same microbatches
    even: bool
    shares: tuple[Share, Share]  # kept of the step's and the replica's raw effects


def nested(seconds: Floats, level: Floats, channels: Channels) -> Split:
    """Step, replica within step, microbatch within replica."""
    if not seconds.size:
        return Split(np.zeros(seconds.shape[2:]), averaged(seconds, 1), seconds, 1, False, ((0.0, 0.0), (0.0, 0.0)))
    logs = _logs(seconds, level[..., None])
    raw = averaged(logs, (0, 1))
    raw = raw - raw.mean(axis=-1, keepdims=True)
    together = _together(channels.split(logs - raw)[0][:, :, 0])
    step = _step_share(channels, logs - raw, raw, together)
    logs = logs - channels.kept(raw, step)
    raw_replica = averaged(logs, 1)
    replica, even = _replica_share(channels, logs, raw_replica)
    own = logs - channels.kept(raw_replica, replica)[:, None]
    widened = [1 / np.sqrt(1 - min(s, 0.99) / max(logs.shape[1], 1)) for s in replica]
    free = raw.shape[-1] / max(raw.shape[-1] - 1, 1)
    return Split(
        step=channels.kept(raw, ((step[0] * free) ** 0.5, (step[1] * free) ** 0.5)),
        replica=channels.kept(raw_replica, (replica[0] ** 0.5, replica[1] ** 0.5)),
        own=channels.kept(own, (widened[0], widened[1])),
        together=together,
        even=even,
        shares=(step, replica),
    )


def _logs(seconds: Floats, level: Floats) -> Floats:
    """Logarithms of seconds over their level; 0 where the level is 0."""
    ratio = np.maximum(seconds, FLOOR * level) / np.where(level > 0, level, 1.0)
    return np.where(level > 0, np.log(np.where(ratio > 0, ratio, 1.0)), np.where(np.isnan(seconds), np.nan, 0.0))


def _step_share(channels: Channels, left: Floats, raw: Floats, together: int) -> Share:
    replicas, microbatches = left.shape[:2]
    apart, members = (averaged(left, 1), replicas / together) if replicas > 1 else (left[0], microbatches)
    load, rest = channels.variances(apart, 0) if replicas else (0.0, 0.0)
    return real(channels.variances(raw, -1), (load / members, rest / members), raw.shape[-1])


def _replica_share(channels: Channels, logs: Floats, raw: Floats) -> tuple[Share, bool]:
    """What to keep of the replicas' effects in a step, and whether there is less of them than chance makes."""
    replicas, microbatches, _, steps = logs.shape
    if replicas < 2 or microbatches < 2:
        return (0.0, 0.0), False
    seen, (load, rest) = channels.variances(raw, -1), channels.variances(logs, 1)
    chance = (load / microbatches, rest / microbatches)
    least = 1 - FAR * np.sqrt(2 / (replicas * steps))
    return real(seen, chance, replicas * steps), bool(0 < seen[0] < least * chance[0])


def _together(load: Floats) -> int:
    """How many neighbouring replicas have the same microbatches: 1 unless all of them come in such groups."""
    replicas = len(load)
    flat = np.nan_to_num(load.reshape(replicas, -1))
    if replicas < 2 or flat.shape[1] < SEEN or (flat.std(axis=1) == 0).any():
        return 1
    alike = np.asarray(np.corrcoef(flat) > ALIKE)
    for size in (s for s in range(replicas, 1, -1) if replicas % s == 0):
        block = np.kron(np.eye(replicas // size, dtype=bool), np.ones((size, size), bool))
        if alike[block].all():
            return size
    return 1
