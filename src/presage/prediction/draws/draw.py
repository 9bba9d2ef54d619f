"""`draw(shape, noise) -> Draws`: step times of many runs of a job, some steps of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.noise.distribution import Fixed
from presage.noise.distribution.composed import smooth_distribution
from presage.noise.model import CLASSES, COMPUTE, NoiseModel, WorkSpread
from presage.noise.sampling import Estimate, RandomStreams, Replicas, estimate, slowest_replica
from presage.pool.pool import THREADS_2, Pool
from presage.prediction.draws.replica_pools import (
    STANDARD,
    Gpus,
    common_shift,
    drawn_gpus,
    rank_effects,
    step_jitter,
    tasks_of,
)
from presage.prediction.draws.step_model import StepModel

Floats = NDArray[np.float64]
Block = tuple[Floats, Floats]  # seconds of [runs, steps]; those of jitter and stalls apart
STEPS = 2  # of each run: two tell how much of the spread is the run's, and many runs tell more than many steps
BLOCKS = 8
USUAL = 64  # GPUs of the jobs whose steps the laws were fitted to
GPUS, TASKS = 10_000, 2_500_000  # of each block: replicas whose GPUs are drawn, tasks of replicas whose steps are
LEAST = 0.2  # of either, for a kind of replicas however rare
TOP = 0.004  # of the former, what is smoothed: a few slow GPUs make no tail of one piece
STRATA = (0.0, 0.5, 0.9, 0.99, 0.999)  # of replicas by their GPUs, usual to slowest,
WORTH = (0.35, 0.3, 0.15, 0.1, 0.1)  # and how many of the latter are of each


@dataclass(frozen=True, eq=False)
class Draws:
    """Seconds of steps: [runs, steps]. Steps of a run have its GPUs and its pace in common."""

    seconds: Floats
    quiet: float  # with no noise
    lasting: Floats  # of them, what is no jitter and no stall

    @property
    def mean(self) -> Estimate:
        return estimate(self.seconds, lambda x: float(x.mean()))

    def quantile(self, p: float) -> Estimate:
        """A quantile of single steps of all runs."""
        return estimate(self.seconds, lambda x: float(np.quantile(x, p)))

    @cached_property
    def p50(self) -> Estimate:
        return self.quantile(0.5)

    @cached_property
    def p95(self) -> Estimate:
        return self.quantile(0.95)

    def exceeds(self, seconds: float) -> Estimate:
        """The probability that a step takes longer."""
        return estimate(self.seconds, lambda x: float(np.mean(x > seconds)))

    def run_quantile(self, p: float) -> Estimate:
        """A quantile of a run's mean step, which determines when it ends."""
        return estimate(self.run_means[:, None], lambda x: float(np.quantile(x, p)))

    @cached_property
    def run_means(self) -> Floats:
        """[runs]: mean steps of runs that are long. Means of the few steps drawn vary more: they are drawn together."""
        means, n = self.lasting.mean(axis=1), self.lasting.shape[1]
        own = self.lasting.var(axis=1, ddof=1).mean() / n if n > 1 else 0.0
        seen = means.var()
        left = np.sqrt(max(0.0, seen - own) / seen) if seen else 0.0
        return np.asarray(self.seconds.mean() + (means - means.mean()) * left)

    @cached_property
    def within(self) -> Floats:
        """Steps over their run's mean, of all runs: what one run's own log of steps would show."""
        return np.asarray((self.seconds / self.seconds.mean(axis=1, keepdims=True)).ravel())

    @property
    def run_sd(self) -> float:
        """Standard deviation of log run means."""
        return float(np.log(self.run_means).std())

    @property
    def step_sd(self) -> float:
        """Standard deviation of steps within a run, relative to its mean."""
        n = self.seconds.shape[1]
        return float(self.within.std() * np.sqrt(n / (n - 1))) if n > 1 else 0.0


class Drawn:
    """Mixin of results with `draws`: their quantiles."""

    draws: Draws

    @property
    def p50(self) -> Estimate:
        return self.draws.p50

    @property
    def p95(self) -> Estimate:
        return self.draws.p95


def blocks_of(count: int, steps: int = STEPS) -> tuple[int, tuple[int, int]]:
    """How many blocks so many draws are, and [runs, steps] of each. Blocks share nothing, so that how they differ tells
    all of the draws' error."""
    steps = min(steps, count)
    blocks = int(np.clip(count // 1_000, 2, BLOCKS))
    return blocks, (max(1, -(-count // (steps * blocks))), steps)


def in_blocks(
    block: Callable[[RandomStreams, tuple[int, int]], Block], shape: StepModel, seed: int, count: int
) -> Draws:
    """Draws from a function that computes one block, two blocks at a time."""
    blocks, size = blocks_of(count)
    return join_blocks(shape, THREADS_2.map(lambda k: block(RandomStreams(seed).child(k), size), range(blocks)))


def join_blocks(shape: StepModel, blocks: Iterable[Block]) -> Draws:
    """Join blocks into Draws."""
    lasting, passing = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Draws(np.maximum(lasting + passing, 0.0), shape.seconds, lasting)


def slowest_replicas(
    shape: StepModel, noise: NoiseModel, streams: RandomStreams, size: tuple[int, int], pools: float = 1.0
) -> Floats:
    """[runs, steps]: seconds of the slowest replica's pipeline; `pools`: how large those are that it is drawn from."""
    kinds = _replicas(shape, noise, streams, pools)
    return slowest_replica(kinds, shape.replicas, *size, streams.even("replicas"), streams("steps"))


def replicas_key(shape: StepModel, noise: NoiseModel) -> tuple[object, ...]:
    """All that the slowest replica depends on: shapes and noises that agree in it can be drawn together."""
    spreads = sorted((k, s.rank, s.own) for k, s in _spreads(shape, noise).items() if s.rank or s.own)
    own = tuple(spreads), noise.slow, noise.load
    return shape.pipeline, shape.replicas, shape.together, shape.still, shape.immune, own


def whole_steps(
    shape: StepModel, noise: NoiseModel, streams: RandomStreams, longest: Floats, consecutive: bool = False
) -> Block:
    """[runs, steps]: seconds of steps whose slowest replica takes so long; those of jitter and stalls apart.

    `consecutive`: steps of a run follow each other, so they share the network's state and go with the step before.
    """
    size = longest.shape[0], longest.shape[1]
    seconds = longest * shape.calm * _compute(shape, noise, streams, size)
    seconds += shape.seconds - shape.pipeline.total
    seconds += _transfers(shape, noise, streams, size, consecutive)
    seconds *= common_factors(noise, streams, size, consecutive)
    jitter = noise.common.jitter.sample(streams.even("jitter"), size)
    rate = noise.stalls.per_step(shape.nodes, shape.seconds)
    return np.asarray(seconds), jitter + stall_seconds(noise, streams, size, rate)


def _spreads(shape: StepModel, noise: NoiseModel) -> dict[str, WorkSpread]:
    """Noise of the classes of work in a replica's pipeline."""
    return {k: s for k, s in noise.spread.items() if shape.work[CLASSES.index(k)].any()}


def without_fitted_stragglers(shape: StepModel, noise: NoiseModel) -> StepModel:
    """The laws' efficiencies were fitted to steps of real jobs (most with 8 to 512 GPUs), so the slowest of some GPUs
    is in them already, and only what more GPUs add may come on top: a step whose stages are all as slow as the slowest
    of `USUAL` GPUs is (in the median) is as predicted. Measured steps agree: their errors grow by 0.1% (standard error
    0.3%) with each doubling of the GPUs."""
    place = float(STANDARD.quantile(0.5 ** (1 / USUAL)))
    gpus = Gpus(np.full((shape.stages, 1), place), np.ones((shape.stages, 1)))
    slow = float(rank_effects(replace(shape, still=frozenset()), noise, gpus)[0])
    return shape.changed(calm=float(shape.pipeline.total / slow))


def _replicas(shape: StepModel, noise: NoiseModel, streams: RandomStreams, pools: float) -> tuple[Replicas, ...]:
    """Those with usual GPUs, and those with a slow one: few, but they would be lost among the others."""
    some = -np.expm1(shape.together * shape.stages * np.log1p(-noise.slow.share))
    usual = _kind(shape, noise, streams, "", 1 - some, pools)
    return (usual, _kind(shape, noise, streams, "slow ", some, pools)) if some else (usual,)


def _kind(
    shape: StepModel, noise: NoiseModel, streams: RandomStreams, named: str, share: float, pools: float
) -> Replicas:
    """Pools of what stays and of what changes: the latter for usual replicas, slow ones and the slowest."""
    steadily, own = _varies(shape, noise)
    pooled = GPUS, min(GPUS, TASKS / tasks_of(shape))
    many, few = (max(200, int(n * max(share, LEAST) * pools)) for n in pooled)
    gpus = drawn_gpus(shape, noise, streams(f"{named}gpus"), many if steadily or named else 1, bool(named))
    seconds = rank_effects(shape, noise, gpus) if steadily or named else np.full(1, shape.pipeline.total)
    if not own:
        return Replicas(smooth_distribution(seconds, TOP), (Fixed(1.0),), share=share)
    rng = streams(f"{named}own")
    strata, sizes = ((0.0,), [few]) if len(seconds) == 1 or shape.replicas == 1 else (STRATA, _few_of(few))
    ends = [int(s * len(seconds)) for s in (*strata, 1.0)]
    order = np.argsort(seconds)
    chosen = [order[rng.integers(lo, max(hi, lo + 1), n)] for (lo, hi), n in zip(pairwise(ends), sizes, strict=True)]
    ratio = step_jitter(shape, noise, rng, gpus.of(np.concatenate(chosen)))
    parts = np.split(ratio, np.cumsum(sizes)[:-1])
    return Replicas(smooth_distribution(seconds, TOP), tuple(map(smooth_distribution, parts)), strata, share)


def _few_of(count: int) -> list[int]:
    """Number of draws of each stratum."""
    return [int(count * w) for w in WORTH]


def _varies(shape: StepModel, noise: NoiseModel) -> tuple[bool, bool]:
    """Whether replicas differ by their GPUs, and from step to step."""
    spreads = _spreads(shape, noise).values()
    steadily = any(s.rank for s in spreads)
    return steadily, noise.load.sd > 0 or any(s.own for s in spreads)


def _compute(shape: StepModel, noise: NoiseModel, streams: RandomStreams, size: tuple[int, int]) -> Floats | float:
    """What classes of compute do that are slower everywhere in a step."""
    sds = [noise.of(k).step if k in COMPUTE else 0.0 for k in CLASSES]
    if not any(sds):
        return 1.0
    factors = np.ones((len(CLASSES), size[0] * size[1]))
    for k, sd in enumerate(sds):
        if sd:
            factors[k] = np.exp(sd * streams(f"step of {CLASSES[k]}").standard_normal(factors.shape[1]))
    return common_shift(shape, factors).reshape(size)


def _transfers(
    shape: StepModel, noise: NoiseModel, streams: RandomStreams, size: tuple[int, int], consecutive: bool
) -> Floats:
    """What slower transfers add: the network's state is the same for all of a step's."""
    total = np.zeros(size)
    together = (size[1], size[0]) if consecutive else (1, size[0] * size[1])
    states = noise.network.path(streams.even("network"), *together)
    factors = np.array(noise.network.factors)[states.T if consecutive else states.reshape(size)]
    for kind in shape.curves if transfers_vary(noise) else ():
        spread, times = noise.of(kind), np.ones(size)
        if kind in shape.across:
            times *= factors
        if spread.step:
            times *= np.exp(spread.step * streams(f"step of {kind}").standard_normal(size))
        if kind == "dp" and spread.own:  # of the groups, one for each stage, all wait for the last
            u = streams.uniform("own of dp", size) ** (1 / shape.stages)
            times *= np.exp(spread.own * STANDARD.quantile(u))
        total += shape.later(kind, times)
    return total


def transfers_vary(noise: NoiseModel) -> bool:
    """Whether the duration of any transfer varies between steps."""
    spreads = [noise.of(k) for k in CLASSES if k not in COMPUTE]
    return noise.network.factors != (1.0,) or any(s.step or s.own for s in spreads)


def common_factors(noise: NoiseModel, streams: RandomStreams, size: tuple[int, ...], consecutive: bool) -> Floats:
    """[runs, steps]: what all GPUs share: the run's own pace, its drift, the step's."""
    c = noise.common
    state = streams.normal("common", size)
    if consecutive:
        state = state.copy()
    for k in range(1, size[1] if consecutive else 0):
        state[:, k] = c.correlation * state[:, k - 1] + np.sqrt(1 - c.correlation**2) * state[:, k]
    log = c.sd * state
    log += c.run_sd * streams.normal("run", (size[0], 1))
    place = streams.uniform("place", (size[0], 1) if consecutive else size) - 0.5
    drift = c.drift + c.drift_sd * streams.normal("drift", (size[0], 1))
    return np.exp(log + drift * place)


def stall_seconds(noise: NoiseModel, streams: RandomStreams, size: tuple[int, ...], rate: float) -> Floats:
    """[runs, steps]: seconds of stalls, of which so many are expected in a step."""
    if not rate:
        return np.zeros(size)
    place, share = streams.uniform("stalls", size), -np.expm1(-rate)
    if streams.evenly:  # places of the steps that stall are even too
        return np.where(place < share, noise.stalls.seconds.quantile(np.minimum(place / share, 1 - 1e-12)), 0.0)
    return np.where(place < share, noise.stalls.seconds.sample(streams("stalled"), size), 0.0)


# ---- `draw(shape, noise) -> Draws`: step times of many runs of a job, some steps of each; `draw_all`: many at once.

MOST = 16_000_000  # steps that are held at once


@dataclass(frozen=True, eq=False)
class DrawRequest:
    """Draws to make: `steps` steps of each of count / steps runs; or, where a log records means of `record`
    consecutive steps, one such mean of each of `count` runs."""

    shape: StepModel
    noise: NoiseModel
    count: int = 10_000
    steps: int = STEPS
    record: int = 1
    pools: float = 1.0  # of the usual size: those that the slowest replica is drawn from
    evenly: bool = False  # what is drawn once a step or a run is spread evenly over its distribution

    @property
    def blocks(self) -> tuple[int, tuple[int, int]]:
        """How many blocks, and [runs, steps] of each."""
        blocks, (runs, _) = blocks_of(self.count, 1)
        return (blocks, (runs, self.record)) if self.record > 1 else blocks_of(self.count, self.steps)


class _Piece(NamedTuple):
    """One block of one request."""

    some: tuple[int, ...]
    block: int


def draw(
    shape: StepModel, noise: NoiseModel, seed: int = 0, count: int = 10_000, steps: int = STEPS, pool: Pool = THREADS_2
) -> Draws:
    """Some `steps` of each of count / steps runs. The same seed gives each source of noise the same draws, whatever the
    others are: two plans, or one with a source less, can be compared draw by draw."""
    return next(draw_all([DrawRequest(shape, noise, count, steps)], seed, pool))[1]


def draw_all(asked: Sequence[DrawRequest], seed: int = 0, pool: Pool = THREADS_2) -> Iterator[tuple[int, Draws]]:
    """Pairs of request number and Draws; requests with the same slowest replicas are drawn together."""
    for a in asked:
        if transfers_vary(a.noise):
            a.shape.curves  # noqa: B018 - here, once, and not in every piece
    parts = list(_parts(asked))
    pieces = [_Piece(some, k) for some in parts for k in range(_blocks(asked[some[0]]))]
    found = pool.map(partial(_drawn, asked, seed), pieces)
    for some in parts:
        blocks = [next(found) for _ in range(_blocks(asked[some[0]]))]
        for i, of_one in zip(some, zip(*blocks, strict=True), strict=True):
            yield i, join_blocks(asked[i].shape, of_one)


def _parts(asked: Sequence[DrawRequest]) -> Iterator[tuple[int, ...]]:
    """Requests that share their slowest replicas, as many as fit in memory."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, a in enumerate(asked):
        alike.setdefault((a.count, a.steps, a.record, a.pools, a.evenly, *replicas_key(a.shape, a.noise)), []).append(i)
    for some in alike.values():
        many = max(1, MOST // (asked[some[0]].count * asked[some[0]].record))
        yield from (tuple(some[i : i + many]) for i in range(0, len(some), many))


def _blocks(a: DrawRequest) -> int:
    return a.blocks[0]


def _drawn(asked: Sequence[DrawRequest], seed: int, piece: _Piece) -> list[Block]:
    first = asked[piece.some[0]]
    streams = RandomStreams(seed, piece.block, first.evenly)
    longest = slowest_replicas(first.shape, first.noise, streams, first.blocks[1], first.pools)
    several = first.record > 1
    found = [whole_steps(asked[i].shape, asked[i].noise, streams, longest, several) for i in piece.some]
    return [(a.mean(axis=1, keepdims=True), b.mean(axis=1, keepdims=True)) for a, b in found] if several else found
