"""Fleets of GPUs: the slow end of a fleet, predicted from 50 of its GPUs.

Of each table 200 random sets of 50 GPUs are fitted, one by one. Predicted are the 99th percentile of GPUs' factors and
the expected largest of 256, of the GPUs that were not in the set (`p99`, `largest`) and of the whole fleet
(`..._of_fleet`); where fewer are left than 256, of as many as are left. Measured, the expected largest of n of N GPUs
is exact: over all sets of n of them, none twice. Nothing is fitted on the table that is scored, but for the 50 GPUs:
how common slow GPUs are comes from fleets of other sites (`presage_fit.fleet`). Beside it: a Normal
distribution fitted to the 50, and the 50 as they are (their largest, for the largest of n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.distribution import Normal
from presage.pool.pool import SERIAL, Pool
from presage_fit.fleet import Fleet, Tail, fit_fleet, fit_tail, without
from presage_fit.fleet_files import read_fleet
from presage_fit.random_effects import EffectEstimate
from presage_validation.score import AccuracyResult, Row, Skipped, in_turn

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SETS, TAKEN, GROUP = 200, 50, 256
PIECE = 10  # sets in one piece of work
FEWEST_LEFT = 50
BASELINES = ("normal", "sample")
WHERE = ("", "_of_fleet")


@dataclass(frozen=True)
class FleetResult(AccuracyResult):
    """Our predictions, those of the baselines, and how often the measurement was within our 90%."""

    baselines: Mapping[str, AccuracyResult] = field(default_factory=dict)
    coverage: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by table, by metric
    sizes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)  # by table: GPUs, n of those left, of all

    def lines(self) -> list[tuple[str, ...]]:
        """Every prediction, ours and the baselines', beside its measurement, for a CSV file."""
        others = [(f"{m} {k}", *rest) for k, b in self.baselines.items() for m, *rest in b.lines()[1:]]
        return [*super().lines(), *others]

    def to_json(self) -> dict[str, Any]:
        names = ("gpus", "n", "n_of_fleet")
        return super().to_json() | {
            "baselines": {k: r.to_json()["metrics"] for k, r in self.baselines.items()},
            "interval_90_coverage": self.coverage,
            "sizes": {k: dict(zip(names, v, strict=True)) for k, v in self.sizes.items()},
        }


@dataclass(frozen=True)
class _Set:
    """One set of 50: what is predicted for it, by whom, and what is so."""

    metric: str
    name: str
    measured: float
    ours: EffectEstimate
    others: dict[str, float]


def score_fleets(
    paths: Sequence[Path],
    tell: Callable[[str], None] = lambda _: None,
    sets: int = SETS,
    seed: int = 0,
    pool: Pool = SERIAL,
) -> FleetResult:
    """Every table that has GPUs enough."""
    found: dict[str, list[_Set]] = {}
    sizes: dict[str, tuple[int, int, int]] = {}
    skipped = []
    for path in in_turn(paths, tell, lambda p: p.name):
        try:
            fleet = fit_fleet(read_fleet(path))
            _enough(fleet)
        except PresageError as e:
            skipped.append(Skipped(path.name, str(e)))
            continue
        gpus = len(fleet.gpus)
        sizes[fleet.name] = gpus, min(GROUP, gpus - TAKEN), min(GROUP, gpus)
        skipped += [Skipped(f"{path.name}, {row}", reason) for row, reason in fleet.skipped]
        found[fleet.name] = list(_sets(fleet, sets, np.random.default_rng(seed), pool))
    if not found:
        raise PresageError(f"no table of a fleet to score: {skipped[0].reason if skipped else 'no file was given'}")
    return _result(", ".join(p.name for p in paths), found, sizes, tuple(skipped))


def _enough(fleet: Fleet) -> None:
    if len(fleet.gpus) < TAKEN + FEWEST_LEFT:
        raise PresageError(f"it has {len(fleet.gpus)} GPUs: {TAKEN} to fit and {FEWEST_LEFT} to predict are needed")


def _sets(fleet: Fleet, sets: int, rng: np.random.Generator, pool: Pool) -> Iterable[_Set]:
    orders = [(number, rng.permutation(len(fleet.factors))) for number in range(sets)]
    pieces = [orders[i : i + PIECE] for i in range(0, sets, PIECE)]
    return chain.from_iterable(pool.map(partial(_scored, fleet.name, fleet.factors), pieces))


def _scored(name: str, factors: Floats, orders: Sequence[tuple[int, Ints]]) -> list[_Set]:
    """Scores of some sets, each the first GPUs of an order."""
    others, out = without(name), list[_Set]()
    for number, order in orders:
        taken, left = factors[order[:TAKEN]], factors[order[TAKEN:]]
        tail = fit_tail(np.log(taken), others)
        for where, these in zip(WHERE, (left, factors), strict=True):
            out += _compared(f"set {number}", where, tail, taken, these)
    return out


def _compared(name: str, where: str, tail: Tail, taken: Floats, these: Floats) -> Iterable[_Set]:
    n = min(GROUP, len(these))
    normal = Normal(float(taken.mean()), float(taken.std(ddof=1)))
    guess = {"normal": float(normal.quantile(0.99)), "sample": float(np.quantile(taken, 0.99))}
    yield _Set(f"p99{where}", name, float(np.quantile(these, 0.99)), tail.quantile(0.99), guess)
    guess = {"normal": normal.largest(n).mean, "sample": float(taken.max())}
    yield _Set(f"largest{where}", name, expected_largest(these, n), tail.largest(n), guess)


def expected_largest(values: Floats, n: int) -> float:
    """Expected largest of n values, none twice: the i-th smallest is it in (i - 1 over n - 1) of (N over n) sets."""
    from scipy.special import gammaln

    i = np.arange(n, len(values) + 1)
    ways = gammaln(i) - gammaln(n) - gammaln(i - n + 1)
    share = np.exp(ways - np.logaddexp.reduce(ways))
    return float(share @ np.sort(values)[n - 1 :])


def _result(
    path: str, found: dict[str, list[_Set]], sizes: dict[str, tuple[int, int, int]], skipped: tuple[Skipped, ...]
) -> FleetResult:
    def rows(predicted: Callable[[_Set], float]) -> tuple[Row, ...]:
        return tuple(Row(s.metric, k, s.name, predicted(s), s.measured) for k, v in found.items() for s in v)

    cover = {k: _coverage(v) for k, v in found.items()}
    rates = {
        f"{m}_interval_90_coverage": float(np.mean([c[m] for c in cover.values()])) for m in next(iter(cover.values()))
    }
    baselines = {b: AccuracyResult("fleet", path, rows(lambda s, b=b: s.others[b])) for b in BASELINES}  # type: ignore[misc]
    ours = rows(lambda s: s.ours.value)
    return FleetResult("fleet", path, ours, skipped, rates, baselines=baselines, coverage=cover, sizes=sizes)


def _coverage(sets: Sequence[_Set]) -> dict[str, float]:
    metrics = dict.fromkeys(s.metric for s in sets)
    within = {m: [s.ours.low <= s.measured <= s.ours.high for s in sets if s.metric == m] for m in metrics}
    return {m: float(np.mean(v)) for m, v in within.items()}
