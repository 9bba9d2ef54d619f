"""The fit of a group of runs, and what it predicts of the next one. See the folder's first lines for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.noise.distribution import Empirical
from presage.noise.model import Belief, NoiseModel
from presage.noise.priors import SCORES
from presage_fit.series.drift import Shared, SisterRuns, kinds_of, lead_of, shared, table_of
from presage_fit.series.events import SeenStalls, place_recurring, stalls_of
from presage_fit.series.prior import SeriesPrior, belief_of, shipped
from presage_fit.series.residuals import CELLS, LIMIT, Bulk, Levels, bulk_of, evidence, latent, levels_of
from presage_fit.step_logs import LogEvent, StepLog

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST_EVENT = 0.002  # of a step: events differ by this at least


@dataclass(frozen=True)
class EventExcess:
    """What an event of the schedule adds to a step, of the level."""

    excess: float
    squares: float  # of its deviations, over the size of the excess
    dof: float
    seen: int

    @property
    def size(self) -> float:
        return abs(self.excess) + LEAST_EVENT


@dataclass(frozen=True, eq=False)
class Predicted:
    """Draws of a run that is not yet there."""

    draws: Floats  # [draws, records]: seconds
    counts: Ints  # [records]: steps in each

    def step(self, k: int) -> Empirical:
        return Empirical(self.draws[:, k])

    @cached_property
    def pooled(self) -> Empirical:
        """Any step of any such run."""
        return Empirical(self.draws)

    @cached_property
    def total(self) -> Empirical:
        """Seconds of all its steps."""
        return Empirical(self.draws @ self.counts)

    def quantile(self, p: float) -> Floats:
        """[records]: what each is not longer than with probability p."""
        return np.quantile(self.draws, p, axis=0)


@dataclass(frozen=True, eq=False)
class SeriesFit:
    """All that was learned from a group's logs, and the prior it leans on."""

    level: float  # seconds
    runs: int
    lead: int
    first: int
    last: int
    shared: Shared
    bulk: Bulk
    stalls: SeenStalls
    events: Mapping[str, EventExcess]
    prior: SeriesPrior
    nodes: float = 1.0
    stride: int = 1
    start: float = 0.0  # seconds from a job's start to its first step
    pause: float = 0.0  # of an event between steps
    shared_events: bool = False  # events are in the curve

    @cached_property
    def level_evidence(self) -> Floats:
        return evidence(self.shared.levels)

    @cached_property
    def levels(self) -> Levels:
        return levels_of(self.shared.levels, self.prior.levels)

    @property
    def slope_squares(self) -> float:
        return _squares(self.shared.slopes)

    @property
    def width_squares(self) -> float:
        return _squares(np.log(np.maximum(self.bulk.widths, 1e-7)))

    @cached_property
    def cells(self) -> Floats:
        """How likely each cell of the grid of (correlation, share) is."""
        weight = np.exp(self.bulk.evidence - self.bulk.evidence.max()) * self.prior.cells
        return np.asarray(weight / weight.sum())

    @cached_property
    def shape(self) -> Floats:
        own = self.bulk.scored / (self.bulk.scored + self.prior.shape_weight)
        return np.asarray(own * self.bulk.shape + (1 - own) * self.prior.shape)

    def predict(
        self,
        steps: Ints,
        events: Sequence[LogEvent] = (),
        counts: Ints | None = None,
        rng: np.random.Generator | None = None,
        draws: int = 1000,
    ) -> Predicted:
        """A sister run with these step numbers and events, not knowing any of its times."""
        rng = np.random.default_rng(0) if rng is None else rng
        steps = np.asarray(steps, np.int64)
        kinds = kinds_of(steps, () if self.shared_events else events, self.lead)
        plain = np.array([k not in self.events for k in kinds])  # the spread of events has the ordinary one in it
        relative = 1 + self._pace(rng, steps, draws) + self._bulk(rng, steps, draws) * plain
        relative += self._scheduled(rng, kinds, draws)
        many = np.ones(len(steps), np.int64) if counts is None else np.asarray(counts, np.int64)
        seconds = self.level * relative + self._stalls(rng, steps, draws) / many
        seconds += self._again(rng, steps, events, seconds * many) / many
        return Predicted(np.maximum(seconds, 0.05 * self.level), many)

    def belief(self, source: str = "fitted to step-time logs") -> Belief:
        """As a noise model, with intervals."""
        return belief_of(self, source)

    def predict_like(self, log: StepLog, rng: np.random.Generator, draws: int = 1000) -> Predicted:
        """A run with the step numbers and events of this one."""
        return self.predict(log.steps, log.events, log.counts, rng, draws)

    def _pace(self, rng: np.random.Generator, steps: Ints, draws: int) -> Floats:
        """Level and drift: the shared curve, and the run's own beside it."""
        prior, more = self.prior, 1 + 1 / self.runs
        slope = np.sqrt(more * prior.slope.variances(rng, self.slope_squares, self.runs - 1, draws))
        place = (steps - self.first) / max(1, self.last - self.first) - 0.5
        own = self.levels.next_run(rng, draws)[:, None] + (slope * rng.standard_normal(draws))[:, None] * place
        return np.asarray(self.shared.slopes.mean() * place + self.shared.curve(steps) + own)

    def _bulk(self, rng: np.random.Generator, steps: Ints, draws: int) -> Floats:
        dof, own = self.bulk.dof, 0 if self.shared.few else self.runs - 1
        spread = np.sqrt((1 + 1 / self.runs) * self.prior.width.variances(rng, self.width_squares, own, draws))
        width = np.sqrt(self.prior.bulk.variances(rng, dof * self.bulk.width**2, dof, draws))
        width = width * np.exp(np.clip(spread * rng.standard_normal(draws), -2.5, 2.5))
        cell = rng.choice(len(CELLS), draws, p=self.cells)
        phi, share = (np.array(v)[cell] for v in zip(*CELLS, strict=True))
        units = np.interp(latent(rng, phi, share, len(steps)), SCORES, self.shape)
        # The curve itself is not known exactly; the noise of levels and slopes is in their spread already.
        curve = np.sqrt(1 + self.shared.known - self.shared.own)
        return np.asarray(curve * width[:, None] * self._spread(steps) * units)

    def _spread(self, steps: Ints) -> Floats:
        return np.interp(steps, self.shared.curve.steps, self.bulk.spread)

    def _scheduled(self, rng: np.random.Generator, kinds: Sequence[str], draws: int) -> Floats:
        added = np.zeros((draws, len(kinds)))
        for k, kind in enumerate(kinds):
            if kind in self.events:
                e = self.events[kind]
                sd = e.size * np.sqrt((1 + 1 / e.seen) * self.prior.event.variances(rng, e.squares, e.dof, draws))
                sd = np.clip(sd, self.bulk.width, max(self.bulk.width, 2 * e.size))
                added[:, k] = e.excess + sd * rng.standard_normal(draws)
        return added

    def stall_rate(self) -> tuple[float, float]:
        """Shape and scale of the Gamma that the stalls of a record are believed to be."""
        prior, seen = self.prior, self.stalls
        many = 1 + seen.counts.mean() / prior.dispersion  # stalls of a run come together: fewer than they seem
        shape = prior.stall_weight + seen.counts.sum() / many
        return float(shape), float(1 / (prior.stall_weight / prior.stall_rate + seen.records.sum() / many))

    def _stalls(self, rng: np.random.Generator, steps: Ints, draws: int) -> Floats:
        shape, scale = self.stall_rate()
        rate = rng.gamma(shape, scale, draws) * rng.gamma(self.prior.dispersion, 1 / self.prior.dispersion, draws)
        expected = rate[:, None] * np.interp(steps, self.stalls.where.steps, self.stalls.where.values)
        hit = rng.random(expected.shape) < -np.expm1(-expected)
        added = np.zeros(expected.shape)
        added[hit] = self._stall_seconds(rng, int(hit.sum()))
        return added

    def _again(self, rng: np.random.Generator, steps: Ints, events: Sequence[LogEvent], seconds: Floats) -> Floats:
        """Seconds of stalls that recur, given those of all records."""
        if not self.stalls.recurring:
            return np.zeros(seconds.shape)
        pauses = np.bincount([np.searchsorted(steps, e.after_step, "right") for e in events], minlength=len(steps) + 1)
        clock = self.start + np.cumsum(seconds + self.pause * pauses[: len(steps)], axis=1)
        numbers = np.searchsorted(self.shared.curve.steps, steps).astype(np.float64)
        return place_recurring(self.stalls.recurring, numbers, clock / (self.level * self.stride), rng)

    def _stall_seconds(self, rng: np.random.Generator, n: int) -> Floats:
        """Draws of stall seconds: those seen, a little longer or shorter, and the prior's by its weight."""
        prior, seen = self.prior, self.stalls.seconds
        least = LIMIT * self.bulk.width * self.level * self.stride
        new = np.maximum(prior.stall_seconds * np.exp(prior.stall_log_sd * rng.standard_normal(n)), least)
        if not len(seen):
            return new
        old = seen[rng.integers(0, len(seen), n)] * np.exp(0.2 * rng.standard_normal(n))
        other = rng.random(n) < prior.stall_seconds_weight / (prior.stall_seconds_weight + len(seen))
        return np.asarray(np.where(other, new, old))


def fit(logs: Sequence[StepLog], prior: SeriesPrior | None = None) -> SeriesFit:
    """Fit a group of sister runs; one run is enough, then the prior says how far apart runs are."""
    table = table_of(logs)
    level = float(np.median([np.median(x.seconds[min(lead_of(x), len(x.seconds) - 1) :]) for x in logs]))
    x = table.seconds / level - 1
    parts = shared(x, table.plain, table.steps)
    bulk = bulk_of(parts.left, table.plain, parts.known + parts.own, parts.few)
    usual = table.clock / (level * np.median(table.counts))
    stalls = stalls_of(parts.left * level * table.counts, bulk.stalls, table.plain, table.steps, usual)
    return SeriesFit(
        level=level,
        runs=len(logs),
        lead=lead_of(logs[0]),
        first=int(table.steps[0]),
        last=int(table.steps[-1]),
        shared=parts,
        bulk=bulk,
        stalls=stalls,
        events=_events(table, parts),
        prior=shipped(logs[0]) if prior is None else prior,
        nodes=float(logs[0].meta.get("nodes") or 1.0),
        stride=logs[0].stride,
        start=float(np.mean([x.clock[0] - x.seconds[0] * x.counts[0] for x in logs])),
        pause=float(np.mean([e.seconds for x in logs for e in x.events] or [0.0])),
        shared_events=table.shared_events,
    )


def _events(table: SisterRuns, parts: Shared) -> dict[str, EventExcess]:
    """What each kind of event adds, from all runs."""
    seen: dict[str, list[float]] = {}
    for r, row in enumerate(table.kinds):
        for k, kind in enumerate(row):
            if kind:
                seen.setdefault(kind, []).append(float(parts.left[r, k]))
    return {kind: _slowed(np.array(v)) for kind, v in seen.items()}


def _slowed(excess: Floats) -> EventExcess:
    middle = float(np.median(excess))
    off = (excess - middle) / (abs(middle) + LEAST_EVENT)
    return EventExcess(middle, float(np.sum(np.clip(off, -2, 2) ** 2)), len(excess) - 1.0, len(excess))


def _squares(x: Floats) -> float:
    return float(np.sum((x - x.mean()) ** 2))


# A long series goes on: what its next records look like, from those seen so far.
#
# A card under power control does not repeat a smooth curve: it steps between clocks, each for hundreds of kernels, and
# how often it sits at which one changes as it warms up. So the future is drawn as blocks of the past, whole stretches
# in their own order, later ones more often; what comes before the series has settled is left out.

PARTS = 40  # stretches that are compared to find where a series has settled
BLOCKS = 20  # a drawn block is this part of the settled series
HALF_LIFE = 0.5  # of the settled series: blocks this much older are half as likely


def settled(values: Floats) -> int:
    """Where a series has settled: stretches from there on have medians and p95s like those of its later half."""
    parts = np.array_split(np.arange(len(values)), min(PARTS, max(2, len(values) // 5)))
    seen = np.array([np.quantile(values[p], [0.5, 0.95]) for p in parts])
    late = seen[len(parts) // 2 :]
    margin = np.ptp(late, axis=0) / 4 + 2e-4 * late[:, 0].mean()
    like = ((seen >= late.min(axis=0) - margin) & (seen <= late.max(axis=0) + margin)).all(axis=1)
    return int(parts[int(np.argmax(like))][0])


def continue_series(values: Floats, records: int, rng: np.random.Generator, draws: int = 200) -> Floats:
    """[draws, records]: what may come next."""
    past = values[settled(values) :]
    size = max(1, len(past) // BLOCKS)
    starts = np.arange(len(past) - size + 1)
    weight = np.exp2(starts / (HALF_LIFE * len(past)))
    chosen = rng.choice(starts, (draws, -(-records // size)), p=weight / weight.sum())
    at = (chosen[..., None] + np.arange(size)).reshape(draws, -1)[:, :records]
    return np.asarray(past[at])


def slow_share(values: Floats, size: int = 25) -> float:
    """How much of the variance stays in means of `size` neighbours: 1 if they are alike, 1/size if unrelated."""
    clipped = np.clip(values, *np.quantile(values, [0.005, 0.995]))
    whole = clipped[: len(clipped) // size * size]
    total = float(whole.var())
    return float(whole.reshape(-1, size).mean(axis=1).var()) / total if total > 0 and len(whole) else 0.0


# Consecutive steps drawn from a noise model that says nothing of single GPUs: what a job's log may look like.


AT_ONCE = 8_000_000  # drawn steps that are held


def steps_of(
    noise: NoiseModel, seconds: float, nodes: float, steps: int, rng: np.random.Generator, runs: int = 1, first: int = 0
) -> Floats:
    """[runs, steps]: plain steps (nothing scheduled) of runs that differ; `first` steps before them are not drawn."""
    series = latent(rng, np.full(runs, noise.common.correlation), np.ones(runs), steps)
    return _steps(noise, seconds, nodes, rng, series, first)


def _steps(
    noise: NoiseModel, seconds: float, nodes: float, rng: np.random.Generator, series: Floats, first: int = 0
) -> Floats:
    """[runs, steps], given what goes with the step before, in standard deviations."""
    c, (runs, steps) = noise.common, series.shape
    place = np.linspace(-0.5, 0.5, first + steps)[first:]
    factor = c.run_sd * rng.standard_normal((runs, 1))
    factor = factor + (c.drift + c.drift_sd * rng.standard_normal((runs, 1))) * place
    hits = rng.poisson(noise.stalls.per_step(nodes, seconds), (runs, steps))
    held = np.zeros((runs, steps))
    np.add.at(held, np.nonzero(hits), noise.stalls.seconds.sample(rng, int((hits > 0).sum())))
    return np.asarray(seconds * np.exp(factor + c.sd * series) + c.jitter.sample(rng, (runs, steps)) + held)


def believed_records(
    belief: Belief,
    seconds: float,
    nodes: float,
    size: tuple[int, int, int],
    rng: np.random.Generator,
    stride: int = 1,
) -> Floats:
    """[groups, runs, records]: means of `stride` steps, each group with numbers drawn from what is believed of them."""
    groups, runs, records = size
    many = max(1, AT_ONCE // (runs * records * stride))
    out = []
    for first in range(0, groups, many):
        noises = [belief.drawn(rng) for _ in range(first, min(first + many, groups))]
        phi = np.repeat([n.common.correlation for n in noises], runs)
        series = latent(rng, phi, np.ones(len(phi)), records * stride).reshape(len(noises), runs, -1)
        drawn = (_steps(n, seconds, nodes, rng, x) for n, x in zip(noises, series, strict=True))
        out += [x.reshape(runs, records, stride).mean(axis=2) for x in drawn]
    return np.array(out)
