"""Draws of a whole run, all at once: from one failure to the next, never step by step.

An attempt starts with a restart (the first one with a step), then steps with a checkpoint after every so many of them,
until the next failure or the last step. What was done since the last checkpoint is lost; then the failure is noticed, a
node may have to be replaced, and the next attempt starts. Failures come at random, in restarts and checkpoints too, but
not while a stopped run waits. With one class, no noise and a constant rate this is what the exact formula is about.

Random numbers come in streams, one for each purpose: runs that differ in one thing keep the others' draws, until half
of the draws are done and the rest go on alone. More than `CHUNK` draws are done so many at a time, each chunk with
streams of its own, which depend on the seed and the chunk alone: a pool may do them anywhere.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.distribution import Distribution
from presage.pool.pool import SERIAL, Pool
from presage.runs.outcome import CAUSES, RunOutcome
from presage.runs.run import TrainingRun

Floats = NDArray[np.float64]
CHUNK = 5_000  # draws
MOST_ATTEMPTS = 50_000  # what takes more is never done
EVEN = 3**0.5  # half the width of an even spread, in standard deviations
FEW = 4.0  # stalls in an attempt: up to so many on average they are drawn one by one
STREAMS = ("run", "failure", "class", "node", "repair", "noise", "stalls", "slow")


def simulate(run: TrainingRun, draws: int = 2000, seed: int = 0, pool: Pool = SERIAL) -> RunOutcome:
    """Draw the run; the same seed gives the same draws."""
    if draws < 1:
        raise PresageError(f"{draws} draws: there has to be one at least")
    _check(run)
    chunks = [(k, min(CHUNK, draws - first)) for k, first in enumerate(range(0, draws, CHUNK))]
    return RunOutcome.joined(list(pool.map(partial(_chunk, run, seed), chunks)))


def _chunk(run: TrainingRun, seed: int, chunk: tuple[int, int]) -> RunOutcome:
    """Draw one chunk: its number and size. The first uses the seed's own streams."""
    number, draws = chunk
    seeded = np.random.default_rng([seed, number] if number else seed)
    state = _State(run, draws, dict(zip(STREAMS, seeded.spawn(len(STREAMS)), strict=True)))
    for _ in range(MOST_ATTEMPTS):
        state.attempt()
        state = state.slimmed()
        if not state.busy.any():
            break
    return state.outcome()


def _check(run: TrainingRun) -> None:
    """Refuse a run that failures keep from making progress."""
    share = run.efficiency
    attempts = run.steps * run.step / share * run.risk.rate if share > 0 else inf
    if attempts > MOST_ATTEMPTS / 2:
        raise PresageError(
            f"this run would hardly move: a failure every {run.risk.mttf / 60:.3g} minutes, {run.every:,} steps of "
            f"{run.step:.3g} s between checkpoints and {run.risk.restart / 60:.3g} minutes to start again; "
            "make checkpoints quicker or more frequent, restarts quicker, or the job smaller"
        )


@dataclass(frozen=True)
class _Attempt:
    """One attempt of each draw. Steps and checkpoints are counts, the rest seconds."""

    pace: Floats  # of a step, with what stalls and slow episodes add
    steps: Floats  # that counted
    saves: Floats
    used: Floats  # of steps and checkpoints, those that are lost with them
    done: NDArray[np.bool_]  # the run is


class _Totals:
    """Totals of all draws, finished ones included."""

    def __init__(self, classes: int, draws: int) -> None:
        self.parts = {c: np.zeros(draws) for c in CAUSES}
        self.counts, self.costs = np.zeros((classes, draws)), np.zeros((classes, draws))


class _State:
    """State of the unfinished draws."""

    def __init__(self, run: TrainingRun, draws: int, rng: dict[str, np.random.Generator]) -> None:
        self.run, self.draws, self.rng = run, draws, rng
        risk, classes = run.risk, run.reliability.failures
        self.every, self.nodes, self.restart, self.scale = run.every, risk.nodes, risk.restart, risk.scale
        self.shares = np.cumsum(risk.rates) / risk.rate if risk.rate else np.ones(1)
        self.detect = np.array([f.detect for f in classes] or [0.0])
        self.node = np.array([f.node for f in classes] or [0.0])
        self.planned = np.array([f.planned for f in classes] or [False])
        self.episodes = [(risk.episodes(e), e) for e in run.reliability.slow]
        self.mean, self.drift = run.times.runs(rng["run"], draws)
        self.seldom = np.exp(run.reliability.rate_sd * EVEN * rng["run"].uniform(-1, 1, draws))
        self.clock, self.steps, self.first = np.zeros(draws), np.zeros(draws), True
        self.rows, self.busy = np.arange(draws), np.ones(draws, bool)
        self.spares = Spares(run.spares, draws)
        self.totals = _Totals(max(1, len(classes)), draws)

    def slimmed(self) -> _State:
        """Drop finished draws once they are half of all."""
        if self.busy.sum() * 2 > self.draws or not self.busy.any():
            return self
        keep, out = self.busy, copy(self)
        for name in ("mean", "drift", "seldom", "clock", "steps", "rows", "busy"):
            setattr(out, name, getattr(self, name)[keep])
        out.spares, out.draws = self.spares.only(keep), int(keep.sum())
        return out

    def outcome(self) -> RunOutcome:
        never = np.zeros(self.totals.counts.shape[1], bool)
        never[self.rows[self.busy]] = True
        return RunOutcome(self.run, self.totals.parts, self.totals.counts, self.totals.costs, never)

    def attempt(self) -> None:
        """One attempt of every unfinished draw."""
        up = self._until_failure()
        kind = np.searchsorted(self.shares, self.rng["class"].random(self.draws)).clip(max=len(self.detect) - 1)
        start = np.minimum(up, 0.0 if self.first else self.restart)
        a, parts = self._worked(up - start, kind)
        failed = self.busy & ~a.done
        lost = np.where(a.done, 0.0, a.used - a.steps * a.pace - a.saves * self.run.checkpoints.save)
        parts |= {"restart": start, "checkpoints": a.saves * self.run.checkpoints.save, "lost": np.maximum(0.0, lost)}
        parts |= {"detection": np.where(failed, self.detect[kind], 0.0)}
        now = self.clock + start + a.used + parts["detection"]
        parts["spares"] = self._waits(failed, kind, now)
        self._book(parts, kind, failed)
        self.clock = now + parts["spares"]
        self.steps += np.where(self.busy, a.steps, 0.0)
        self.busy, self.first = failed, False

    def _until_failure(self) -> Floats:
        """Weibull-distributed seconds until the next failure."""
        even = self.rng["failure"].standard_exponential(self.draws)
        if self.scale == inf:
            return np.full(self.draws, inf)
        return np.asarray(self.scale * self.seldom * even ** (1 / self.run.reliability.shape))

    def _worked(self, left: Floats, kind: NDArray[np.intp]) -> tuple[_Attempt, dict[str, Floats]]:
        """Steps and checkpoints in the seconds that are left before the failure."""
        k, rest, every = self.run.checkpoints, self.run.steps - self.steps, self.every
        base, stalls, slow = self._pace(rest, left)
        pace = base + stalls + slow
        period, need = every * pace + k.save, rest * pace + np.ceil(rest / every) * k.save
        done, planned = need <= left, self.planned[kind] & (left > 0)
        sure = np.where(planned, left, np.maximum(0.0, left - k.delay))
        periods = np.minimum(np.floor(sure / period), np.ceil(rest / every) - 1)
        steps, saves, used = periods * every, periods, left
        more = np.minimum(np.floor((left - periods * period) / pace), rest - steps)  # a plan lets the step end
        steps, saves = np.where(planned, steps + more, steps), np.where(planned, saves + 1, saves)
        used = np.where(planned, left + k.save, used)
        steps, saves = np.where(done, rest, steps), np.where(done, np.ceil(rest / every), saves)
        parts = {"steps": steps * base, "stalls": steps * stalls, "slow": steps * slow}
        return _Attempt(pace, steps, saves, np.where(done, need, used), done), parts

    def _pace(self, rest: Floats, left: Floats) -> tuple[Floats, Floats, Floats]:
        """Seconds of a step on average over the attempt: by itself, of stalls, of slow episodes."""
        times = self.run.times
        n = np.maximum(1.0, np.minimum(rest, left / self.mean))
        middle = (self.steps + n / 2) / self.run.steps - 0.5
        noise = times.mean_sd(n) * self.rng["noise"].standard_normal(self.draws)
        base = self.mean * np.exp(self.drift * middle) * np.maximum(0.1, 1 + noise)
        rate = times.stalls.per_step(self.nodes, 1.0)
        stalls = _added(self.rng["stalls"], rate * base * n, times.stalls.seconds) / n
        return base, stalls, self._slowed(base * n) / n

    def _slowed(self, work: Floats) -> Floats:
        """Seconds that slow episodes add to `work` seconds, at most as if all of it were slow."""
        total = np.zeros(self.draws)
        for rate, episode in self.episodes:
            added = _added(self.rng["slow"], rate * work, episode.lost)
            total += np.minimum(added, (episode.factor - 1) * work)
        return total

    def _waits(self, failed: NDArray[np.bool_], kind: NDArray[np.intp], now: Floats) -> Floats:
        lost = failed & (self.rng["node"].random(self.draws) < self.node[kind])
        repair = self.rng["repair"].standard_exponential(self.draws) * self.run.reliability.repair
        return self.spares.wait(lost, now, repair)

    def _book(self, parts: dict[str, Floats], kind: NDArray[np.intp], failed: NDArray[np.bool_]) -> None:
        for cause, seconds in parts.items():
            self.totals.parts[cause][self.rows] += np.where(self.busy, seconds, 0.0)
        kind, rows = kind[failed], self.rows[failed]
        self.totals.counts[kind, rows] += 1
        self.totals.costs[kind, rows] += (parts["lost"] + parts["detection"] + parts["spares"] + self.restart)[failed]


def _added(rng: np.random.Generator, expected: Floats, size: Distribution) -> Floats:
    """The sum of as many draws as there are events, so many of them expected: where they are many, a Gamma of the
    same mean and variance."""
    if not size.mean or not expected.any():
        return np.zeros(len(expected))
    if float(expected.mean()) <= FEW:
        counts = rng.poisson(expected)
        rows = np.repeat(np.arange(len(counts)), counts)
        return np.bincount(rows, size.sample(rng, len(rows)), len(counts)).astype(np.float64)
    square = size.sd**2 + size.mean**2
    width = square / size.mean
    return rng.gamma(expected * size.mean / width, width)


# ---- Spare nodes: how long a run waits for a node when all spares are in repair.


class Spares:
    """Spare nodes of many draws at once: when each failed node returns from repair.

    A run needs all its nodes. With n spares it goes on while at most n nodes are in repair; one more, and it waits for
    the first of these n + 1. None: there is always a spare.
    """

    def __init__(self, spares: int | None, draws: int) -> None:
        self.back = None if spares is None else np.full((draws, spares + 1), -np.inf)

    def only(self, keep: NDArray[np.bool_]) -> Spares:
        """The spares of a subset of the draws."""
        out = Spares(None, 0)
        out.back = None if self.back is None else self.back[keep]
        return out

    def wait(self, lost: NDArray[np.bool_], now: Floats, repair: Floats) -> Floats:
        """Seconds that each draw which loses a node now waits for a spare."""
        waits = np.zeros(len(now))
        rows = np.flatnonzero(lost)
        if self.back is None or not len(rows):
            return waits
        self.back[rows, self.back[rows].argmin(axis=1)] = now[rows] + repair[rows]
        waits[rows] = np.maximum(0.0, self.back[rows].min(axis=1) - now[rows])
        return waits
