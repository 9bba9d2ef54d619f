"""What makes steps differ: random effects of GPUs, steps, microbatches, operations and the network, as values.

A class of work (`products`, `dp`, ...) takes its expected seconds times exp(rank + step + own): `rank` belongs to the
GPU and stays for the whole run, `step` is common to all GPUs in a step, `own` is each operation's. Pools of durations
that mix these are the common mistake: the slowest of 1,024 GPUs is slow in every step, a congested step everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.distribution import Distribution, Fixed

__all__ = ["CLASSES", "NO_NOISE", "Common", "Noise", "Regimes", "Scheduled", "Slow", "Spread", "Stalls"]

Floats = NDArray[np.float64]
T = TypeVar("T")
COMPUTE = ("products", "attention", "streams", "host", "optimizer")
COMMUNICATION = ("tp", "cp", "ep", "sharding", "send", "dp")
CLASSES = COMPUTE + COMMUNICATION  # the words of a job's breakdown; `send`: activations to the next stage


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithm of a class of work's seconds."""

    rank: float = 0.0  # between GPUs, the same in all steps of a run
    step: float = 0.0  # between steps, the same on all GPUs
    own: float = 0.0  # of each operation (one microbatch's pass through a stage, one collective)


@dataclass(frozen=True)
class Slow:
    """A few GPUs are much slower than the spread of the others says: their compute takes `factor` as long."""

    share: float = 0.0
    factor: Distribution = Fixed(1.0)


@dataclass(frozen=True)
class Common:
    """What all GPUs share: a factor that goes with the step before, a drift, the run's own pace, plain jitter."""

    sd: float = 0.0  # of the logarithm, between steps of a run
    correlation: float = 0.0  # with the step before
    drift: float = 0.0  # of the logarithm, from the first step of a run to the last
    drift_sd: float = 0.0  # between runs
    run_sd: float = 0.0  # of the logarithm, between runs
    jitter: Distribution = Fixed(0.0)  # seconds added to a step, whatever its length


@dataclass(frozen=True)
class Regimes:
    """States of the network: communication between nodes takes `factors[s]` as long; `moves[s][t]`: to t, each step."""

    factors: tuple[float, ...] = (1.0,)
    moves: tuple[tuple[float, ...], ...] = ((1.0,),)

    def __post_init__(self) -> None:
        m = np.array(self.moves)
        square = m.shape == (len(self.factors),) * 2
        if not square or (m < 0).any() or not np.allclose(m.sum(axis=1), 1) or min(self.factors) <= 0:
            raise PresageError("network regimes need a factor above 0 each, and moves whose rows add up to 1")

    @property
    def shares(self) -> Floats:
        """How often each state is, in the long run."""
        m = np.array(self.moves)
        system = np.vstack([m.T - np.eye(len(m)), np.ones(len(m))])
        return np.asarray(np.linalg.lstsq(system, np.append(np.zeros(len(m)), 1.0), rcond=None)[0])

    def path(self, rng: np.random.Generator, steps: int, runs: int) -> NDArray[np.int64]:
        """[steps, runs]: states of consecutive steps, the first in long-run shares."""
        state = np.empty((steps, runs), np.int64)
        total = np.cumsum(np.array(self.moves), axis=1)
        state[0] = np.searchsorted(np.cumsum(self.shares), rng.random(runs)).clip(max=len(self.factors) - 1)
        for k in range(1, steps):
            state[k] = (rng.random(runs)[:, None] > total[state[k - 1]]).sum(axis=1).clip(max=len(self.factors) - 1)
        return state


@dataclass(frozen=True)
class Stalls:
    """Now and then something holds the whole job up: a rate for each node, seconds for each time."""

    per_node_hour: float = 0.0
    seconds: Distribution = Fixed(0.0)

    def per_step(self, nodes: float, step_seconds: float) -> float:
        """Expected stalls in a step."""
        return self.per_node_hour * nodes * step_seconds / 3600


@dataclass(frozen=True)
class Scheduled:
    """Steps that are slow for a known reason: the first of a run, the first after an evaluation or a checkpoint."""

    name: str
    factor: Distribution = Fixed(1.0)  # of the step's seconds


@dataclass(frozen=True)
class Noise:
    """All that makes steps of a job differ. Nothing given: every step is the same."""

    spread: Mapping[str, Spread] = field(default_factory=lambda: MappingProxyType({}))
    slow: Slow = Slow()
    load: Distribution = Fixed(1.0)  # work of a microbatch: forward, backward, all stages alike
    common: Common = Common()
    network: Regimes = Regimes()
    stalls: Stalls = Stalls()
    scheduled: tuple[Scheduled, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.spread) - set(CLASSES))
        if unknown:
            raise PresageError(f"no class of work is called {unknown[0]}: there are {', '.join(CLASSES)}")
        object.__setattr__(self, "spread", MappingProxyType(dict(self.spread)))

    def __reduce__(self) -> tuple[type[Noise], tuple[Any, ...]]:
        """Other processes get it whole, which a read-only mapping by itself cannot be sent to."""
        return Noise, (dict(self.spread), *(getattr(self, f.name) for f in fields(self)[1:]))

    def of(self, kind: str) -> Spread:
        """A class's spread; what is not said does not vary."""
        return self.spread.get(kind, Spread())

    def numbers(self) -> dict[str, float]:
        """Every number by its path: `spread.products.rank`, `stalls.seconds.median`."""
        return dict(_numbers(self, ""))

    def changed(self, values: Mapping[str, float]) -> Noise:
        """With other numbers at some paths."""
        unknown = sorted(set(values) - set(self.numbers()))
        if unknown:
            raise PresageError(f"the noise has no number {unknown[0]}: there are {', '.join(self.numbers())}")
        return _changed(self, "", values)


NO_NOISE = Noise()


def _members(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple):
        return [(str(i), x) for i, x in enumerate(value)]
    return [(f.name, getattr(value, f.name)) for f in fields(value)] if is_dataclass(value) else []


def _numbers(value: Any, path: str) -> list[tuple[str, float]]:
    if isinstance(value, int | float):
        return [(path, float(value))]
    return [x for name, part in _members(value) for x in _numbers(part, f"{path}.{name}" if path else name)]


def _changed(value: T, path: str, values: Mapping[str, float]) -> T:
    if path in values:
        return values[path]  # type: ignore[return-value]
    if not any(v.startswith(f"{path}." if path else "") for v in values):
        return value
    parts = {n: _changed(x, f"{path}.{n}" if path else n, values) for n, x in _members(value)}
    if isinstance(value, Mapping):
        return parts  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(parts.values())  # type: ignore[return-value]
    return replace(value, **parts) if parts else value  # type: ignore[type-var]
