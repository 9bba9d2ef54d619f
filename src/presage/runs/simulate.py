"""Draws of a whole run, all at once: from one failure to the next, never step by step.

An attempt starts with a restart (the first one with a step), then steps with a checkpoint after every so many of them,
until the next failure or the last step. What was done since the last checkpoint is lost; then the failure is noticed, a
node may have to be replaced, and the next attempt starts. Failures come at random, in restarts and checkpoints too, but
not while a stopped run waits. An elastic run goes on without the replica that failed, which is back after its node was
replaced and it has healed; nothing but the step at hand is lost. With one class, no noise and a constant rate this is
what the exact formula is about.

Random numbers come in streams, one for each purpose: runs that differ in one thing keep the others' draws, until half
of the draws are done and the rest go on alone. More than `CHUNK` draws are done so many at a time, each chunk with
streams of its own, which depend on the seed and the chunk alone: a pool may do them anywhere.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.distribution import Distribution
from presage.pool.pool import SERIAL, Pool
from presage.runs.failures import Repair
from presage.runs.nodes import RepeatOffenders, Spares, Standby
from presage.runs.outcome import CAUSES, RunOutcome
from presage.runs.run import TrainingRun

Floats = NDArray[np.float64]
CHUNK = 5_000  # draws
MOST_ATTEMPTS = 50_000  # what takes more is never done
EVEN = 3**0.5  # half the width of an even spread, in standard deviations
FEW = 4.0  # stalls in an attempt: up to so many on average they are drawn one by one
WARM_UP = 600.0  # seconds until a spare stands by, where there is always one: assumed
STREAMS = ("run", "failure", "class", "node", "repair", "noise", "stalls", "slow", "memory", "offender")


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
    base: Floats  # parts of the pace
    stalls: Floats
    slow: Floats
    degraded: Floats


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
        self.every, self.nodes, self.scale, self.policy = run.every, risk.nodes, risk.scale, run.policy
        self.shares = np.cumsum(risk.rates) / risk.rate if risk.rate else np.ones(1)
        self.detect = np.array([f.detect for f in classes] or [0.0])
        self.node = np.array([f.node for f in classes] or [0.0])
        self.planned = np.array([f.planned for f in classes] or [False])
        self.episodes = [(risk.episodes(e), e) for e in run.reliability.slow]
        self.mean, self.drift = run.times.runs(rng["run"], draws)
        self.seldom = np.exp(run.reliability.rate_sd * EVEN * rng["run"].uniform(-1, 1, draws))
        self.clock, self.steps, self.restart = np.zeros(draws), np.zeros(draws), np.zeros(draws)
        self.rows, self.busy = np.arange(draws), np.ones(draws, bool)
        self.repairs = [f.repair or run.reliability.repair for f in classes] or [Repair(0.0)]
        self._place_nodes(draws)
        self.totals = _Totals(max(1, len(classes)), draws)

    def _place_nodes(self, draws: int) -> None:
        """Spares, standby nodes, replicas and repeat offenders, all as yet unharmed."""
        run, policy, kind = self.run, self.policy, self.run.reliability
        self.spares = Spares(None if run.spares is None else run.spares + policy.hot, draws)
        self.standby = Standby(policy.hot, draws)
        self.replicas = Spares(policy.replicas - 1 if policy.elastic else None, draws)
        evicts = policy.evict and kind.frailty
        self.offenders = RepeatOffenders(self.nodes, kind.frailty, policy.evict, draws) if evicts else None
        if kind.frailty:  # how bad the nodes of this draw happen to be
            shape = self.nodes / kind.frailty
            self.seldom = self.seldom / (self.rng["offender"].standard_gamma(shape, draws) / shape)

    def slimmed(self) -> _State:
        """Drop finished draws once they are half of all."""
        if self.busy.sum() * 2 > self.draws or not self.busy.any():
            return self
        keep, out = self.busy, copy(self)
        for name in ("mean", "drift", "seldom", "clock", "steps", "restart", "rows", "busy"):
            setattr(out, name, getattr(self, name)[keep])
        for name in ("spares", "standby", "replicas", "offenders"):
            setattr(out, name, None if getattr(self, name) is None else getattr(self, name).only(keep))
        out.draws = int(keep.sum())
        return out

    def outcome(self) -> RunOutcome:
        never = np.zeros(self.totals.counts.shape[1], bool)
        never[self.rows[self.busy]] = True
        return RunOutcome(self.run, self.totals.parts, self.totals.counts, self.totals.costs, never)

    def attempt(self) -> None:
        """One attempt of every unfinished draw."""
        up = self._until_failure()
        kind = np.searchsorted(self.shares, self.rng["class"].random(self.draws)).clip(max=len(self.detect) - 1)
        start = np.minimum(up, self.restart)
        a, parts = self._worked(up - start, kind)
        failed = self.busy & ~a.done
        a = self._forgotten(a, parts, failed & ~self.planned[kind])
        lost = np.where(a.done, 0.0, a.used - a.steps * a.pace - a.saves * self.run.checkpoints.save)
        parts |= {"restart": start, "checkpoints": a.saves * self.run.checkpoints.save, "lost": np.maximum(0.0, lost)}
        parts |= {"detection": np.where(failed, self.detect[kind], 0.0)}
        now = self.clock + start + a.used + parts["detection"]
        parts["spares"] = self._replaced(failed, kind, now, up)
        self._book(parts, kind, failed)
        self.clock = now + parts["spares"]
        self.steps += np.where(self.busy, a.steps, 0.0)
        self.busy = failed

    def _until_failure(self) -> Floats:
        """Weibull-distributed seconds until the next failure."""
        even = self.rng["failure"].standard_exponential(self.draws)
        if self.scale == inf:
            return np.full(self.draws, inf)
        up = self.scale * self.seldom * even ** (1 / self.run.reliability.shape)
        if self.offenders is not None:
            up = up / (1 + (self.offenders.factor - 1) * (self.node @ np.diff(self.shares, prepend=0.0)))
        if self.policy.elastic:  # replicas that are away do not fail
            up = up / (1 - self.replicas.missing(self.clock, np.full(self.draws, 1.0)) / self.policy.replicas)
        return np.asarray(up)

    def _forgotten(self, a: _Attempt, parts: dict[str, Floats], failed: NDArray[np.bool_]) -> _Attempt:
        """The attempt where a failure took the copies in memory too, and the run is back at what storage has."""
        policy = self.policy
        if policy.stored is None:
            return a
        gone = failed & (self.rng["memory"].random(self.draws) < policy.memory_lost)
        kept = self.steps + a.steps
        back = np.where(gone, kept - np.floor(kept / policy.stored) * policy.stored, 0.0)
        for cause, pace in (("steps", a.base), ("stalls", a.stalls), ("slow", a.slow), ("degraded", a.degraded)):
            parts[cause] = parts[cause] - back * pace
        return replace(a, steps=a.steps - back)

    def _worked(self, left: Floats, kind: NDArray[np.intp]) -> tuple[_Attempt, dict[str, Floats]]:
        """Steps and checkpoints in the seconds that are left before the failure."""
        k, rest, every = self.run.checkpoints, self.run.steps - self.steps, self.every
        base, stalls, slow = self._pace(rest, left)
        degraded = self._degraded(base + stalls + slow, left)
        pace = base + stalls + slow + degraded
        period, need = every * pace + k.save, rest * pace + np.ceil(rest / every) * k.save
        done, planned = need <= left, self.planned[kind] & (left > 0)
        sure = np.where(planned, left, np.maximum(0.0, left - k.delay))
        periods = np.minimum(np.floor(sure / period), np.ceil(rest / every) - 1)
        steps, saves, used = periods * every, periods, left
        more = np.minimum(np.floor((left - periods * period) / pace), rest - steps)  # a plan lets the step end
        steps = np.where(planned | self.policy.elastic, steps + more, steps)
        saves = np.where(planned, saves + 1, saves)
        used = np.where(planned, left + k.save, used)
        steps, saves = np.where(done, rest, steps), np.where(done, np.ceil(rest / every), saves)
        parts = {"steps": steps * base, "stalls": steps * stalls, "slow": steps * slow, "degraded": steps * degraded}
        return _Attempt(pace, steps, saves, np.where(done, need, used), done, base, stalls, slow, degraded), parts

    def _degraded(self, pace: Floats, left: Floats) -> Floats:
        """Seconds that replicas which are away add to a step, on average over the attempt."""
        if not self.policy.elastic:
            return np.zeros(self.draws)
        need = (self.run.steps - self.steps) * pace
        share = self.replicas.missing(self.clock, np.minimum(left, need)) / self.policy.replicas
        return np.asarray(pace * share / np.maximum(1 - share, 1 / self.policy.replicas))

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

    def _replaced(self, failed: NDArray[np.bool_], kind: NDArray[np.intp], now: Floats, up: Floats) -> Floats:
        """Seconds that each draw waits for a node or a replica; sets what its next start takes."""
        lost = failed & (self.rng["node"].random(self.draws) < self.node[kind])
        even, repair = self.rng["repair"].standard_exponential(self.draws), np.zeros(self.draws)
        for i, r in enumerate(self.repairs):
            repair = np.where(kind == i, r.of(even), repair)
        if self.offenders is not None:
            exposure = np.where(self.busy, up, 0.0) * (self.run.risk.rates @ self.node) / self.nodes
            self.offenders.fail(lost & ~self.planned[kind], self.rng["offender"].random(self.draws), exposure)
        cold = self.run.risk.restart
        filled = np.full(self.draws, WARM_UP) if self.run.spares is None else repair
        hot = self.standby.take(lost, now, filled)
        self.restart = np.where(hot, min(self.policy.hot_restart, cold), cold)
        waits = self.spares.wait(lost, now, repair)
        if not self.policy.elastic:
            return waits
        alone = failed & ~self.planned[kind]
        self.restart = np.where(alone, self.policy.pause, self.restart)
        whole = self.replicas.wait(alone, now, waits + self.policy.heal)
        return np.where(alone, whole, waits)

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
