"""The law's parameters from measured groups of tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.lookups.lookup_law import (
    LookupCorrection,
    LookupTraffic,
    backward_seconds,
    correction_features,
    forward_seconds,
    index_check_seconds,
    lookup_terms,
    lookup_traffic,
    matern,
)
from presage.costs.lookups.lookup_model import SHIPPED, VERSION, LookupParameters
from presage.costs.lookups.row_reuse import Lookups
from presage.costs.lookups.table import Table, TableArrays, table_arrays
from presage.files import write_whole

Array = npt.NDArray[Any]
PULL = 0.05

# Where the fit starts: seconds, seconds a byte or a lookup, bytes, warps; the rest are factors and powers.
FIXED = {"cache": 20e6, "own_cache": 120e3, "sms": 132.0, "resident": 8448.0}
CHECK = {"check_floor": 4.5e-6, "check_walk": 0.2e-6, "check_start": 1e-6, "check_lookups": 1e-12,
         "check_steps": 0.5e-10, "check_bags": 2e-10}  # fmt: skip
KERNELS = [f"{k}{h}" for k in range(4) for h in ("", "h")]  # h: of half-precision weights
FORWARD = {
    "forward_floor": 3.5e-6, "own": 0.1e-6, "l2": 0.06e-6, "miss": 0.2e-6, "miss_byte": 0.12e-9,
    "more_columns": 0.01e-6, "bag": 1.5e-6, "together": 0.8, "memory": 0.22e-12, "through": 0.07e-12,
    "output": 0.4e-12, "soft": 5.0, "soft_chain": 1.5, "loaded": 0.15, "spread": 2.8, "kept": 5e6, "kept_power": 2.0,
    "forward_cold": 2.3e-6,
} | {f"warps{k}": 4000.0 for k in KERNELS} | {f"pace{k}": 1.0 for k in KERNELS}  # fmt: skip
BACKWARD = {
    "backward_floor": 44e-6, "pass": 10e-6, "sort": 3.3e-12, "runs": 1e-12, "walk": 7.5e-6, "walk_lookups": 1e-12,
    "walk_steps": 0.5e-10, "walk_bags": 2e-10, "blocks": 16e-6, "row0": 1e-10, "row1": 1e-10, "row2": 2e-10,
    "row3": 2e-10, "row_half": 1.5, "row_adaptive": 1.5, "short0": 2e-11, "short1": 4e-11, "short2": 7e-11,
    "short3": 1.3e-10, "gradient": 0.04e-12, "long0": 1e-11, "long1": 4e-11, "long2": 8e-11, "long3": 1e-10,
    "block": 1.6e-8, "update": 0.1e-12, "short_more": 3e-11, "backward_cold": 5e-6,
}  # fmt: skip
START = FIXED | CHECK | FORWARD | BACKWARD


@dataclass(frozen=True)
class MeasuredLookup:
    """One group of tables as a rank holds it, with the seconds it took; not a number where that was not timed."""

    name: str
    kind: str
    tables: tuple[Table, ...]
    batch: int
    optimizer: str
    lengths: str
    lookups: tuple[Lookups, ...]
    forward: float
    backward: float
    check: float = float("nan")  # of the forward, the check of indices
    forward_cold: float = float("nan")  # with the L2 cache overwritten before
    backward_cold: float = float("nan")


@dataclass(frozen=True)
class LookupSample:
    """Measured groups as arrays."""

    flow: LookupTraffic  # of all tables
    group: Array  # of each table
    kind: Array  # of kernels, of each table
    times: dict[str, Array]  # by name, one a group

    def totals(self, p: Mapping[str, float]) -> Array:
        """Terms summed over the tables of each group, of the kernels that run alone."""
        found = lookup_terms(self.flow, p, [self.kind])
        starts = np.flatnonzero(np.diff(self.group, prepend=-1))
        return np.asarray(np.add.reduceat(found, starts, axis=0))


def sample(groups: Sequence[MeasuredLookup], p: Mapping[str, float] = START) -> LookupSample:
    each = [table_arrays(g.tables, g.batch, g.lookups) for g in groups]
    joined = TableArrays(*(np.concatenate([getattr(c, f.name) for c in each]) for f in fields(TableArrays)))
    number = np.repeat(np.arange(len(groups)), [len(c) for c in each])
    adaptive, varied = np.array([(g.optimizer != "sgd", g.lengths != "fixed") for g in groups])[number].T
    found = lookup_traffic(joined, p, adaptive, varied)
    wide = np.array([[c.dim.max() > w for w in (32, 64, 128)] for c in each]).sum(axis=1)
    names = ("forward", "backward", "check", "forward_cold", "backward_cold")
    return LookupSample(found, number, wide[number], {n: np.array([getattr(g, n) for g in groups]) for n in names})


def fit_law(groups: LookupSample, start: Mapping[str, float] = START) -> dict[str, float]:
    """The check of indices first, then the forward around it, and the backward; warm and cold together."""
    p = dict(start)
    p |= _part(groups, p, CHECK, lambda total, q, _: index_check_seconds(total, q), ("check",))
    p |= _part(groups, p, FORWARD, forward_seconds, ("forward", "forward_cold"))
    return p | _part(groups, p, BACKWARD, backward_seconds, ("backward", "backward_cold"))


def _part(
    groups: LookupSample, p: dict[str, float], names: Iterable[str], law: Callable[..., Array], times: Sequence[str]
) -> dict[str, float]:
    """The named parameters, where there is enough to fit them."""
    timed = [np.isfinite(groups.times[t]) for t in times]
    measured = np.concatenate([groups.times[t][ok] for t, ok in zip(times, timed, strict=True)])
    start = {n: p[n] for n in names}

    def found(q: dict[str, float]) -> Array:
        now = p | q
        total = groups.totals(now)
        return np.concatenate([law(total[ok], now, bool(cold)) for cold, ok in enumerate(timed)])

    return least(found, start, measured, PULL) if len(measured) > len(start) else start


def group_hash(group: MeasuredLookup) -> str:
    """Hash of what a group is, without its times."""
    tables = [
        (t.rows, t.dim, t.pooling, t.dtype, k.count, k.distinct)
        for t, k in zip(group.tables, group.lookups, strict=True)
    ]
    return sha256(repr((group.batch, group.optimizer, group.lengths, tables)).encode()).hexdigest()[:10]


def fit_lookups(
    measured: Sequence[MeasuredLookup], source: str = "", start: Mapping[str, float] = START
) -> LookupParameters:
    """The law first, then corrections of what it leaves."""
    groups = sample(measured, start)
    p = fit_law(groups, start)
    total = groups.totals(p)
    x = correction_features(total, p)
    left = [
        np.log(groups.times[n] / law(total, p))
        for n, law in (("forward", forward_seconds), ("backward", backward_seconds))
    ]
    return LookupParameters(
        p, fit_correction(x, left[0]), fit_correction(x, left[1]), source, frozenset(map(group_hash, measured))
    )


# Positive parameters of a law by least squares of ln(law / measured), with outliers counting less.

OUTLIER = 0.1  # residuals beyond it count as soft L1


def least(
    law: Callable[[dict[str, float]], Array], start: Mapping[str, float], measured: Array, pull: float, rounds: int = 40
) -> dict[str, float]:
    """Fit the logarithms of the parameters. One that is e times its start costs as much as a residual of `pull`, so
    what the data do not tell stays where it was."""
    from scipy.optimize import least_squares

    names, first, rows = list(start), np.log(np.array(list(start.values()))), len(measured)

    def residuals(x: Array) -> Array:
        seconds = law(dict(zip(names, np.exp(x).tolist(), strict=True)))
        return np.concatenate([np.log(np.maximum(seconds, 1e-12) / measured), pull * (x - first)])

    def loss(z: Array) -> Array:
        """Soft L1 for measurements, plain squares for the pull; with two derivatives."""
        soft = np.sqrt(1 + z)
        out = np.array([2 * (soft - 1), 1 / soft, -0.5 / soft**3])
        out[:, rows:] = np.stack([z, np.ones(len(z)), np.zeros(len(z))])[:, rows:]
        return out

    options = {"x_scale": "jac", "ftol": 1e-5, "xtol": 1e-6, "max_nfev": rounds}
    found = least_squares(residuals, first, loss=loss, f_scale=OUTLIER, **options)
    return dict(zip(names, np.exp(found.x).tolist(), strict=True))


# ---- what the law leaves: kernel ridge regression on a group's features

NOISE, SIZE = 0.04, 0.08  # errors of rows, and the spread of the smooth function
POINTS = 96  # groups it is held up by, chosen far from each other


def fit_correction(x: Array, left: Array) -> LookupCorrection:
    """From features of groups and ln(measured / law)."""
    center, scale, median = x.mean(axis=0), x.std(axis=0) + 1e-6, float(np.median(left))
    rows = (x - center) / scale
    points = rows[_spread(rows, min(POINTS, len(rows)))]
    seen, ridge = matern(rows, points), (NOISE / SIZE) ** 2 * matern(points, points)
    weights = np.linalg.solve(seen.T @ seen + ridge + 1e-6 * np.eye(len(points)), seen.T @ (left - median))
    return LookupCorrection(center, scale, points, weights, median)


def _spread(rows: Array, count: int) -> list[int]:
    """Rows far from each other: the one in the middle first, then always the one farthest from those there are."""
    out = [int((rows**2).sum(axis=1).argmin())]
    near = ((rows - rows[out[0]]) ** 2).sum(axis=1)
    while len(out) < count:
        out.append(int(near.argmax()))
        near = np.minimum(near, ((rows - rows[out[-1]]) ** 2).sum(axis=1))
    return out


def correction_json(correction: LookupCorrection) -> dict[str, Any]:
    """A correction as plain values."""
    named = {n: getattr(correction, n) for n in ("center", "scale", "points", "weights")}
    return {n: np.round(a, 5).tolist() for n, a in named.items()} | {"median": round(correction.median, 6)}


def save_lookup_parameters(found: LookupParameters, path: Path = SHIPPED) -> None:
    """Write fitted parameters as JSON."""
    value = {
        "version": VERSION,
        "source": found.source,
        "seen": sorted(found.seen),
        "params": {name: float(f"{value:.5g}") for name, value in found.params.items()},
        "forward": found.forward and correction_json(found.forward),
        "backward": found.backward and correction_json(found.backward),
    }
    write_whole(path, (json.dumps(value) + "\n").encode())
