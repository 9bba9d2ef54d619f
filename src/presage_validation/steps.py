"""Step times of sister runs: fit all but one, predict the one left out.

Split: in every group (system and benchmark) each run is left out in turn; the model, the best single family and the
pool are fitted to the other runs of the group. What the model knows of other groups (its prior) is learned from the
other groups of the same kind of record in the same files, never from the group scored; where they are fewer than
MIN_GROUPS it is the prior that ships. The left-out run's number of steps and where its validations fall are given, no
time of it. Groups of single steps and of means are never mixed. The first 5 single steps of a run are left out of the
scores (and the scores with them are given beside); the whole time is that of all steps, validations not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.noise.model import Belief
from presage.noise.priors import architecture_of, machine_of, step_prior
from presage.pool.pool import SERIAL, Pool
from presage_fit.series import SeriesFit, SeriesPrior, fit, learn
from presage_fit.series.drift import kinds_of, lead_of
from presage_fit.series.model import believed_records
from presage_fit.step_logs import Logs, StepLog, read_logs
from presage_validation.score import Skipped, in_turn
from presage_validation.temporal import EVEN, Forecast, best_family, forecast

Floats = NDArray[np.float64]
CUT = 5  # single steps at the start of a run that are not scored
MIN_GROUPS = 5  # other groups a prior is learned from
DRAWS = 1000


@dataclass(frozen=True)
class TotalError:
    """The time of all steps of a run against its prediction."""

    error: float  # of the median
    inside_90: bool


@dataclass(frozen=True)
class RunForecast:
    """One way of predicting a run: its steps without the first, all its steps, and the whole."""

    cut: Forecast
    uncut: Forecast
    whole: TotalError


@dataclass(frozen=True)
class LeftOutRun:
    """A left-out run and three predictions of it."""

    group: str
    kind: str
    run: str
    n_cut: int
    ours: RunForecast
    family: RunForecast
    family_name: str
    iid: RunForecast


@dataclass(frozen=True)
class StepsResult:
    path: str
    rows: tuple[LeftOutRun, ...]
    skipped: tuple[Skipped, ...]
    zero: ZeroData

    def kinds(self) -> list[str]:
        """Kinds of record, single steps first."""
        return sorted(dict.fromkeys(r.kind for r in self.rows), key=lambda k: (k != "single steps", k))

    def groups(self, kind: str) -> list[str]:
        return list(dict.fromkeys(r.group for r in self.rows if r.kind == kind))

    def to_json(self) -> dict[str, Any]:
        main = [r for r in self.rows if r.kind == self.kinds()[0]] if self.rows else []
        by_kind = {k: [r for r in self.rows if r.kind == k] for k in self.kinds()}
        return {
            "kind": "steps",
            "path": self.path,
            "n": len(self.rows),
            "skipped": [vars(s) for s in self.skipped],
            "metrics": summary(main) | self.zero.metrics(),
            "metrics_of": self.kinds()[0] if self.rows else None,
            "uncut": summary(main, cut=False),
            "kinds": {k: summary(rows) for k, rows in by_kind.items()},
            "groups": {g: summary([r for r in self.rows if r.group == g]) for g in _distinct(self.rows)},
            "baselines": {
                name: summary(main, which) | {"kinds": {k: summary(rows, which) for k, rows in by_kind.items()}}
                for name, which in (("iid_pool", "iid"), ("best_family", "family"))
            },
            "zero_data": self.zero.to_json(),
        }

    def lines(self) -> list[tuple[str, ...]]:
        """Every quantile beside its measurement's error, for a CSV file."""
        head = ("kind", "group", "run", "n", "p50_error", "p95_error", "p99_error", "w1_over_mean", "crps",
                "family_crps", "coverage_95", "ks", "ks_floor", "total_error", "total_inside_90")  # fmt: skip
        rows = []
        for r in self.rows:
            f = r.ours.cut
            numbers = (f.p50_error, f.p95_error, f.p99_error, f.w1_over_mean, f.crps, r.family.cut.crps,
                       f.covered_95 / f.n, f.ks, f.ks_floor, r.ours.whole.error)  # fmt: skip
            inside = str(int(r.ours.whole.inside_90))
            rows.append((r.kind, r.group, r.run, str(f.n), *(f"{x:.6g}" for x in numbers), inside))
        return [head, *rows]


def summary(rows: Sequence[LeftOutRun], which: str = "ours", cut: bool = True) -> dict[str, Any]:
    """The figures of some left-out runs: medians over runs, except where said."""
    if not rows:
        return {}
    guesses: list[RunForecast] = [getattr(r, which) for r in rows]
    found = [g.cut if cut else g.uncut for g in guesses]
    family = [r.family.cut if cut else r.family.uncut for r in rows]
    n = sum(f.n for f in found)
    return {
        "runs": len(rows),
        "n": n,
        "cut": sum(r.n_cut for r in rows) if cut else 0,
        "p50_error": _median_size([f.p50_error for f in found]),
        "p95_error": _median_size([f.p95_error for f in found]),
        "p95_error_worst": float(max(abs(f.p95_error) for f in found)),
        "p99_error": _median_size([f.p99_error for f in found]),
        "w1_over_mean": _median_size([f.w1_over_mean for f in found]),
        "crps_ratio": sum(f.crps for f in found) / sum(f.crps for f in family),
        "crps_ratio_median": float(np.median([f.crps / g.crps for f, g in zip(found, family, strict=True)])),
        "coverage_95": sum(f.covered_95 for f in found) / n,
        "ks": _median_size([f.ks for f in found]),
        "ks_floor": _median_size([f.ks_floor for f in found]),
        "run_interval_90_coverage": float(np.mean([g.whole.inside_90 for g in guesses])),
        "run_total_error": _median_size([g.whole.error for g in guesses]),
        "pit": [round(float(p), 4) for p in np.sum([f.pit for f in found], axis=0) / n],
    }


def _median_size(values: Sequence[float]) -> float:
    return float(np.median(np.abs(values)))


def _distinct(rows: Sequence[LeftOutRun]) -> list[str]:
    return list(dict.fromkeys(r.group for r in rows))


def score_steps(paths: Sequence[Path], tell: Callable[[str], None], seed: int = 0, pool: Pool = SERIAL) -> StepsResult:
    return score_logs(read_logs(paths), ", ".join(map(str, paths)), tell, seed, pool)


def score_logs(
    logs: Logs, name_of_all: str, tell: Callable[[str], None], seed: int = 0, pool: Pool = SERIAL
) -> StepsResult:
    rows: list[LeftOutRun] = []
    skipped = [Skipped(*s) for s in logs.skipped]
    for kind, groups in _by_kind(logs).items():
        fits = dict(zip(groups, pool.map(fit, groups.values()), strict=True))
        alone = [name for name, runs in groups.items() if len(runs) < 2]
        skipped += [Skipped(name, f"one run of {kind}: none is left to fit when it is left out") for name in alone]
        outs = list(_outs(groups, fits, seed))
        found = pool.map(_left_out, outs)
        rows += [next(found) for _ in in_turn(outs, tell, lambda out: out.runs[0].group)]
    tell("zero data")
    return StepsResult(name_of_all, tuple(rows), tuple(skipped), score_zero_data(logs, seed, pool))


class _Out(NamedTuple):
    """A run of a group that is left out, what is learned of other groups, and the seed of its draws."""

    runs: tuple[StepLog, ...]
    which: int
    prior: SeriesPrior | None
    seed: tuple[int, int, int]


def _outs(groups: dict[str, tuple[StepLog, ...]], fits: dict[str, SeriesFit], seed: int) -> Iterator[_Out]:
    for g, (name, runs) in enumerate(groups.items()):
        if len(runs) > 1:
            prior = _prior_without(fits, name)
            yield from (_Out(runs, i, prior, (seed, g, i)) for i in range(len(runs)))


def _by_kind(logs: Logs) -> dict[str, dict[str, tuple[StepLog, ...]]]:
    """Groups of each kind of record; a group with two kinds is two groups."""
    kinds: dict[str, dict[str, tuple[StepLog, ...]]] = {}
    for name, runs in logs.groups().items():
        for kind in dict.fromkeys(r.kind for r in runs):
            kinds.setdefault(kind, {})[name] = tuple(r for r in runs if r.kind == kind)
    return kinds


def _prior_without(fits: dict[str, SeriesFit], name: str) -> SeriesPrior | None:
    others = [f for n, f in fits.items() if n != name and f.runs > 1]
    return learn(others) if len(others) >= MIN_GROUPS else None


def _left_out(out: _Out) -> LeftOutRun:
    rng = np.random.default_rng(out.seed)
    log, train = out.runs[out.which], [x for j, x in enumerate(out.runs) if j != out.which]
    cut = min(CUT, len(log.seconds) - 1) if log.single else 0
    draws = fit(train, out.prior).predict_like(log, rng, DRAWS).draws
    ours = RunForecast(
        forecast(draws[:, cut:], log.seconds[cut:]),
        forecast(draws, log.seconds),
        _whole(draws @ log.counts, log.total),
    )
    family, iid, name = _baselines(train, log, cut, rng)
    return LeftOutRun(log.group, log.kind, log.run, cut, ours, family, name, iid)


def _baselines(
    train: Sequence[StepLog], log: StepLog, cut: int, rng: np.random.Generator
) -> tuple[RunForecast, RunForecast, str]:
    """The best single family and the pool: all steps independent and alike."""
    pools = {c: np.concatenate([x.seconds[min(c, len(x.seconds) - 1) :] for x in train]) for c in (0, cut)}
    families = {c: best_family(pool) for c, pool in pools.items()}
    family = _flat({c: f.quantile(EVEN) for c, (_, f) in families.items()}, log, cut, rng)
    iid = _flat({c: np.quantile(pool, EVEN) for c, pool in pools.items()}, log, cut, rng)
    return family, iid, families[cut][0]


def _flat(quantiles: dict[int, Floats], log: StepLog, cut: int, rng: np.random.Generator) -> RunForecast:
    """A guess that has the same distribution for every step."""
    drawn = quantiles[0][rng.integers(0, len(EVEN), (500, len(log.seconds)))]
    return RunForecast(
        forecast(quantiles[cut][:, None], log.seconds[cut:], quantiles[cut]),
        forecast(quantiles[0][:, None], log.seconds, quantiles[0]),
        _whole(drawn @ log.counts, log.total),
    )


def _whole(drawn: Floats, total: float) -> TotalError:
    low, middle, high = np.quantile(drawn, [0.05, 0.5, 0.95])
    return TotalError(float(middle / total - 1), bool(low <= total <= high))


# How far p95 is above p50 in a job of which no step was seen: predicted from GPU, nodes and step time alone.
#
# Split: the laws' constants come from the systems that ship, without those of the machine that is scored (all of a
# site's systems are left out together). The step time given is the measured median: how well that is predicted is
# another claim. So are the number of steps and where evaluations fall, as a config tells them. Records that are means
# are means of drawn steps: jitter averages out, what goes with the step before less, drift and the schedule's slow
# steps stay, a stall is shared by the steps of its record.

WITHIN = 0.015
GROUPS = 300  # drawn systems behind each prediction
MOST, MOST_STEPS = 400, 12_000  # records drawn of a run, and steps in those of all runs,
LEAST = 50  # where they are more than so many records


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


def score_zero_data(logs: Logs, seed: int = 0, pool: Pool = SERIAL) -> ZeroData:
    """Groups whose nodes and GPUs are known; not those of means between evaluations, of which too few are in a run."""
    groups = [g for g in logs.groups().values() if not g[0].blocks and _known(g[0]) and len({x.kind for x in g}) == 1]
    return ZeroData(tuple(pool.map(_row, [(g, (seed, i)) for i, g in enumerate(groups)])))


def _known(log: StepLog) -> bool:
    nodes = log.meta.get("nodes")
    return isinstance(nodes, int | float) and nodes > 0 and bool(log.meta.get("accelerator"))


def _row(case: tuple[Sequence[StepLog], tuple[int, int]]) -> ZeroRow:
    runs, rng = case[0], np.random.default_rng(case[1])
    meta, stride = runs[0].meta, runs[0].stride
    cut = CUT if runs[0].single else 1  # a mean of many steps holds the first ones in its first record
    pool = np.concatenate([x.seconds[min(cut, len(x.seconds) - 1) :] for x in runs])
    seconds, nodes = float(np.median(pool)), float(meta["nodes"])
    architecture = architecture_of(str(meta["accelerator"]))
    machine = machine_of(str(meta.get("submitter")), str(meta.get("system")))
    belief = step_prior(architecture, nodes, seconds, [machine])
    longest = max(len(x.seconds) for x in runs) - cut
    records = max(1, min(MOST, longest, max(LEAST, MOST_STEPS // (stride * len(runs)))))
    drawn = believed_records(belief, seconds, nodes, (GROUPS, len(runs), records), rng, stride)
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
