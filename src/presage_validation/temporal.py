"""How one card varies over time: second halves of long series of one kernel or step, predicted from their first halves.

Split: of each series the first half is seen, the second predicted; nothing is learned from other series.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import WRONG_VALUE, InputError, PresageError
from presage.files.reading import MOST, read_json
from presage.pool.pool import SERIAL, Pool
from presage_fit.series.continued import continued, settled, slow_share
from presage_validation.score import Skipped
from presage_validation.sweep import Failed, swept

__all__ = ["Half", "Ratio", "TemporalResult", "score_temporal"]

Floats = NDArray[np.float64]
LEVELS = {"p95": 0.95, "p99": 0.99}
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
        for q in LEVELS:
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
    rows, skipped = [], []
    each = [(i, _name(i, series), series) for i, series in enumerate(table["series"])]
    for (_, name, _), found in swept(partial(_scored, seed, table.get("smi")), each, tell, lambda one: one[1], pool):
        if isinstance(found, Failed):
            skipped.append(Skipped(name, found.reason))
        else:
            rows.append(found)
    return TemporalResult(str(path), tuple(rows), tuple(skipped))


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
    drawn = continued(first, len(second), rng)
    ratios = {q: _ratio(first, second, drawn, p) for q, p in LEVELS.items()}
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
