"""How one card varies over time: second halves of long series of one kernel or step, predicted from their first halves.

Split: of each series the first half is seen, the second predicted; nothing is learned from other series.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import WRONG_VALUE, InputError, PresageError
from presage.files.reading import MOST, read_json
from presage.pool.pool import SERIAL, Pool
from presage_fit.series.model import continue_series, settled, slow_share
from presage_validation.score import Skipped, run_cases

if TYPE_CHECKING:
    from presage.noise.distribution import Distribution

Floats = NDArray[np.float64]
TAIL_LEVELS = {"p95": 0.95, "p99": 0.99}
LEAST = 40  # records of a series
HOST_BOUND = 0.05  # p95 over p50 at steady clocks: kernels do not vary so much, launches do


@dataclass(frozen=True)
class Ratio:
    """A quantile over the median, less 1, of the second half."""

    measured: float
    predicted: float
    low: float
    high: float
    first_half: float  # of the first half as it is: the plain guess

    @property
    def error(self) -> float:
        return self.predicted - self.measured


@dataclass(frozen=True)
class Half:
    """A series: what its second half shows beside what its first predicts, and why it varies."""

    series: str
    n: int
    ratios: Mapping[str, Ratio]
    warm_up: int  # records before the series had settled
    slow_share: float  # of the variance, in means of 25 records
    mhz: tuple[float, float] | None  # lowest and highest clock in the second half
    watts: float | None
    cause: str


@dataclass(frozen=True)
class TemporalResult:
    """Series that were scored, and what was left out."""

    path: str
    rows: tuple[Half, ...]
    skipped: tuple[Skipped, ...] = ()

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for q in TAIL_LEVELS:
            ratios = [r.ratios[q] for r in self.rows]
            if ratios:
                found[f"{q}_over_p50_error_points"] = 100 * float(np.median([abs(r.error) for r in ratios]))
                found[f"{q}_over_p50_worst_points"] = 100 * float(max(abs(r.error) for r in ratios))
                found[f"{q}_interval_90_coverage"] = float(np.mean([r.low <= r.measured <= r.high for r in ratios]))
                plain = [abs(r.first_half - r.measured) for r in ratios]
                found[f"{q}_first_half_error_points"] = 100 * float(np.median(plain))
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "temporal",
            "path": self.path,
            "n": len(self.rows),
            "skipped": [asdict(s) for s in self.skipped],
            "metrics": self.metrics(),
            "groups": {r.series: asdict(r) for r in self.rows},
        }

    def lines(self) -> list[tuple[str, ...]]:
        """Every ratio beside its measurement, for a CSV file."""
        rows = [(r.series, q, f"{x.predicted:.6g}", f"{x.low:.6g}", f"{x.high:.6g}", f"{x.measured:.6g}")
                for r in self.rows for q, x in r.ratios.items()]  # fmt: skip
        return [("series", "quantile", "predicted", "low", "high", "measured"), *rows]


def score_temporal(path: Path, tell: Callable[[str], None], seed: int = 0, pool: Pool = SERIAL) -> TemporalResult:
    """Every series that is long enough."""
    table = _read(path)
    each = [(i, _name(i, series), series) for i, series in enumerate(table["series"])]
    done, skipped = run_cases(partial(_scored, seed, table.get("smi")), each, tell, lambda one: one[1], pool)
    return TemporalResult(str(path), tuple(half for _, half in done), tuple(skipped))


def _name(number: int, series: Any) -> str:
    return str(series.get("name", number)) if isinstance(series, dict) else str(number)


def _scored(seed: int, smi: Any, one: tuple[int, str, Any]) -> Half:
    number, name, series = one
    try:
        values = np.asarray(series["ms"], np.float64)
        values = values[np.isfinite(values) & (values > 0)]
        if len(values) < LEAST:
            raise ValueError(f"fewer than {LEAST} records")
        return _half(name, values, _clock(series, smi), np.random.default_rng([seed, number]))
    except WRONG_VALUE as e:
        raise PresageError(f"cannot be used: {e}") from e


def _read(path: Path) -> dict[str, Any]:
    table = read_json(path, MOST)
    if not isinstance(table, dict) or not isinstance(table.get("series"), list):
        raise InputError(path, "needs a list of series, each with its name and its times in ms", "series")
    return table


def _half(name: str, values: Floats, clock: Floats | None, rng: np.random.Generator) -> Half:
    half = len(values) // 2
    first, second = values[:half], values[half:]
    drawn = continue_series(first, len(second), rng)
    ratios = {q: _ratio(first, second, drawn, p) for q, p in TAIL_LEVELS.items()}
    warm, share = settled(first), slow_share(first[settled(first) :])
    mhz = (float(clock[:, 1].min()), float(clock[:, 1].max())) if clock is not None else None
    watts = float(np.median(clock[:, 3])) if clock is not None else None
    return Half(name, len(values), ratios, warm, share, mhz, watts, _cause(ratios, warm, mhz))


def _ratio(first: Floats, second: Floats, drawn: Floats, p: float) -> Ratio:
    each = np.quantile(drawn, p, axis=1) / np.median(drawn, axis=1) - 1
    low, middle, high = (float(x) for x in np.quantile(each, [0.05, 0.5, 0.95]))
    return Ratio(_above(second, p), middle, low, high, _above(first, p))


def _above(values: Floats, p: float) -> float:
    return float(np.quantile(values, p) / np.median(values)) - 1


def _clock(series: Mapping[str, Any], smi: Sequence[Sequence[float]] | None) -> Floats | None:
    """Clock and power readings from the later half of a series on."""
    if not smi or "start" not in series or "end" not in series:
        return None
    table = np.asarray(smi, np.float64)
    middle = (series["start"] + series["end"]) / 2
    found = table[(table[:, 0] >= middle) & (table[:, 0] <= series["end"])]
    return found if len(found) else None


def _cause(ratios: Mapping[str, Ratio], warm_up: int, mhz: tuple[float, float] | None) -> str:
    """What the spread comes from, by what the clock did."""
    if mhz is not None and mhz[1] - mhz[0] > 15:
        return "clock steps at the power limit"
    if ratios["p95"].measured > HOST_BOUND:
        return "the host's launches"
    return "warm-up, then jitter" if warm_up else "jitter"


# Scores of a predicted distribution against what came: quantile errors, Wasserstein, CRPS, coverage, KS.

LEVELS = (0.5, 0.95, 0.99)
BINS = 10
EVEN = (np.arange(1000) + 0.5) / 1000  # probabilities that stand for a distribution


@dataclass(frozen=True)
class Forecast:
    """How one run compares with what was predicted of it; errors are fractions."""

    n: int
    p50_error: float
    p95_error: float
    p99_error: float
    w1_over_mean: float
    crps: float  # of the mean step
    covered_95: int  # steps not above their own predicted 95% quantile
    ks: float
    ks_floor: float
    pit: tuple[int, ...]  # steps in each tenth of their predicted distributions


def forecast(draws: Floats, seen: Floats, pool: Floats | None = None) -> Forecast:
    """Scores of draws [draws, records] against records. `pool`: predicted distribution of the run's steps, sorted."""
    pool, mean = own_distribution(draws) if pool is None else pool, float(seen.mean())
    errors = [float(np.quantile(pool, p) / np.quantile(seen, p) - 1) for p in LEVELS]
    below = (draws < seen).mean(axis=0) + (draws == seen).mean(axis=0) / 2
    tenths = np.bincount(np.minimum((below * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    return Forecast(
        n=len(seen),
        p50_error=errors[0],
        p95_error=errors[1],
        p99_error=errors[2],
        w1_over_mean=wasserstein(pool, seen) / mean,
        crps=float(crps(draws, seen).mean()) / mean,
        covered_95=int((seen <= np.quantile(draws, 0.95, axis=0)).sum()),
        ks=ks_distance(pool, seen),
        ks_floor=ks_floor(len(seen)),
        pit=tuple(int(t) for t in tenths),
    )


def own_distribution(draws: Floats) -> Floats:
    """The distribution of a run's own steps, sorted: for each quantile the middle one of the drawn runs'."""
    return np.asarray(np.sort(np.median(np.sort(draws, axis=1), axis=0)))


def sample_quantile(times: Floats, n: int, p: float) -> float:
    """The quantile that n steps show, in the middle of many such samples: few steps show less of a tail than there is,
    or one step makes all of it."""
    count = max(1, len(times) // n)
    mixed = np.random.default_rng(0).permutation(times)[: count * n]
    return float(np.median(np.quantile(mixed.reshape(count, -1), p, axis=1)))


def crps(draws: Floats, seen: Floats) -> Floats:
    """Continuous ranked probability score of each record, E|X - y| - E|X - X'| / 2, from draws [draws, records]."""
    ordered = np.sort(draws, axis=0)
    n = len(ordered)
    rank = (2 * np.arange(1, n + 1) - n - 1) / n**2
    return np.asarray(np.abs(draws - seen).mean(axis=0) - rank @ ordered)


def ks_floor(n: int) -> float:
    """Expected Kolmogorov-Smirnov distance of n independent draws from their own distribution."""
    return 0.869 / float(np.sqrt(n))


def ks_critical(n: int) -> float:
    """Exceeded by such n draws in 5% of cases."""
    return 1.358 / float(np.sqrt(n))


def ks_distance(pool: Floats, seen: Floats) -> float:
    """Largest distance between the predicted distribution (sorted draws) and that of the records."""
    y = np.sort(seen)
    n = len(y)
    upper = np.searchsorted(pool, y, "right") / len(pool)
    lower = np.searchsorted(pool, y, "left") / len(pool)
    return float(max(np.max(np.arange(1, n + 1) / n - lower), np.max(upper - np.arange(n) / n), 0.0))


def wasserstein(pool: Floats, seen: Floats) -> float:
    """Area between the two quantile functions."""
    p = (np.arange(20_000) + 0.5) / 20_000
    mine = pool[(p * len(pool)).astype(np.int64)]
    theirs = np.sort(seen)[(p * len(seen)).astype(np.int64)]
    return float(np.abs(mine - theirs).mean())


def best_family(train: Floats) -> tuple[str, Distribution]:
    """Normal, Gamma or LogNormal with the records' moments: whichever has the least KS distance to them."""
    from presage.noise.distribution import Gamma, LogNormal, Normal

    mean, sd, logs = float(train.mean()), float(train.std()), np.log(train)
    sd = max(sd, 1e-9 * mean)
    families: dict[str, Distribution] = {
        "Normal": Normal(mean, sd),
        "Gamma": Gamma(mean, sd / mean),
        "LogNormal": LogNormal(float(np.exp(logs.mean())), max(float(logs.std()), 1e-9)),
    }
    best = min(families, key=lambda name: ks_distance(families[name].quantile(EVEN), train))
    return best, families[best]
