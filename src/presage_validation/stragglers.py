"""The claim on per-operation tables: fitted on every second step, the model predicts how the other steps are spread.

Split: the steps of a job in their order; those at even places (first, third, ...) are fitted, those at odd places
predicted. Nothing of a predicted step is used: not its order of operations, not its host time. The p95 of n measured
steps is held against the p95 that n drawn steps show in the median (`p95_of_all_error`: against all draws'). Both ways
round are scored (`odd_to_even`), the first is the claim. Figures of a job are signed; over jobs the errors of quantiles
are medians of absolute values, W1, CRPS and KS medians, the coverage is of all steps, that of totals of all jobs.

Beside it, `iid_pool`: every operation drawn by itself from all durations of its type and stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError, PresageError
from presage.pool.pool import SERIAL, Pool
from presage_fit import optable
from presage_fit.ops.effects import OpEffects, fit_sets, iid_pool, steps_only
from presage_fit.ops.sizes import sizes_of
from presage_fit.opsteps import split
from presage_fit.optable import OpTable
from presage_validation.score import Skipped, run_cases
from presage_validation.temporal import EVEN, best_family, forecast, ks_critical, sample_quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tell = Callable[[str], None]
FEWEST = 6  # steps of a job
REFIT_DRAWS, RUNS = 1000, 10  # of a model fitted to training steps drawn anew: steps for its p95, totals of runs
TABLE_ENDINGS = (".csv", ".csv.gz")


@dataclass(frozen=True)
class Effort:
    """How much is drawn."""

    draws: int = 10_000
    refits: int = 40  # to training steps drawn anew
    seeds: int = 5


EFFORT = Effort()


@dataclass(frozen=True)
class Figures:
    """One prediction of the spread of `n` steps; errors are fractions, of a job signed."""

    n: int
    p50_error: float
    p95_error: float
    p99_error: float
    p95_of_all_error: float  # the p95 of all that is drawn beside that of the n steps
    w1_over_mean: float
    crps_ratio: float  # to the best single family fitted to the training steps' times
    coverage_95: float
    ks: float
    ks_floor: float
    ks_critical_5pct: float
    run_interval_90_coverage: float | None = None  # of the total of the predicted steps: in or not


@dataclass(frozen=True)
class P95Uncertainty:
    """How sure the predicted p95 is, as fractions of it: by the number of draws, and by which steps were fitted."""

    monte_carlo: float
    training_steps: float
    seeds: tuple[float, ...]  # p95's error with other seeds


@dataclass(frozen=True, eq=False)
class JobForecast:
    """What was found of one job."""

    job: str
    path: str
    train: int
    ours: Figures
    back: Figures  # the other way round
    iid: Figures
    family: str
    sure: P95Uncertainty
    total_error: float  # of the median predicted total of the test steps
    rows: tuple[tuple[int, float, float], ...]  # step, seconds, predicted probability of no more
    effects: OpEffects = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        sizes = sizes_of(self.effects)
        return asdict(self.ours) | {
            "training_steps": self.train,
            "family": self.family,
            "total_error": self.total_error,
            "odd_to_even": asdict(self.back),
            "p95_standard_error": {"monte_carlo": self.sure.monte_carlo, "training_steps": self.sure.training_steps},
            "p95_error_by_seed": list(self.sure.seeds),
            "effects": {k: {"sd": s.value, "n": s.n} for k, s in sizes.by_name.items()},
            "slow_workers": [{"dp_rank": d, "stage": s, "times": x} for (d, s), x in sizes.slow.items()],
        }


@dataclass(frozen=True, eq=False)
class StragglersResult:
    """Jobs that were scored, and what was left out."""

    path: str
    jobs: tuple[JobForecast, ...]
    skipped: tuple[Skipped, ...]

    def metrics(self, which: str = "ours") -> dict[str, Any]:
        return overall([getattr(j, which) for j in self.jobs])

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "stragglers",
            "path": self.path,
            "n": sum(j.ours.n for j in self.jobs),
            "skipped": [vars(s) for s in self.skipped],
            "metrics": self.metrics(),
            "groups": {j.job: j.to_json() for j in self.jobs},
            "baselines": {"iid_pool": self.metrics("iid") | {"groups": {j.job: asdict(j.iid) for j in self.jobs}}},
            "odd_to_even": self.metrics("back"),
        }

    def lines(self) -> list[tuple[str, ...]]:
        """Every predicted step: what it took, and the predicted probability of no more."""
        head = ("job", "step", "measured_seconds", "predicted_probability")
        return [head, *((j.job, str(k), f"{t:.9g}", f"{p:.5g}") for j in self.jobs for k, t, p in j.rows)]


def overall(figures: Sequence[Figures]) -> dict[str, Any]:
    """Over jobs: see the module's text."""
    if not figures:
        return {}
    n = sum(f.n for f in figures)
    middle = ("w1_over_mean", "crps_ratio", "ks", "ks_floor", "ks_critical_5pct")
    known = [f.run_interval_90_coverage for f in figures if f.run_interval_90_coverage is not None]
    return {
        "jobs": len(figures),
        "n": n,
        **{k: float(np.median([abs(getattr(f, k)) for f in figures])) for k in ("p50_error", "p95_error", "p99_error")},
        **{k: float(np.median([getattr(f, k) for f in figures])) for k in middle},
        "coverage_95": sum(f.coverage_95 * f.n for f in figures) / n,
        "run_interval_90_coverage": float(np.mean(known)) if known else None,
    }


def score_stragglers(
    paths: Iterable[str | Path],
    tell: Tell = lambda _: None,
    seed: int = 0,
    effort: Effort = EFFORT,
    pool: Pool = SERIAL,
) -> StragglersResult:
    """Every table under these paths: files, or folders with trace-JOB.csv(.gz)."""
    given = [Path(p) for p in paths]
    files = [f for p in given for f in _files(p)]
    done, skipped = run_cases(partial(_file_scored, seed, effort), files, tell, lambda f: f.name, pool)
    skipped += [s for _, (unused, _) in done for s in unused]
    jobs = tuple(job for _, (_, job) in done if job is not None)
    return StragglersResult(", ".join(map(str, given)), jobs, tuple(skipped))


def _file_scored(seed: int, effort: Effort, file: Path) -> tuple[list[Skipped], JobForecast | None]:
    """What of a table is not used, and its score."""
    table = unfold_ranks(optable.read(file))
    named = list(_named(table))
    try:
        return named, score_table(table, seed, effort)
    except PresageError as e:
        return [*named, Skipped(file.name, str(e))], None


def _files(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise InputError(path, "no such file or folder")
    if path.is_file():
        yield path
        return
    found = [f for f in sorted(path.rglob("trace-*")) if f.name.endswith(TABLE_ENDINGS)]
    if not found:
        raise InputError(path, "no table of operations (trace-JOB.csv or trace-JOB.csv.gz) in this folder")
    yield from found


def _named(table: OpTable) -> Iterator[Skipped]:
    """What of a table is not used as it should be."""
    for x in table.unknown:
        yield Skipped(f"{table.job}: optype {x}", "not known: counted as work of its own worker")
    for s in split(steps_only(table, table.steps[::2])):
        if len(s.ids) == 1:
            yield Skipped(f"{table.job}: step {s.ids[0]}", "not fitted: no other training step has its operations")


def unfold_ranks(table: OpTable) -> OpTable:
    """A table with rows of several ranks a worker, each rank as a replica of its own."""
    worker = table.dp * table.stages + table.stage
    pairs = np.unique(np.stack([worker, table.rank]), axis=1)
    count = np.bincount(pairs[0], minlength=table.replicas * table.stages)
    if count.max() == 1:
        return table
    if len(np.unique(count)) > 1:
        raise InputError(table.path, f"{count.min()} to {count.max()} ranks a worker: they must be as many", "rank")
    each = int(count[0])
    place = {(int(w), int(r)): k % each for k, (w, r) in enumerate(pairs.T)}
    turn = np.array([place[w, r] for w, r in zip(worker.tolist(), table.rank.tolist(), strict=True)])
    return replace(table, dp=table.dp * each + turn)


def score_table(table: OpTable, seed: int = 0, effort: Effort = EFFORT) -> JobForecast:
    """Both halves of a table, each predicted from the other."""
    if len(table.steps) < FEWEST:
        what = f"{len(table.steps)} steps: at least {FEWEST} are needed to fit one half and predict the other"
        raise InputError(table.path, what, "step")
    even, odd = table.steps[::2], table.steps[1::2]
    sets, seen = fit_sets(table, even), _measured(table, odd)
    times = draw_steps(sets, np.random.default_rng(seed), effort.draws)
    name, family = best_family(_measured(table, even))
    yardstick = _crps(family.quantile(EVEN), seen)
    sure, totals = _sureness(sets, times, seen, odd, seed, effort)
    pools = [(iid_pool(s.played, s.bias), s.share) for s in sets]
    iid = draw_mixture(pools, np.random.default_rng(seed), effort.draws)
    inside = float(np.quantile(totals, 0.05) <= seen.sum() <= np.quantile(totals, 0.95))
    below = np.searchsorted(np.sort(times), seen) / len(times)
    return JobForecast(
        job=table.job,
        path=table.path,
        train=len(even),
        ours=figures(times, seen, yardstick, inside),
        back=_back(table, seed, effort.draws),
        iid=figures(iid, seen, yardstick, _iid_inside(iid, seen, seed)),
        family=name,
        sure=sure,
        total_error=float(np.median(totals) / seen.sum() - 1),
        rows=tuple((int(k), float(t), float(p)) for k, t, p in zip(odd, seen, below, strict=True)),
        effects=sets[0],
    )


def _measured(table: OpTable, steps: Ints) -> Floats:
    """Seconds of some steps, in their order."""
    parts = split(steps_only(table, steps))
    by_step = {int(i): float(t) for s in parts for i, t in zip(s.ids, s.measured, strict=True)}
    return np.array([by_step[int(i)] for i in steps])


def _crps(pool: Floats, seen: Floats) -> float:
    return forecast(pool[:, None], seen, np.sort(pool)).crps


def figures(times: Floats, seen: Floats, yardstick: float, inside: float | None = None) -> Figures:
    """Figures of predicted times of a step, the same for every step; `yardstick`: the single family's CRPS."""
    f = forecast(times[:, None], seen, np.sort(times))
    errors = [sample_quantile(times, f.n, p) / float(np.quantile(seen, p)) - 1 for p in (0.5, 0.95, 0.99)]
    return Figures(
        n=f.n,
        p50_error=errors[0],
        p95_error=errors[1],
        p99_error=errors[2],
        p95_of_all_error=f.p95_error,
        w1_over_mean=f.w1_over_mean,
        crps_ratio=f.crps / yardstick if yardstick else float("nan"),
        coverage_95=f.covered_95 / f.n,
        ks=f.ks,
        ks_floor=f.ks_floor,
        ks_critical_5pct=ks_critical(f.n),
        run_interval_90_coverage=inside,
    )


def draw_steps(sets: Sequence[OpEffects], rng: np.random.Generator, draws: int) -> Floats:
    """Seconds of steps, of every set as often as it was among the training steps."""
    return draw_mixture([(s, s.share) for s in sets], rng, draws)


def draw_mixture(models: Sequence[tuple[Any, float]], rng: np.random.Generator, draws: int) -> Floats:
    """Draws of models that have `times`, each with its share."""
    counts = rng.multinomial(draws, [share for _, share in models])
    return np.concatenate([m.times(rng, int(k)) for (m, _), k in zip(models, counts, strict=True) if k])


def _back(table: OpTable, seed: int, draws: int) -> Figures:
    even, odd = table.steps[::2], table.steps[1::2]
    seen, train = _measured(table, even), _measured(table, odd)
    times = draw_steps(fit_sets(table, odd), np.random.default_rng(seed), draws)
    return figures(times, seen, _crps(best_family(train)[1].quantile(EVEN), seen))


def _sureness(
    sets: Sequence[OpEffects], times: Floats, seen: Floats, ids: Ints, seed: int, effort: Effort
) -> tuple[P95Uncertainty, Floats]:
    """How sure the p95 is, and predicted totals of the steps `ids`, with training steps drawn anew each time."""
    rng = np.random.default_rng([seed, 1])
    truth = float(np.quantile(seen, 0.95))
    refit, totals = [], []
    for _ in range(effort.refits):
        again = [s.resampled(rng) for s in sets]
        refit.append(float(np.quantile(draw_steps(again, rng, REFIT_DRAWS), 0.95)))
        totals.append(_totals(again, sets, rng, ids))
    parts = [float(np.quantile(p, 0.95)) for p in np.array_split(np.random.default_rng(seed).permutation(times), 10)]
    p95 = float(np.quantile(times, 0.95))
    other = [np.random.default_rng([seed, 2, k]) for k in range(effort.seeds)]
    seeds = [sample_quantile(draw_steps(sets, rng, effort.draws), len(seen), 0.95) for rng in other]
    chance = float(np.std(parts, ddof=1) / np.sqrt(len(parts)))
    sure = P95Uncertainty(chance / p95, float(np.std(refit, ddof=1)) / p95, tuple(float(q / truth - 1) for q in seeds))
    return sure, np.concatenate(totals)


def _totals(again: Sequence[OpEffects], sets: Sequence[OpEffects], rng: np.random.Generator, ids: Ints) -> Floats:
    """Totals of runs of these steps: of one set, as states of steps go on from one to the next."""
    which = int(rng.choice(len(sets), p=[s.share for s in sets]))
    model = again[which]
    states = model.path(rng, ids, RUNS, sizes_of(sets[which]).step_correlation)
    return np.asarray(model.times(rng, states.size, states.ravel()).reshape(states.shape).sum(axis=1))


def _iid_inside(times: Floats, seen: Floats, seed: int) -> float:
    """Whether the measured total is in the 90% interval of totals of independent steps."""
    rng = np.random.default_rng([seed, 3])
    low, high = np.quantile(rng.choice(times, (1000, len(seen))).sum(axis=1), [0.05, 0.95])
    return float(low <= seen.sum() <= high)
