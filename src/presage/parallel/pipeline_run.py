"""A pipeline's step: seconds of its operations and sends in, when each stage is done and where it waits out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine import Lane, Program, simulate_pipeline
from presage.errors import PresageError
from presage.parallel.orders import Route
from presage.parallel.pipeline import Schedule, by_chunk

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PARTS = ("forward", "backward", "weight", "first_extra")


class PipelineDurations(NamedTuple):
    """Seconds of one microbatch, [stages, virtual]; of sends, [stages]: from each stage to the next, or back."""

    forward: Floats
    backward: Floats
    weight: Floats  # of the weight gradients, where they are apart
    send: Floats  # the last one's is between the last stage and the first
    extra: Floats  # what the first forward takes more
    overlap: bool  # of sends with compute
    route: Route = Route.LOOP

    def work(self, passes: int) -> Floats:
        """[stages]: seconds of compute, where so many microbatches go through each chunk."""
        each = self.forward + self.backward + self.weight
        return np.asarray((passes * each + self.extra).sum(axis=1))

    def kinds(self, meets: bool) -> tuple[Floats, Floats]:
        """Seconds of every kind of task, and the delay of the message it waits for.

        A send that overlaps with compute only delays the receiver. Else the stage stands still: in a meeting with the
        receiver, or (where stages do not meet) by itself until the message is sent.
        """
        received, sent = _boundaries(*self.forward.shape, self.route)
        seconds = np.concatenate([self.forward, self.backward, self.weight, self.forward + self.extra]).ravel()
        padded = np.append(self.send, 0.0)
        delay = padded[received] if self.overlap else np.zeros(len(received))
        seconds = np.append(seconds, self.send)
        return (seconds if self.overlap or meets else seconds + padded[sent]), delay

    def last_sent(self, split: bool) -> Floats:
        """[stages, virtual]: what the last task of a chunk takes to send, where stages do not meet for it."""
        _, sent = _boundaries(*self.forward.shape, self.route)
        size = self.forward.size
        part = sent[2 * size : 3 * size] if split else sent[size : 2 * size]
        return np.append(self.send, 0.0)[part].reshape(self.forward.shape)


@dataclass(frozen=True, eq=False)
class PipelineStep:
    """The times of one step, in seconds from its start."""

    schedule: Schedule
    durations: PipelineDurations
    total: float
    first_forward: Floats  # [stages, virtual]: the start of a chunk's first forward; its parameters must be there
    last_backward: Floats  # [stages, virtual]: when a chunk's gradients are complete; reducing them can begin
    simulated: int  # microbatches that were simulated; all others follow from them

    @cached_property
    def busy(self) -> Floats:
        """[stages]: seconds of compute."""
        return self.durations.work(self.schedule.passes)

    @property
    def bubble(self) -> Floats:
        """[stages]: seconds without compute, from the step's start to its end; waits for messages included."""
        return np.asarray(self.total - self.busy)

    @cached_property
    def exposed_send(self) -> Floats:
        """[stages]: of the bubble, what there would not be if messages took no time."""
        free = self.durations._replace(send=np.zeros(self.schedule.stages))
        return np.full(self.schedule.stages, self.total - simulate_durations(self.schedule, free).total)


def run_pipeline(
    schedule: Schedule, forward: ArrayLike, backward: ArrayLike, weight: ArrayLike | None = None,
    send: ArrayLike = 0.0, overlap: bool = True, first_extra: ArrayLike | None = None,
) -> PipelineStep:  # fmt: skip
    """One step.

    `forward`, `backward`, `weight`: seconds of one microbatch, numbers or [stages] or [stages, virtual]; `backward` is
    without the weight gradients where `weight` is given. `send`: seconds of a message between neighbours, a number or
    [stages], the last one's between the last stage and the first. `overlap`: sends overlap with compute and only delay
    their receiver; else stages stand still for them: sender and receiver together in 1f1b and gpipe, as in Megatron
    without overlap, and the sender alone in the others. `first_extra`: what a chunk's first forward takes more.
    """
    return simulate_durations(
        schedule, pipeline_durations(schedule, forward, backward, weight, send, overlap, first_extra)
    )


def simulate_durations(schedule: Schedule, d: PipelineDurations) -> PipelineStep:
    """The step with these durations, by the engine's fast path."""
    seconds, delay = d.kinds(schedule.meets)
    found = simulate_pipeline(
        lambda few: schedule.few(few).tasks(d.overlap).program, schedule.microbatches, schedule.filling,
        schedule.period, seconds, delay,
    )  # fmt: skip
    done = found.end
    if not d.overlap and not schedule.meets:
        done = done - d.last_sent(schedule.splits_backward)
    return PipelineStep(schedule, d, float(done.max()), found.start, done, found.simulated)


def pipeline_program(schedule: Schedule, d: PipelineDurations) -> tuple[Program, Ints]:
    """The tasks of all microbatches, and the kind of each: tasks of a kind take equally long."""
    tasks = schedule.tasks(d.overlap)
    lanes = [Lane(f"stage {k}", k) for k in range(schedule.stages)]
    return tasks.program.unfold(lanes, d.kinds(schedule.meets)[1], *tasks.names())


def pipeline_durations(
    schedule: Schedule, forward: ArrayLike, backward: ArrayLike, weight: ArrayLike | None = None,
    send: ArrayLike = 0.0, overlap: bool = True, first_extra: ArrayLike | None = None,
) -> PipelineDurations:  # fmt: skip
    """Numbers, or arrays by stage or by (stage, chunk), as seconds of a schedule's operations; or what is wrong."""
    split = schedule.splits_backward
    if split and weight is None:
        raise PresageError(f"a {schedule.kind} schedule needs the seconds of weight gradients apart: weight")
    parts = np.zeros((len(PARTS), schedule.stages, schedule.virtual))
    for part, name, given in zip(parts, PARTS, (forward, backward, weight, first_extra), strict=True):
        if given is not None:
            _fill(part, name, by_chunk(given))
    sends = np.empty(schedule.stages)
    _fill(sends, "send", np.asarray(send, np.float64))
    _check(parts, sends)
    if not split and weight is not None:
        parts[1] += parts[2]
        parts[2] = 0.0
    return PipelineDurations(parts[0], parts[1], parts[2], sends, parts[3], overlap, schedule.rule.route)


@lru_cache(maxsize=1024)
def _boundaries(stages: int, virtual: int, route: Route) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every kind of task, which `send` its message to wait for, and its message to send, takes; `stages`: none."""
    none = stages
    stage = np.broadcast_to(np.arange(stages)[:, None], (stages, virtual))
    if route is Route.LOOP:
        around = stages - 1 if stages > 1 else none
        before, after = np.where(stage > 0, stage - 1, around), np.where(stage < stages - 1, stage, around)
        before[0, 0] = after[-1, -1] = none  # the ends of the model
    else:  # chunk 1 goes up, and comes from chunk 0 on the same stage, or from outside
        low, high = np.where(stage > 0, stage - 1, none), np.where(stage < stages - 1, stage, none)
        down = np.arange(virtual) == 0
        before, after = np.where(down, low, high), np.where(down, high, low)
    nothing, still = np.full((stages, virtual), none), np.full(stages, none)
    received = np.concatenate([np.concatenate([before, after, nothing, before]).ravel(), still])
    sent = np.concatenate([np.concatenate([after, before, nothing, after]).ravel(), still])
    return received, sent


def _fill(to: Floats, name: str, values: Floats) -> None:
    try:
        to[...] = values
    except ValueError:
        raise PresageError(f"{name} of shape {values.shape}: a number, or {to.shape} of them") from None


def _check(parts: Floats, sends: Floats) -> None:
    """The engine adds durations without looking at them."""
    if parts.min() >= 0 and parts.max() < np.inf and sends.min() >= 0 and sends.max() < np.inf:
        return
    named = zip((*PARTS, "send"), (*parts, sends), strict=True)
    bad = next(name for name, x in named if not (x.min() >= 0 and x.max() < np.inf))
    raise PresageError(f"{bad} has a time that is negative or not finite")
