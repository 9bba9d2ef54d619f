"""A rollout with continuous batching: sequences enter as slots and KV cache allow, and leave as they end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from presage.prediction.post_training.decoding import DecodingModel

Floats = NDArray[np.float64]
TAIL = 0.9  # of the responses: the rest is the tail


@dataclass(frozen=True, slots=True)
class Rollout:
    """What decoding a step's responses takes on all replicas."""

    seconds: float  # until the last replica has its last response
    prefill: float  # of these, on that replica
    tail: float  # of these, after nine tenths of all responses have ended
    busy: float  # mean over replicas of the time until each has ended
    iterations: int  # of that replica
    batch: float  # mean sequences of an iteration of that replica
    preempted: int  # sequences that had to leave, on all replicas
    tokens: float


@dataclass(frozen=True, slots=True)
class _Replica:
    seconds: float
    prefill: float
    iterations: int
    work: float  # sequence-iterations
    preempted: int
    ends: Floats  # seconds at which each response ended


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can decode at once."""

    sequences: int
    tokens: int  # of the KV cache


def roll_out(
    model: DecodingModel, lengths: Floats, prompt: float, limits: EngineLimits, replicas: int, prefilled: float
) -> Rollout:
    """Responses dealt to replicas in turn. `prefilled` is the share of prompt tokens that no cached prefix has."""
    parts = [lengths[i::replicas] for i in range(min(replicas, len(lengths)))]
    done = [_replica(model, part, prompt, limits, prefilled) for part in parts]
    last = max(done, key=lambda r: r.seconds)
    ends = np.concatenate([r.ends for r in done])
    tail = last.seconds - float(np.quantile(ends, TAIL))
    busy = sum(r.seconds for r in done) / replicas
    batch = last.work / max(1, last.iterations)
    preempted = sum(r.preempted for r in done)
    return Rollout(
        last.seconds, last.prefill, tail, busy, last.iterations, batch, preempted, float(lengths.sum())
    )  # fmt: skip


def _replica(model: DecodingModel, lengths: Floats, prompt: float, limits: EngineLimits, prefilled: float) -> _Replica:
    first = model.prefill_seconds(prompt * len(lengths) * prefilled, prompt) if prompt else 0.0
    whole = len(lengths) * (prompt + 1) + _most_context(lengths)
    if len(lengths) <= limits.sequences and whole <= limits.tokens:
        return _one_wave(model, lengths, prompt, first)
    return _Waves(model, lengths, prompt, limits, prefilled).run()


def _most_context(lengths: Floats) -> float:
    """Most tokens of responses that the cache holds at once, where all start together."""
    ordered = np.sort(lengths)
    return float((ordered * (len(ordered) - np.arange(len(ordered)))).max())


def _one_wave(model: DecodingModel, lengths: Floats, prompt: float, prefill: float) -> _Replica:
    """All sequences at once: between two ends the batch stays the same."""
    ordered = np.sort(lengths)
    steps = np.diff(ordered, prepend=0.0)
    batch = (len(ordered) - np.arange(len(ordered))).astype(np.float64)
    context = batch * (prompt + ordered - steps / 2)
    times = steps * model.seconds(batch, context)
    ends = prefill + np.cumsum(times)
    return _Replica(float(ends[-1]), prefill, int(ordered[-1]), float((steps * batch).sum()), 0, ends)


class _Waves:
    """More sequences than fit at once: an event each time one ends, enters, or has to leave."""

    def __init__(
        self, model: DecodingModel, lengths: Floats, prompt: float, limits: EngineLimits, prefilled: float
    ) -> None:
        self.model, self.prompt, self.limits, self.prefilled = model, prompt, limits, prefilled
        self.waiting = deque((float(n), 0.0) for n in lengths)  # tokens to come, tokens there
        self.running: list[tuple[float, int]] = []  # iteration at which it ends, and its number
        self.started: dict[int, tuple[float, float, float]] = {}  # by number: when it entered, tokens then, its end
        self.order: list[int] = []  # numbers as they entered
        self.clock = self.seconds = self.prefill = self.context = self.work = 0.0
        self.count = self.preempted = 0
        self.ends: list[float] = []

    def run(self) -> _Replica:
        while self.waiting or self.started:
            self._admit()
            self._advance()
        return _Replica(self.seconds, self.prefill, round(self.clock), self.work, self.preempted, np.array(self.ends))

    def _admit(self) -> None:
        fresh = again = 0.0
        while self.waiting and len(self.started) < self.limits.sequences:
            to_come, there = self.waiting[0]
            if self.started and self.context + self.prompt + there + len(self.started) + 1 > self.limits.tokens:
                break
            self.waiting.popleft()
            self.count += 1
            self.started[self.count] = self.clock, there, self.clock + to_come
            self.order.append(self.count)
            heappush(self.running, (self.clock + to_come, self.count))
            self.context += self.prompt + there
            fresh += self.prompt
            again += self.prompt + there if there else 0.0
        if fresh or again:
            took = self.model.prefill_seconds(fresh * self.prefilled + again, max(1.0, self.prompt))
            self.prefill += took
            self.seconds += took

    def _advance(self) -> None:
        """To the next end of a sequence, or to where the cache is full."""
        while self.running and self.running[0][1] not in self.started:
            heappop(self.running)
        batch = len(self.started)
        steps = self.running[0][0] - self.clock
        room = (self.limits.tokens - self.context) / batch
        full = room < steps and batch > 1
        if full:
            steps = max(0.0, float(int(room)))
        self.seconds += steps * self.model.one(batch, self.context + batch * steps / 2)
        self.clock += steps
        self.context += batch * steps
        self.work += batch * steps
        if full:
            self._preempt()
        else:
            self._end()

    def _end(self) -> None:
        while self.running and (self.running[0][1] not in self.started or self.running[0][0] <= self.clock):
            _, number = heappop(self.running)
            if number in self.started:
                self._leave(number)
                self.ends.append(self.seconds)

    def _preempt(self) -> None:
        """The last to enter leaves, to be prefilled again with what it has."""
        while self.order[-1] not in self.started:
            self.order.pop()
        number = self.order.pop()
        end = self.started[number][2]
        there = self._leave(number)
        self.waiting.appendleft((end - self.clock, there))
        self.preempted += 1

    def _leave(self, number: int) -> float:
        entered, had, _ = self.started.pop(number)
        there = had + self.clock - entered
        self.context -= self.prompt + there
        return there
