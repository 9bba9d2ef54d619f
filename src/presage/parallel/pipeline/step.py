"""`run(schedule, forward, backward, ...) -> Run`: when the stages of a pipeline are done, and where they wait.

A step with many microbatches is run with few, and the rest added, where that is certain to give the same (see `pace`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.parallel.pipeline.durations import Durations, durations
from presage.parallel.pipeline.pace import settled
from presage.parallel.pipeline.schedule import Schedule
from presage.parallel.pipeline.structure import Structure

__all__ = ["Run", "run"]

Floats = NDArray[np.float64]
TRIES = (1.0, 2.5)  # times the fewest microbatches that may tell


@dataclass(frozen=True, eq=False)
class Run:
    """The times of one step, in seconds from its start."""

    schedule: Schedule
    durations: Durations
    total: float
    first_forward: Floats  # [stages, virtual]: the start of a chunk's first forward; its parameters must be there
    last_backward: Floats  # [stages, virtual]: when a chunk's gradients are complete; reducing them can begin
    simulated: int  # microbatches that were run; all others follow from them

    @cached_property
    def busy(self) -> Floats:
        """[stages]: seconds of compute."""
        return self.durations.work(self.schedule.microbatches)

    @property
    def bubble(self) -> Floats:
        """[stages]: seconds without compute, from the step's start to its end; waits for messages included."""
        return np.asarray(self.total - self.busy)

    @cached_property
    def exposed_send(self) -> Floats:
        """[stages]: of the bubble, what there would not be if messages took no time."""
        free = self.durations._replace(send=np.zeros(self.schedule.stages))
        return np.full(self.schedule.stages, self.total - timed(self.schedule, free).total)


def run(
    schedule: Schedule, forward: ArrayLike, backward: ArrayLike, weight: ArrayLike | None = None,
    send: ArrayLike = 0.0, beside: bool = True, first_extra: ArrayLike | None = None,
) -> Run:  # fmt: skip
    """One step.

    `forward`, `backward`, `weight`: seconds of one microbatch, numbers or [stages] or [stages, virtual]; `backward` is
    without the weight gradients where `weight` is given. `send`: seconds of a message between neighbours, a number or
    [stages], the last one's between the last stage and the first. `beside`: messages go beside compute and only delay
    their receiver; else stages stand still for them: sender and receiver together in 1f1b and gpipe, as in Megatron
    without overlap, and the sender alone in the others. `first_extra`: what a chunk's first forward takes more.
    """
    return timed(schedule, durations(schedule, forward, backward, weight, send, beside, first_extra))


def timed(schedule: Schedule, d: Durations) -> Run:
    """The step with these durations."""
    seconds, delay = d.kinds(schedule.meets)
    for few, patient in _tries(schedule):
        s = schedule.few(few).structure(d.beside)
        end, more = np.empty(len(s.lane) + 1), np.zeros(s.last.size)
        left = (schedule.microbatches - few) // schedule.period
        if settled(s.waits, seconds, delay, end, s.stretch, s.last.ravel(), left, patient, more):
            return _told(schedule, d, s, end, seconds, more.reshape(s.last.shape), few)
    raise AssertionError("a step with all its microbatches leaves nothing to be unsure of")


def _tries(schedule: Schedule) -> Iterator[tuple[int, bool]]:
    """Numbers of microbatches to run: the fewest that may tell, some more, all; and whether to go on from there."""
    for more in TRIES:
        few = schedule.same_rest(int(schedule.filling * more))
        if few * 1.3 < schedule.microbatches:
            yield few, more == TRIES[-1]
    yield schedule.microbatches, True


def _told(schedule: Schedule, d: Durations, s: Structure, end: Floats, seconds: Floats, more: Floats, few: int) -> Run:
    begun = end[s.first] - seconds[s.waits.kind[s.first]]
    done = end[s.last] + more
    if not d.beside and not schedule.meets:
        done = done - d.last_sent(schedule.splits_backward)
    return Run(schedule, d, float(done.max()), begun, done, few)
