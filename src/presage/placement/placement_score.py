"""PlacementScore: what a placement is worth, quickly: the p95 of the slowest replica, each drawn with the same noise.

Of every replica the logarithm's mean and standard deviation are found from some draws through the engine; replicas
are independent given what they share, so that P(step <= t) is the product of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from presage.engine import Durations, finish_times
from presage.noise.distribution import Distribution, Fixed
from presage.noise.distribution.composed import smooth_distribution
from presage.noise.model import CLASSES, NoiseModel, SlowGpus
from presage.noise.sampling import RandomStreams
from presage.prediction.draws.draw import BLOCKS, Draws, in_blocks, whole_steps
from presage.prediction.draws.replica_pools import MOST_TASKS, Replica, pieces
from presage.prediction.draws.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GOAL = 0.95
DRAWS = 96
STEADIEST = 1e-4  # of the logarithm: no replica repeats better


@dataclass(frozen=True, eq=False)
class LogTimeMoments:
    """Mean and standard deviation of the logarithm of replicas' seconds, [row]."""

    mean: Floats
    sd: Floats
    quiet: Floats  # the logarithm itself, without noise

    def put(self, rows: NDArray[np.int64], new: LogTimeMoments) -> None:
        """Other values for some rows, in place: the search changes two at a time."""
        self.mean[rows], self.sd[rows], self.quiet[rows] = new.mean, new.sd, new.quiet

    def below(self, log_seconds: float) -> Floats:
        """[row]: the logarithm of the probability to take no longer."""
        from scipy.special import log_ndtr

        return np.asarray(log_ndtr((log_seconds - self.mean) / self.sd))


def slowest_quantile(m: LogTimeMoments, goal: float = GOAL) -> float:
    """Seconds that the slowest of the replicas stays below with this probability."""
    from scipy.special import ndtri

    wanted = np.log(goal)
    low = float((m.mean + ndtri(goal) * m.sd).max())  # one alone, and each as if all were like the worst
    high = float((m.mean + ndtri(goal ** (1 / len(m.mean))) * m.sd).max())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if m.below(middle).sum() < wanted else (low, middle)
        if high - low < 1e-13:
            break
    return float(np.exp(high))


@dataclass(frozen=True, eq=False)
class PlacementScore:
    """The p95 of placements of so many replicas."""

    pipeline: ReplicaTimes
    replicas: int
    draws: int = DRAWS
    seed: int = 0

    @cached_property
    def noises(self) -> Singles | None:
        rng = RandomStreams(self.seed)("judge")
        return self.pipeline.noises(rng, self.draws) if self.pipeline.varies else None

    def moments(self, factors: Floats) -> LogTimeMoments:
        """Moments of replicas [row, stage]."""
        quiet = np.log(self.pipeline.quiet(factors))
        if self.noises is None:
            return LogTimeMoments(quiet.copy(), np.full(len(quiet), STEADIEST), quiet)
        log = np.log(self.pipeline.ratios(factors, self.noises))
        return LogTimeMoments(quiet + log.mean(axis=1), np.maximum(log.std(axis=1, ddof=1), STEADIEST), quiet)

    def p95(self, factors: Floats) -> float:
        """p95 of the slowest replica of a placement [replica, stage]."""
        return slowest_quantile(self.moments(factors))

    @cached_property
    def wide(self) -> float:
        """How many standard deviations above its mean the slowest of the replicas, all alike, is at p95."""
        from scipy.special import ndtri

        return float(ndtri(GOAL ** (1 / self.replicas)))

    @property
    def work(self) -> int:
        """Tasks that judging one replica takes."""
        return self.pipeline.tasks * (self.draws if self.pipeline.varies else 0) + self.pipeline.quick_tasks


# ---- A replica's seconds, told by how slow the GPUs of its stages are: through the engine, alone or with noise.

Singles = NDArray[np.float32]
TOUCHED = ("products", "attention")  # classes of work that a slow GPU slows: memory-bound work hardly varies


def without_gpu_spread(noise: NoiseModel) -> NoiseModel:
    """What is left where GPUs' own speeds are known: nothing is drawn between them."""
    spread = {k: replace(s, rank=0.0) for k, s in noise.spread.items()}
    return replace(noise, spread=spread, slow=SlowGpus())


@dataclass(frozen=True, eq=False)
class ReplicaTimes:
    """Factors are of stages: what their slowest GPU takes as long as a usual one. One row of them is one replica."""

    shape: StepModel
    noise: NoiseModel
    most: int = MOST_TASKS  # tasks of a step whose operations are drawn one by one
    touched: tuple[str, ...] = TOUCHED

    @cached_property
    def _short(self) -> Replica:
        return Replica.of(self.shape, 0)

    @cached_property
    def _long(self) -> Replica:
        return Replica.of(self.shape, self.most)

    @property
    def varies(self) -> bool:
        """Whether replicas differ from step to step."""
        return self.noise.load.sd > 0 or any(s.own for s in self.noise.spread.values())

    @property
    def tasks(self) -> int:
        """Tasks that one draw simulates."""
        return len(self._long.tasks[1])

    @property
    def quick_tasks(self) -> int:
        return len(self._short.tasks[1])

    def quiet(self, factors: Floats) -> Floats:
        """[row]: seconds of replicas [row, stage] without noise."""
        replica, out = self._short, np.empty(len(factors))
        for some in pieces(len(out), len(replica.base)):
            out[some] = replica.seconds(self._ratios(replica, factors[some]))
        return out

    def _ratios(self, replica: Replica, factors: Floats) -> Floats:
        """[kind of task, row]: what their GPUs do to them."""
        share = sum(replica.shares[CLASSES.index(k)] for k in self.touched)
        return 1 + np.asarray(share)[:, None] * (factors.T[replica.stage] - 1)

    def noises(self, rng: np.random.Generator, count: int) -> Singles:
        """[task, draw]: factors of single operations, to be used for any replica."""
        replica = self._long
        _, row = replica.tasks
        sd = replica.own_sd(self.noise)
        out = rng.standard_normal((len(row), count), np.float32)
        np.exp(np.multiply(out, sd[row][:, None].astype(np.float32), out=out), out=out)
        if self.noise.load.sd:
            load = self.noise.load.sample(rng, (replica.schedule.microbatches, count)).astype(np.float32)
            works = replica.shares.sum(axis=0)[row] > 0
            out[works] *= load[replica.microbatch[works]]
        return out

    def ratios(self, factors: Floats, noises: Singles) -> Floats:
        """[row, draw]: how many times as long as without noise each replica takes, with the same noise for all."""
        out = np.empty((len(factors), noises.shape[1]))
        for some in pieces(len(out), noises.size, least=1):
            out[some] = self._some_ratios(factors[some], noises)
        return self._long.evened(out)

    def _some_ratios(self, factors: Floats, noises: Singles) -> Floats:
        replica, count = self._long, len(factors)
        made, row = replica.tasks
        by_row = replica.base[:, None] * self._ratios(replica, factors)
        seconds = (by_row[row][:, :, None] * noises[:, None, :]).reshape(len(row), -1)
        alone = finish_times(made, Durations(replica.base[row], row.astype(np.int32), by_row))
        return np.asarray(finish_times(made, seconds).reshape(count, -1) / alone[:, None])

    def paired(self, factors: Floats, noises: Singles) -> Floats:
        """[row]: the same, each replica with the noise of its own draw."""
        replica, out = self._long, np.empty(len(factors))
        made, row = replica.tasks
        for some in pieces(len(out), len(row), least=16):
            by_row = replica.base[:, None] * self._ratios(replica, factors[some])
            alone = finish_times(made, Durations(replica.base[row], row.astype(np.int32), by_row))
            out[some] = finish_times(made, by_row[row] * noises[:, some]) / alone
        return self._long.evened(out)


# ---- Steps of a placement as draws: every replica with its own GPUs and its own noise, all with what they share.

TASKS = 2_500_000  # of replicas whose steps are drawn, in each block
FEWEST, MOST = 160, 10_000  # draws of a class of replicas
SELDOM = 1e-3  # what is left out is seen so seldom


def draw_placement(pipeline: ReplicaTimes, factors: Floats, seed: int = 0, count: int = 10_000) -> Draws:
    """Steps of replicas [replica, stage]. The same seed gives two placements the same noise, replica by replica in the
    order of their speeds, so that they can be compared draw by draw."""
    quiet = pipeline.quiet(factors)
    order = np.argsort(-quiet, kind="stable")
    by_speed = factors[order], quiet[order]
    return in_blocks(lambda streams, size: _block(pipeline, *by_speed, streams, size), pipeline.shape, seed, count)


def _block(
    pipeline: ReplicaTimes, factors: Floats, quiet: Floats, streams: RandomStreams, size: tuple[int, int]
) -> tuple[Floats, Floats]:
    """[runs, steps]: seconds; those of jitter and stalls apart."""
    classes = _classes(len(quiet))
    pools = _pools(pipeline, factors, classes, streams, min(1.0, size[0] * size[1] / 1_250))
    seconds, reached = np.zeros(size), quiet[0] * _quantile(pools[0], SELDOM)  # by the slowest, in nearly all steps
    for k, (some, pool) in enumerate(zip(classes, pools, strict=True)):
        rng = streams(f"steps {k}")
        for row in some[
            quiet[some] * _quantile(pool, 1 - SELDOM / len(quiet)) >= reached
        ]:  # others are never the slowest
            np.maximum(seconds, quiet[row] * pool.quantile(rng.random(size)), out=seconds)
    return whole_steps(pipeline.shape, pipeline.noise, streams, seconds)


def _quantile(pool: Distribution, p: float) -> float:
    return float(np.asarray(pool.quantile(np.array([p])))[0])


def _classes(replicas: int) -> list[Ints]:
    """Replicas by how slow they are: the slowest alone, the next alone, two more, four more, ..."""
    ends = [0, 1]
    while ends[-1] < replicas:
        ends.append(min(2 * ends[-1], replicas))
    return [np.arange(a, b) for a, b in pairwise(ends)]


def _pools(
    pipeline: ReplicaTimes, factors: Floats, classes: list[Ints], streams: RandomStreams, part: float
) -> list[Distribution]:
    """What noise does to each class of replicas."""
    if not pipeline.varies:
        return [Fixed(1.0)] * len(classes)
    count = int(np.clip(TASKS * part / pipeline.tasks / len(classes), FEWEST, MOST))
    noises, rng = _noises(pipeline, streams, count), streams("members")
    return [
        smooth_distribution(pipeline.paired(factors[some[rng.integers(0, len(some), count)]], noises))
        for some in classes
    ]


@lru_cache(BLOCKS)
def _noises(pipeline: ReplicaTimes, streams: RandomStreams, count: int) -> Singles:
    """Kept: many placements of one job are drawn with the same."""
    return pipeline.noises(streams("own"), count)
