"""How long the operations and messages of a pipeline take: seconds by kind of task."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.errors import PresageError
from presage.parallel.pipeline.schedule import Schedule, spread

__all__ = ["Durations", "durations"]

Floats = NDArray[np.float64]
PARTS = ("forward", "backward", "weight", "first_extra")


class Durations(NamedTuple):
    """Seconds of one microbatch, [stages, virtual]; of messages, [stages]: from each stage to the next, or back."""

    forward: Floats
    backward: Floats
    weight: Floats  # of the weight gradients, where they are apart
    send: Floats  # the last one's is between the last stage and the first
    extra: Floats  # what the first forward takes more
    beside: bool

    def work(self, microbatches: int) -> Floats:
        """[stages]: seconds of compute."""
        each = self.forward + self.backward + self.weight
        return np.asarray((microbatches * each + self.extra).sum(axis=1))

    def kinds(self, meets: bool) -> tuple[Floats, Floats]:
        """Seconds of every kind of task, and the delay of the message it waits for.

        A stage that sends beside its work only delays the receiver. Else it stands still: in a meeting with the
        receiver, or (where stages do not meet) by itself until the message is sent.
        """
        received, sent = _boundaries(*self.forward.shape)
        seconds = np.concatenate([self.forward, self.backward, self.weight, self.forward + self.extra]).ravel()
        padded = np.append(self.send, 0.0)
        delay = padded[received] if self.beside else np.zeros(len(received))
        seconds = np.append(seconds, self.send)
        return (seconds if self.beside or meets else seconds + padded[sent]), delay

    def last_sent(self, split: bool) -> Floats:
        """[stages, virtual]: what the last task of a chunk takes to send, where stages do not meet for it."""
        _, sent = _boundaries(*self.forward.shape)
        size = self.forward.size
        part = sent[2 * size : 3 * size] if split else sent[size : 2 * size]
        return np.append(self.send, 0.0)[part].reshape(self.forward.shape)


@lru_cache(maxsize=1024)
def _boundaries(stages: int, virtual: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every kind of task, which `send` its message to wait for, and its message to send, takes; `stages`: none."""
    around, none = stages - 1 if stages > 1 else stages, stages
    stage = np.broadcast_to(np.arange(stages)[:, None], (stages, virtual))
    before, after = np.where(stage > 0, stage - 1, around), np.where(stage < stages - 1, stage, around)
    before[0, 0] = after[-1, -1] = none  # the ends of the model
    nothing, still = np.full((stages, virtual), none), np.full(stages, none)
    received = np.concatenate([np.concatenate([before, after, nothing, before]).ravel(), still])
    sent = np.concatenate([np.concatenate([after, before, nothing, after]).ravel(), still])
    return received, sent


def durations(
    schedule: Schedule, forward: ArrayLike, backward: ArrayLike, weight: ArrayLike | None = None,
    send: ArrayLike = 0.0, beside: bool = True, first_extra: ArrayLike | None = None,
) -> Durations:  # fmt: skip
    """Numbers, or arrays by stage or by (stage, chunk), as seconds of a schedule's operations; or what is wrong."""
    split = schedule.splits_backward
    if split and weight is None:
        raise PresageError(f"a {schedule.kind} schedule needs the seconds of weight gradients apart: weight")
    parts = np.zeros((len(PARTS), schedule.stages, schedule.virtual))
    for part, name, given in zip(parts, PARTS, (forward, backward, weight, first_extra), strict=True):
        if given is not None:
            _fill(part, name, spread(given))
    sends = np.empty(schedule.stages)
    _fill(sends, "send", np.asarray(send, np.float64))
    _check(parts, sends)
    if not split and weight is not None:
        parts[1] += parts[2]
        parts[2] = 0.0
    return Durations(parts[0], parts[1], parts[2], sends, parts[3], beside)


def _fill(to: Floats, name: str, values: Floats) -> None:
    try:
        to[...] = values
    except ValueError:
        raise PresageError(f"{name} of shape {values.shape}: a number, or {to.shape} of them") from None


def _check(parts: Floats, sends: Floats) -> None:
    """The recursion adds blindly."""
    if parts.min() >= 0 and parts.max() < np.inf and sends.min() >= 0 and sends.max() < np.inf:
        return
    named = zip((*PARTS, "send"), (*parts, sends), strict=True)
    bad = next(name for name, x in named if not (x.min() >= 0 and x.max() < np.inf))
    raise PresageError(f"{bad} has a time that is negative or not finite")
