"""Sensitivity: what a step's distribution owes to each class of work, collective, source of noise and stage.

Each is made steady (its variance removed) or 10% quicker, and the step drawn again with the same random numbers; what
the change is worth is the difference. How well it is known comes from leaving out an eighth of the runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.configs.job import Job
from presage.noise.model import CLASSES, COMMUNICATION, NO_NOISE, NoiseModel
from presage.noise.sampling import BATCHES, Estimate
from presage.noise.sources import active_sources, only_sources, without_class_noise, without_sources
from presage.parallel.pipeline_run import simulate_durations
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.distribution import belief_of
from presage.prediction.draws.draw import DrawRequest, Draws, draw, draw_all, without_fitted_stragglers
from presage.prediction.draws.shapley import Shapley, shapley, subsets
from presage.prediction.draws.step_model import StepModel, scale_class, step_model
from presage.prediction.jobs.job_step import job_step
from presage.prediction.jobs.work_pace import WorkPaces

Floats = NDArray[np.float64]
MS = 1e3
FASTER = 0.9  # of its seconds
DRAWS, FEW = 4_000, 2_000  # each time; of stages, of which there may be many
SLOWED = frozenset({"products", "attention"})  # by slow GPUs
MEAN, P50, P95, SD, VARIANCE, TAIL = range(6)  # what is told of draws
Told = Callable[[object], Floats]  # what is told of the draws of a case, by its key
Cases = dict[object, DrawRequest]  # by key


@dataclass(frozen=True)
class MetricChange:
    """Change of the step time in seconds; negative: shorter."""

    p50: Estimate
    p95: Estimate
    sd: Estimate

    @staticmethod
    def of(before: Floats, after: Floats) -> MetricChange:
        """Changes between metrics of draws with the same random numbers."""
        return MetricChange(*(_jackknife(after[k] - before[k]) for k in (P50, P95, SD)))

    def to_json(self) -> dict[str, Any]:
        return {"p50": self.p50.to_json(MS), "p95": self.p95.to_json(MS), "sd": self.sd.to_json(MS)}


@dataclass(frozen=True)
class VarianceShares:
    """Shapley shares of a source of noise: of the variance, of p95 - p50, and of the increase of the mean."""

    variance: Estimate
    tail: Estimate
    mean: Estimate


@dataclass(frozen=True)
class SensitivityRow:
    """A class of work, a kind of collective, a source of noise, or a stage."""

    group: str  # class, collective, source, stage
    name: str
    steady: MetricChange  # were it steady
    faster: MetricChange | None = None  # were it 10% quicker
    critical: Critical | None = None
    shares: VarianceShares | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"group": self.group, "name": self.name, "steady_ms": self.steady.to_json()}
        if self.faster is not None:
            out["quicker_10pct_ms"] = self.faster.to_json()
        if (c := self.critical) is not None:
            out |= {"criticality": c.share, "seconds_ms": c.seconds * MS, "on_path_ms": c.shown * MS}
        if (s := self.shares) is not None:
            names = {"variance": s.variance, "p95_minus_p50": s.tail, "mean_excess": s.mean}
            out["shares"] = {k: e.to_json() for k, e in names.items()}
        return out


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Rows by group, and what they add up to."""

    shape: StepModel
    draws: Draws
    calm: float  # seconds of a step with no noise at all
    all_steady: MetricChange  # with no source left
    rows: tuple[SensitivityRow, ...]
    exact: bool  # shares of all subsets, or of drawn orders
    source: str = ""  # of the noise
    seed: int = 0

    def of(self, group: str) -> tuple[SensitivityRow, ...]:
        """Rows of a group."""
        return tuple(r for r in self.rows if r.group == group)

    @property
    def one_by_one(self) -> float:
        """Seconds of p95 that the sources' single removals add up to; not what removing all of them does."""
        return sum(r.steady.p95.value for r in self.of("source"))

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        d = self.draws
        return {
            "job": self.shape.job.name,
            "gpus": self.shape.job.gpus,
            "draws": int(d.seconds.size),
            "step_ms": {"p50": d.p50.to_json(MS), "p95": d.p95.to_json(MS)}
            | {"sd": float(d.seconds.std()) * MS, "without_noise": self.calm * MS},
            "all_steady_ms": self.all_steady.to_json(),
            "one_by_one_p95_ms": self.one_by_one * MS,
            "shares_exact": self.exact,
            "rows": [r.to_json() for r in self.rows],
            "noise": self.source,
            "seed": self.seed,
        }


def job_sensitivity(
    job: Job, noise: str | None = None, seed: int = 0, draws: int = DRAWS, pool: Pool = THREADS_2
) -> Sensitivity:
    """Sensitivity of a job's step; `noise` is a file or a preset, as in `predict_distribution`."""
    shape = step_model(job)
    belief, source = belief_of(job, shape.seconds, noise)
    result = sensitivity(without_fitted_stragglers(shape, belief.noise), belief.noise, seed, draws, pool)
    return replace(result, source=source)


def sensitivity(
    shape: StepModel, noise: NoiseModel, seed: int = 0, draws: int = DRAWS, pool: Pool = THREADS_2
) -> Sensitivity:
    """Sensitivity of a job's step, for a step model with or without its fitted stragglers."""
    found, calm = draw(shape, noise, seed, draws, pool=pool), draw(shape, NO_NOISE, seed, 2)
    names, critical, ops = [s.name for s in active_sources(noise)], criticality(shape), collectives(shape)
    cases: Cases = {
        **_class_cases(shape, noise, critical, draws),
        **{("collective", op): DrawRequest(replace(shape, held=frozenset([op])), noise, draws) for op in ops},
        **_source_cases(shape, noise, names, seed, draws),
        **_stage_cases(shape, noise, min(draws, FEW)),
    }
    known = _all_metrics(cases, seed, pool)
    before = _metrics(found)
    sources, exact = _sources(names, known.__getitem__, before, seed)
    steadier = {op: MetricChange.of(before, known["collective", op]) for op in ops}
    sent = [SensitivityRow("collective", op, steadier[op], critical=c) for op, c in ops.items()]
    rows = *_classes(critical, known.__getitem__, before), *sent, *sources, *_stages(shape, known.__getitem__)
    steady = MetricChange.of(before, known["no source"])
    return Sensitivity(shape, found, float(calm.seconds.flat[0]), steady, rows, exact, seed=seed)


def _all_metrics(cases: Cases, seed: int, pool: Pool) -> dict[object, Floats]:
    keys = list(cases)
    return {keys[i]: _metrics(draws) for i, draws in draw_all(list(cases.values()), seed, pool)}


# ---- classes of work


def _class_cases(shape: StepModel, noise: NoiseModel, kinds: Iterable[str], draws: int) -> Cases:
    """What is steady minds neither slow GPUs nor the network."""
    out: Cases = {}
    for kind in kinds:
        alone = shape.changed(across=shape.across - {kind}, immune=frozenset({kind} & SLOWED))
        out["class", kind, "steady"] = DrawRequest(alone, without_class_noise(noise, kind), draws)
        out["class", kind, "quick"] = DrawRequest(
            scale_class(shape, kind, FASTER).changed(calm=shape.calm), noise, draws
        )
    return out


def _classes(kinds: dict[str, Critical], told: Told, before: Floats) -> list[SensitivityRow]:
    out = []
    for kind, critical in kinds.items():
        steady, quick = (MetricChange.of(before, told(("class", kind, how))) for how in ("steady", "quick"))
        out.append(SensitivityRow("class", kind, steady, quick, critical))
    return out


# ---- pipeline stages


def _stage_cases(shape: StepModel, noise: NoiseModel, draws: int) -> Cases:
    out: Cases = {("stage", "as it is"): DrawRequest(shape, noise, draws)}
    for stage in _several(shape):
        out["stage", stage, "steady"] = DrawRequest(shape.changed(still=frozenset([stage])), noise, draws)
        out["stage", stage, "quick"] = DrawRequest(scale_stage(shape, stage, FASTER), noise, draws)
    return out


def _stages(shape: StepModel, told: Told) -> list[SensitivityRow]:
    before, out = told(("stage", "as it is")), []
    for stage in _several(shape):
        steady, quick = (MetricChange.of(before, told(("stage", stage, how))) for how in ("steady", "quick"))
        out.append(SensitivityRow("stage", str(stage), steady, quick, stage_criticality(shape, stage)))
    return out


def _several(shape: StepModel) -> range:
    return range(shape.stages if shape.stages > 1 else 0)


# ---- sources of noise


def _source_cases(shape: StepModel, noise: NoiseModel, names: Sequence[str], seed: int, draws: int) -> Cases:
    out: Cases = {some: DrawRequest(shape, only_sources(noise, some), draws) for some in subsets(names, seed)}
    out |= {("source", name): DrawRequest(shape, without_sources(noise, [name]), draws) for name in names}
    return out | {"no source": DrawRequest(shape, without_sources(noise, names), draws)}


def _sources(names: Sequence[str], told: Told, before: Floats, seed: int) -> tuple[list[SensitivityRow], bool]:
    found = shapley(names, lambda some: told(some)[[VARIANCE, TAIL, MEAN]], seed)
    steady = [MetricChange.of(before, told(("source", name))) for name in names]
    shares = _shares(found) if names else []
    rows = [SensitivityRow("source", n, s, shares=p) for n, s, p in zip(names, steady, shares, strict=True)]
    return rows, found.exact


def _shares(found: Shapley) -> list[VarianceShares]:
    """Shapley shares [source, metric] with jackknife and sampling error combined."""
    whole = found.added.sum(axis=0)
    some = np.where(np.abs(whole[:, :1]) > 0, whole, 1.0)
    share, error = found.added / some, found.error[..., 0] / np.abs(some[:, 0])
    pairs = [
        [_jackknife(x, float(e)) for x, e in zip(xs, es, strict=True)] for xs, es in zip(share, error, strict=True)
    ]
    return [VarianceShares(*row) for row in pairs]


def _metrics(draws: Draws) -> Floats:
    """[what, 1 + eighths]: of all draws, then of those without an eighth of the runs each."""
    runs = draws.seconds
    parts = np.array_split(np.arange(len(runs)), min(BATCHES, len(runs)))
    some = [runs, *(np.delete(runs, part, axis=0) for part in parts if len(parts) > 1)]
    return np.array([_measures(x) for x in some]).T


def _measures(x: Floats) -> tuple[float, ...]:
    p50, p95 = np.quantile(x, [0.5, 0.95])
    return float(x.mean()), float(p50), float(p95), float(x.std()), float(x.var()), float(p95 - p50)


def _jackknife(values: Floats, other: float = 0.0) -> Estimate:
    """Jackknife estimate from a value and those without an eighth of the runs each; `other` adds to its error."""
    rest = values[1:]
    n = len(rest)
    own = float(np.sqrt((n - 1) / n * ((rest - rest.mean()) ** 2).sum())) if n > 1 else 0.0
    return Estimate(float(values[0]), float(np.hypot(own, other)))


# ---- Criticality: of one more percent of a class of work (or of a stage), the share that shows in the step.

NEAR, FAR = 0.01, 200.0
NO_LIMIT = 1e6  # W
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")


class Critical(NamedTuple):
    """Seconds on the critical path of a step, and in total."""

    shown: float
    seconds: float

    @property
    def share(self) -> float:
        """0 where all of it is hidden behind other work."""
        found = self.shown / self.seconds if self.seconds > 0 else 0.0
        return min(1.0, found) if found > 1e-6 else 0.0


def criticality(shape: StepModel) -> dict[str, Critical]:
    """Critical seconds by class of work."""
    slow = job_step(shape.job, shape.efficiency).slowdown
    held, base = _unlimited(shape.job), WorkPaces(products=slow, attention=slow)

    def at(kind: str, times: float) -> float:
        return job_step(held, shape.efficiency, base._replace(**{kind: getattr(base, kind) * times})).seconds

    found = {k: _critical(at(k, 1.0), at(k, 1 + NEAR), at(k, FAR), at(k, FAR * (1 + NEAR))) for k in CLASSES}
    return {k: c for k, c in found.items() if c.seconds > 1e-9 * shape.seconds}


def collectives(shape: StepModel) -> dict[str, Critical]:
    """Critical seconds by kind of collective, of those that the step has."""
    slow = job_step(shape.job, shape.efficiency).slowdown
    held, base = _unlimited(shape.job), WorkPaces(products=slow, attention=slow)

    def at(op: str, times: float) -> float:
        paces = base._replace(held=frozenset(OPS) - {op}, **dict.fromkeys(COMMUNICATION, times))
        return float(job_step(held, shape.efficiency, paces).seconds)

    found = {op: _critical(at(op, 1.0), at(op, 1 + NEAR), at(op, FAR), at(op, FAR * (1 + NEAR))) for op in OPS}
    return {op: c for op, c in found.items() if c.seconds > 1e-9 * shape.seconds}


def stage_criticality(shape: StepModel, stage: int) -> Critical:
    """Critical seconds of the passes of a pipeline stage."""
    at = [scale_stage(shape, stage, t).seconds for t in (1.0, 1 + NEAR, FAR, FAR * (1 + NEAR))]
    return _critical(*at)


def _critical(here: float, more: float, far: float, further: float) -> Critical:
    return Critical((more - here) / NEAR, (further - far) / (NEAR * FAR))


def _unlimited(job: Job) -> Job:
    gpu = replace(job.platform.gpu, power_limit=NO_LIMIT)
    return replace(job, platform=replace(job.platform, gpu=gpu))


def scale_stage(shape: StepModel, stage: int, times: float) -> StepModel:
    """The same step with a pipeline stage whose passes take so many times as long."""
    d = shape.pipeline.durations
    factor = [[times if s == stage else 1.0] for s in range(shape.stages)]
    passes = {name: getattr(d, name) * factor for name in ("forward", "backward", "weight", "extra")}
    done = simulate_durations(shape.pipeline.schedule, d._replace(**passes))
    seconds = shape.seconds + done.total - shape.pipeline.total
    made = replace(shape, seconds=seconds, pipeline=done, work=shape.work * factor)
    made.__dict__["curves"] = shape.curves  # what transfers add is not priced anew
    return made
