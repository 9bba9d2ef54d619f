"""What stops a run, or slows it: classes of failures by their rates, and what each costs, for a job of any size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, expm1, gamma, inf, log

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.distribution import LogNormal
from presage.runs.checkpoint import Outage

DAY = 86400.0
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ByScale:
    """A number that grows with the job: points (GPUs, value), straight lines between them on logarithmic axes, and
    held beyond both ends."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        gpus = [g for g, _ in self.points]
        if not gpus or min(gpus) <= 0 or gpus != sorted(set(gpus)) or min(v for _, v in self.points) <= 0:
            raise PresageError("a figure by scale needs numbers of GPUs that rise, and values above 0")

    def at(self, gpus: float) -> float:
        i = bisect_right([g for g, _ in self.points], gpus)
        if i in (0, len(self.points)):
            return self.points[min(i, len(self.points) - 1)][1]
        (low, a), (high, b) = self.points[i - 1], self.points[i]
        return float(exp(log(a) + log(b / a) * log(gpus / low) / log(high / low)))


@dataclass(frozen=True, slots=True)
class Repair:
    """How long a failed node is away: Weibull times; a shape below 1 has a heavy tail, 1 is exponential."""

    mean: float  # seconds
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.mean < 0 or not 0.1 <= self.shape <= 20:
            raise PresageError("a repair takes 0 seconds or more on average, with a shape of 0.1 to 20")

    @property
    def scale(self) -> float:
        return self.mean / gamma(1 + 1 / self.shape)

    @property
    def median(self) -> float:
        return float(self.scale * log(2) ** (1 / self.shape))

    def of(self, exponential: Floats) -> Floats:
        """Seconds, from draws of the standard exponential distribution."""
        return np.asarray(self.scale * exponential ** (1 / self.shape))


@dataclass(frozen=True, slots=True)
class Failure:
    """A class of failures: each stops the whole job, or a replica of an elastic one."""

    name: str
    per_node_day: float
    detect: float = 60.0  # seconds until it is noticed, in which the job hangs
    node: float = 0.0  # share of them after which a node has to be replaced
    planned: bool = False  # known before: a checkpoint is written first, and no work is lost
    repair: Repair | None = None  # None: as for all classes


@dataclass(frozen=True, slots=True)
class SlowEpisode:
    """A class of faults that slow the whole job for a while, and then pass or are mended."""

    name: str
    per_node_day: float
    minutes: LogNormal
    factor: float  # that steps take longer by

    @property
    def lost(self) -> LogNormal:
        """Seconds lost to an episode."""
        return LogNormal(self.minutes.median * 60 * (1 - 1 / self.factor), self.minutes.log_sd)


@dataclass(frozen=True)
class Reliability:
    """How often nodes of a kind fail, how, and what each failure costs."""

    name: str
    failures: tuple[Failure, ...] = ()
    slow: tuple[SlowEpisode, ...] = ()
    node_gpus: int = 8
    restart: ByScale = ByScale(((1.0, 300.0),))  # seconds from a failure noticed to the next step, loading included
    load: float = 0.0  # seconds of loading a checkpoint on top of that
    growth: ByScale = ByScale(((1.0, 1.0),))  # of the rate of a node's failures with the size of the job
    shape: float = 1.0  # of the Weibull times between failures; 1: at a constant rate
    repair: Repair = Repair(DAY)  # until a node is back
    frailty: float = 0.0  # variance of nodes' own failure rates about their mean of 1 (gamma); 0: all alike
    relapse: float = 0.0  # share of repairs that did not help: the node fails again
    relapse_after: float = DAY  # seconds until then, on average
    rate_sd: float = 0.0  # of the logarithm of the rates, between sites: spread evenly
    sources: Mapping[str, str] = field(default_factory=dict)

    def at(self, gpus: int) -> Risk:
        """The failure rates of a job on `gpus` GPUs."""
        return Risk(self, gpus)

    def at_rate(self, per_1000_node_days: float) -> Reliability:
        """With this total rate of unplanned failures, known exactly."""
        now = sum(f.per_node_day for f in self.failures if not f.planned)
        if not now:
            raise PresageError(f"rate {per_1000_node_days:g}: {self.name} has no failures to scale")
        return replace(self.scaled(rates=per_1000_node_days / 1e3 / now), rate_sd=0.0)

    def with_restart(self, seconds: float) -> Reliability:
        """With this restart time, loading included, at every size of the job."""
        return replace(self, restart=ByScale(((1.0, seconds),)), load=0.0)

    def scaled(self, rates: float = 1.0, detect: float = 1.0, restart: float = 1.0) -> Reliability:
        """With failure rates, detection times and restart times multiplied by these factors."""
        failures = tuple(
            replace(f, per_node_day=f.per_node_day * rates, detect=f.detect * detect) for f in self.failures
        )
        points = tuple((g, s * restart) for g, s in self.restart.points)
        return replace(self, failures=failures, restart=ByScale(points), load=self.load * restart)


@dataclass(frozen=True)
class Risk:
    """The failure rates of a job of a given size."""

    kind: Reliability
    gpus: int

    @property
    def nodes(self) -> float:
        return self.gpus / self.kind.node_gpus

    @property
    def rates(self) -> Floats:
        """Rates by class, 1/s."""
        per_day = np.array([f.per_node_day for f in self.kind.failures], np.float64)
        planned = np.array([f.planned for f in self.kind.failures], bool)
        return per_day * self.nodes / DAY * np.where(planned, 1.0, self.kind.growth.at(self.gpus))

    @property
    def rate(self) -> float:
        """Rate of all stops, 1/s."""
        return float(self.rates.sum())

    @property
    def unplanned(self) -> float:
        return float(sum(r for r, f in zip(self.rates, self.kind.failures, strict=True) if not f.planned))

    @property
    def mttf(self) -> float:
        """Mean seconds between unplanned stops."""
        return 1 / self.unplanned if self.unplanned else inf

    @property
    def detect(self) -> float:
        """Seconds until a failure is noticed, on average."""
        pairs = [(r, f.detect) for r, f in zip(self.rates, self.kind.failures, strict=True) if not f.planned]
        return float(sum(r * d for r, d in pairs)) / self.unplanned if self.unplanned else 0.0

    @property
    def restart(self) -> float:
        return self.kind.restart.at(self.gpus) + self.kind.load

    @property
    def scale(self) -> float:
        """Scale of the Weibull times between stops that gives their mean."""
        return 1 / (self.rate * gamma(1 + 1 / self.kind.shape)) if self.rate else inf

    def outage(self, save: float, delay: float = 0.0) -> Outage:
        """Input of the checkpoint formulas; a failure also loses the work of `delay`, until a checkpoint is durable."""
        return Outage(self.mttf, save, self.detect + delay, self.restart)

    def episodes(self, e: SlowEpisode) -> float:
        """Slow episodes of a class, a second: those that fall into another cost nothing more."""
        rate = e.per_node_day * self.nodes / DAY
        busy = rate * e.minutes.mean * 60
        return rate * (-expm1(-busy) / busy if busy else 1.0)
