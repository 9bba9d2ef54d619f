"""Steps of a placement as draws: every replica with its own GPUs and its own noise, all with what they share."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from presage.noise.distribution import Distribution, Fixed
from presage.noise.distribution.composed import smooth_distribution
from presage.noise.sampling import RandomStreams
from presage.placement.replica_time import Pipeline, Singles
from presage.prediction.draws.draw import BLOCKS, Draws, in_blocks, whole_steps

__all__ = ["drawn_steps"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TASKS = 2_500_000  # of replicas whose steps are drawn, in each block
FEWEST, MOST = 160, 10_000  # draws of a class of replicas
SELDOM = 1e-3  # what is left out is seen so seldom


def drawn_steps(pipeline: Pipeline, factors: Floats, seed: int = 0, count: int = 10_000) -> Draws:
    """Of replicas [replica, stage]. The same seed gives two placements the same noise, replica by replica in the order
    of their speeds, so that they can be compared draw by draw."""
    quiet = pipeline.quiet(factors)
    order = np.argsort(-quiet, kind="stable")
    by_speed = factors[order], quiet[order]
    return in_blocks(lambda streams, size: _block(pipeline, *by_speed, streams, size), pipeline.shape, seed, count)


def _block(
    pipeline: Pipeline, factors: Floats, quiet: Floats, streams: RandomStreams, size: tuple[int, int]
) -> tuple[Floats, Floats]:
    """[runs, steps]: seconds; those of jitter and stalls apart."""
    classes = _classes(len(quiet))
    pools = _pools(pipeline, factors, classes, streams, min(1.0, size[0] * size[1] / 1_250))
    seconds, reached = np.zeros(size), quiet[0] * _at(pools[0], SELDOM)  # by the slowest, in nearly all steps
    for k, (some, pool) in enumerate(zip(classes, pools, strict=True)):
        rng = streams(f"steps {k}")
        for row in some[quiet[some] * _at(pool, 1 - SELDOM / len(quiet)) >= reached]:  # others are never the slowest
            np.maximum(seconds, quiet[row] * pool.quantile(rng.random(size)), out=seconds)
    return whole_steps(pipeline.shape, pipeline.noise, streams, seconds)


def _at(pool: Distribution, p: float) -> float:
    return float(np.asarray(pool.quantile(np.array([p])))[0])


def _classes(replicas: int) -> list[Ints]:
    """Replicas by how slow they are: the slowest alone, the next alone, two more, four more, ..."""
    ends = [0, 1]
    while ends[-1] < replicas:
        ends.append(min(2 * ends[-1], replicas))
    return [np.arange(a, b) for a, b in pairwise(ends)]


def _pools(
    pipeline: Pipeline, factors: Floats, classes: list[Ints], streams: RandomStreams, part: float
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
def _noises(pipeline: Pipeline, streams: RandomStreams, count: int) -> Singles:
    """Kept: many placements of one job are drawn with the same."""
    return pipeline.noises(streams("own"), count)
