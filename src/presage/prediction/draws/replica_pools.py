"""Pools of a replica's seconds, run through the engine: the same Program, an array of draws for each task.

`rank_effects` draws what stays for a whole run (the GPUs a replica got), `step_jitter` what changes in every step
(microbatches' work, operations' own noise), `common_shift` the response to what all replicas share. A step with many
microbatches is run with few and the slowest stage's pace added for the rest, as `parallel.pipeline` does where nothing
is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from presage.engine import Durations, Program, finish_times
from presage.noise.distribution import Normal
from presage.noise.model import CLASSES, NoiseModel
from presage.parallel.pipeline import Schedule
from presage.parallel.pipeline_run import pipeline_durations, pipeline_program, simulate_durations
from presage.prediction.draws.step_model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STANDARD = Normal(0.0, 1.0)
TENSOR = tuple(CLASSES.index(k) for k in ("products", "attention"))
ROUNDS = 2.0  # times the fewest microbatches that keep all stages at work
MOST_TASKS = 3072  # of a step whose operations are drawn one by one
HELD = 3_000_000  # numbers at a time


@dataclass(frozen=True, eq=False)
class Replica:
    """A replica's pipeline with few enough microbatches to draw, and what the others add."""

    shape: StepModel
    schedule: Schedule

    @staticmethod
    def of(shape: StepModel, most: int) -> Replica:
        """With no more tasks than `most`, if that is enough to fill the pipeline."""
        s = shape.pipeline.schedule
        each = s.stages * s.virtual * s.operations
        few = s.same_rest(max(int(s.filling * ROUNDS), most // each))
        return Replica(shape, s if few >= s.microbatches else s.few(few))

    @property
    def left(self) -> int:
        """Microbatches that are not simulated."""
        return self.shape.pipeline.schedule.microbatches - self.schedule.microbatches

    @cached_property
    def tasks(self) -> tuple[Program, Ints]:
        """The program, and each task's row: tasks of a row are of one stage, with equal seconds and classes of work."""
        program, kind = _program(self.schedule, self.shape.pipeline.durations.overlap, _key(self.shape))
        return program, self._rows[1][kind]

    @cached_property
    def microbatch(self) -> Ints:
        """[task]; a message that two stages wait for is two tasks."""
        tasks = self.schedule.tasks(self.shape.pipeline.durations.overlap)
        return np.repeat(tasks.microbatch, 1 + tasks.program.meeting).astype(np.int64)

    @cached_property
    def _rows(self) -> tuple[Floats, Ints, Ints]:
        """[row]: stage, seconds and classes' shares of them; [kind]: its row; [stage, row]: times in a microbatch."""
        s, each = self.schedule, self.shape.work[:, [0, 1, 2, 0]]
        stages = np.append(np.tile(np.repeat(np.arange(s.stages), s.virtual), 4), np.arange(s.stages))
        shares = (each / np.maximum(each.sum(axis=0), 1e-300)).reshape(len(CLASSES), -1)
        shares = np.append(shares, np.zeros((len(CLASSES), s.stages)), axis=1)  # messages are none of the GPU's work
        seconds = self.shape.pipeline.durations.kinds(s.meets)[0]
        rows, row = np.unique(np.vstack([stages, seconds, shares.round(12)]).T, axis=0, return_inverse=True)
        counts, work = np.zeros((s.stages, len(rows)), np.int64), 3 * s.stages * s.virtual
        np.add.at(counts, (stages[:work], row.ravel()[:work]), 1)
        return rows, row.ravel(), counts

    @property
    def stage(self) -> Ints:
        """[row]: its stage."""
        return self._rows[0][:, 0].astype(np.int64)

    @property
    def base(self) -> Floats:
        """[row]: seconds without noise."""
        return self._rows[0][:, 1]

    @property
    def shares(self) -> Floats:
        """[class, row]: shares of the seconds."""
        return self._rows[0][:, 2:].T

    @cached_property
    def quiet(self) -> float:
        """Seconds without noise, of the microbatches that are run."""
        return simulate_durations(self.schedule, self.shape.pipeline.durations).total

    @cached_property
    def pace(self) -> float:
        """What the slowest stage's pace is multiplied by to give what a further microbatch takes."""
        total, slowest = self.shape.pipeline.total, float(self.busy(np.ones((len(self.base), 1)))[0])
        return (total - self.quiet) / (self.left * slowest) if self.left and slowest else 0.0

    def busy(self, ratio: Floats) -> Floats:
        """[draws]: seconds of a microbatch on the slowest stage, where tasks take `ratio`[row, draw] as long."""
        return np.asarray((self._rows[2] @ (self.base[:, None] * ratio)).max(axis=0))

    def seconds(self, ratio: Floats) -> Floats:
        """[draws]: of all microbatches, where tasks take `ratio`[row, draw] as long as usual."""
        made, row = self.tasks
        took = finish_times(made, Durations(self.base[row], row.astype(np.int32), self.base[:, None] * ratio))
        return took + self.left * self.pace * self.busy(ratio) if self.left else took

    def own_sd(self, noise: NoiseModel) -> Floats:
        """[row]: of a task's own noise, that of its classes of work by their shares."""
        each = ((self.shares[k] * noise.of(name).own) ** 2 for k, name in enumerate(CLASSES))
        return np.asarray(np.sqrt(sum(each)))

    def evened(self, ratio: Floats) -> Floats:
        """[..., draw]: the mean stays and what is independent evens out, where a step has more microbatches than were
        run."""
        if not self.left:
            return ratio
        mean = ratio.mean(axis=-1, keepdims=True)
        even = np.sqrt(self.schedule.microbatches / self.shape.pipeline.schedule.microbatches)
        return np.asarray(mean + (ratio - mean) * even)


def _key(shape: StepModel) -> tuple[float, ...]:
    return tuple(shape.pipeline.durations.send.tolist())


@lru_cache(64)
def _program(schedule: Schedule, beside: bool, send: tuple[float, ...]) -> tuple[Program, Ints]:
    """Tasks and kinds; of the durations only the messages count, which are delays of edges."""
    nothing = np.zeros((schedule.stages, schedule.virtual))
    return pipeline_program(schedule, pipeline_durations(schedule, nothing, nothing, nothing, np.array(send), beside))


class Gpus(NamedTuple):
    """The slowest GPUs of replicas' stages, [stage, draw]: their places among usual ones, in standard deviations, and
    what slow ones take as long, 1 where there is none."""

    place: Floats
    beyond: Floats

    def of(self, draws: Ints | slice) -> Gpus:
        """The GPUs of a slice of the draws."""
        return Gpus(self.place[:, draws], self.beyond[:, draws])


def pieces(count: int, rows: int, least: int = 64) -> Iterator[slice]:
    """Slices of the draws, so that rows x draws stays below `HELD` numbers."""
    width = max(least, HELD // max(1, rows))
    return (slice(first, min(first + width, count)) for first in range(0, count, width))


def rank_effects(shape: StepModel, noise: NoiseModel, gpus: Gpus) -> Floats:
    """[draw]: seconds of replicas with such GPUs, in a step in which nothing else differs."""
    replica = Replica.of(shape, 0)
    out = np.empty(gpus.place.shape[1])
    for some in pieces(len(out), len(replica.base)):
        out[some] = replica.seconds(ratios(replica, noise, gpus.of(some)))
    return out


def drawn_gpus(shape: StepModel, noise: NoiseModel, rng: np.random.Generator, count: int, slow: bool) -> Gpus:
    """Draw each stage's slowest GPU of those that wait for each other: without slow GPUs, or with at least one."""
    size = shape.stages, count
    place = STANDARD.quantile(rng.random(size) ** (1 / shape.together))
    beyond = _slow(shape, noise, rng, size) if slow else np.ones(size)
    place[list(shape.still)], beyond[list(shape.still)] = 0.0, 1.0
    return Gpus(place, beyond)


def _slow(shape: StepModel, noise: NoiseModel, rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """[stage, draw]: factors of slow GPUs, of which each draw has at least one."""
    some = rng.random(size) < -np.expm1(shape.together * np.log1p(-noise.slow.share))
    none = np.flatnonzero(~some.any(axis=0))
    some[rng.integers(0, size[0], len(none)), none] = True
    return np.where(some, noise.slow.factor.sample(rng, size), 1.0)


def ratios(replica: Replica, noise: NoiseModel, gpus: Gpus) -> Floats:
    """[row, draw]: what the slowest GPU of a stage does to its tasks."""
    out = np.ones((len(replica.base), gpus.place.shape[1]))
    for k, name in enumerate(CLASSES):
        sd, slow = noise.of(name).rank, k in TENSOR and noise.slow.share > 0 and name not in replica.shape.immune
        if (sd or slow) and replica.shares[k].any():
            factor = np.exp(sd * gpus.place)
            more = (np.maximum(factor, gpus.beyond) if slow else factor) - 1
            out += replica.shares[k][:, None] * more[replica.stage]
    return out


def step_jitter(shape: StepModel, noise: NoiseModel, rng: np.random.Generator, gpus: Gpus) -> Floats:
    """[draw]: how many times as long as its GPUs would take, a replica takes in one step."""
    replica = Replica.of(shape, MOST_TASKS)
    out = np.empty(gpus.place.shape[1])
    for some in pieces(len(out), len(replica.tasks[1]), least=16):
        out[some] = _one_by_one(replica, noise, rng, gpus.of(some))
    return replica.evened(out)


def tasks_of(shape: StepModel) -> int:
    """Number of tasks of one draw of `step_jitter`."""
    return len(Replica.of(shape, MOST_TASKS).tasks[1])


def _one_by_one(replica: Replica, noise: NoiseModel, rng: np.random.Generator, gpus: Gpus) -> Floats:
    """Every task drawn by itself, over the same with its GPUs' effects alone."""
    (made, row), count = replica.tasks, gpus.place.shape[1]
    by_row = replica.base[:, None] * ratios(replica, noise, gpus)
    sd = replica.own_sd(noise)
    sd[np.isin(replica.stage, list(replica.shape.still))] = 0.0
    factor = rng.standard_normal((len(row), count), np.float32)  # fast, and far finer than what is known of noise
    factor *= sd[row][:, None].astype(np.float32)
    seconds = by_row[row]
    seconds *= np.exp(factor, out=factor)
    if noise.load.sd:
        load = noise.load.sample(rng, (replica.schedule.microbatches, count))
        works = replica.shares.sum(axis=0)[row] > 0
        seconds[works] *= load[replica.microbatch[works]]
    alone = finish_times(made, Durations(replica.base[row], row.astype(np.int32), by_row))
    return np.asarray(finish_times(made, seconds) / alone)


def common_shift(shape: StepModel, factors: Floats) -> Floats:
    """[draw]: how many times as long a replica takes when classes of work take `factors`[class, draw] as long on all
    its GPUs."""
    replica = Replica.of(shape, 0)
    out = np.empty(factors.shape[1])
    for some in pieces(len(out), len(replica.base)):
        out[some] = replica.seconds(1 + replica.shares.T @ (factors[:, some] - 1))
    return out / shape.pipeline.total
