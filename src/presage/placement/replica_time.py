"""A replica's seconds, told by how slow the GPUs of its stages are: through the engine, alone or with drawn noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.engine import Durations, finish_times
from presage.noise.model import CLASSES, NoiseModel, SlowGpus
from presage.prediction.draws.replica_pools import MOST_TASKS, Replica, pieces
from presage.prediction.draws.step_model import StepModel

__all__ = ["Pipeline", "Singles", "without_gpus"]

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
TOUCHED = ("products", "attention")  # classes of work that a slow GPU slows: memory-bound work hardly varies


def without_gpus(noise: NoiseModel) -> NoiseModel:
    """What is left where GPUs' own speeds are known: nothing is drawn between them."""
    spread = {k: replace(s, rank=0.0) for k, s in noise.spread.items()}
    return replace(noise, spread=spread, slow=SlowGpus())


@dataclass(frozen=True, eq=False)
class Pipeline:
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
        """That one draw takes."""
        return len(self._long.made[1])

    @property
    def quick_tasks(self) -> int:
        return len(self._short.made[1])

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
        _, row = replica.made
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
        made, row = replica.made
        by_row = replica.base[:, None] * self._ratios(replica, factors)
        seconds = (by_row[row][:, :, None] * noises[:, None, :]).reshape(len(row), -1)
        alone = finish_times(made, Durations(replica.base[row], row.astype(np.int32), by_row))
        return np.asarray(finish_times(made, seconds).reshape(count, -1) / alone[:, None])

    def paired(self, factors: Floats, noises: Singles) -> Floats:
        """[row]: the same, each replica with the noise of its own draw."""
        replica, out = self._long, np.empty(len(factors))
        made, row = replica.made
        for some in pieces(len(out), len(row), least=16):
            by_row = replica.base[:, None] * self._ratios(replica, factors[some])
            alone = finish_times(made, Durations(replica.base[row], row.astype(np.int32), by_row))
            out[some] = finish_times(made, by_row[row] * noises[:, some]) / alone
        return self._long.evened(out)
