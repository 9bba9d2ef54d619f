"""The independent signature-pool sampler: every operation draws from all durations of its type and stage.

All ranks, microbatches and steps in one pool: the yardstick that random effects are measured against. Host time and the
ends of collectives come from one training step, as they do there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.engine import Durations, finish_times
from presage_fit.opreplay import PARTS, Replay
from presage_fit.ops.effects import in_pieces

__all__ = ["IidPool", "iid_pool"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class IidPool:
    """Operation k draws from `pool[first[k]:last[k]]`; members of a meeting take the draw of the first of them."""

    played: Replay
    seconds: Floats  # (tasks, training steps) as measured
    bias: float
    pool: Floats
    first: Ints
    last: Ints
    leader: Ints

    def draw(self, rng: np.random.Generator, draws: int) -> Durations:
        """Seconds by task for the engine."""
        out = self.seconds[:, rng.integers(0, self.seconds.shape[1], draws)]
        run = self.pool[rng.integers(self.first[:, None], self.last[:, None], (len(self.first), draws))]
        out[1 : PARTS * len(run) : PARTS] = run[self.leader]
        return Durations.of(out)

    def times(self, rng: np.random.Generator, draws: int) -> Floats:
        """Seconds of `draws` steps."""
        parts = in_pieces(np.arange(draws), 2 * len(self.played.program))
        return self.bias * np.concatenate([finish_times(self.played.program, self.draw(rng, len(p))) for p in parts])


def iid_pool(played: Replay, bias: float = 1.0) -> IidPool:
    """From the training steps of a replay, for its program."""
    steps = played.steps
    which = np.unique(np.stack([steps.op, steps.stage]), axis=1, return_inverse=True)[1].reshape(-1)
    order = np.argsort(which, kind="stable")
    width = played.run.shape[1]
    first = np.searchsorted(which[order], which) * width
    last = np.searchsorted(which[order], which, "right") * width
    group = played.program.group[1 : PARTS * len(steps) : PARTS].astype(np.int64)
    key = np.where(group >= 0, group, group.max(initial=0) + 1 + np.arange(len(group)))
    leader = np.unique(key, return_index=True)[1][np.unique(key, return_inverse=True)[1].reshape(-1)]
    return IidPool(played, played.durations(), bias, played.run[order].ravel(), first, last, leader)
