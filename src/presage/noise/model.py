"""Noise of step times: random effects of GPUs, steps, microbatches, operations and the network, as values.

A source of noise is a field of `NoiseModel`. Its fields are numbers (`number`, with their limits) and distributions:
reading, writing, joining and drawing of parameters follow from that declaration, and a prior is a table of its name in
`data/noise/priors.toml`. What it does to a step is said in `presage.prediction.draws.draw`.

A class of work (`products`, `dp`, ...) takes its expected seconds times exp(rank + step + own): `rank` belongs to the
GPU and stays for the whole run, `step` is common to all GPUs in a step, `own` is each operation's. Pools of durations
that mix these are the common mistake: the slowest of 1,024 GPUs is slow in every step, a congested step everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError
from presage.noise.distribution import Distribution, Fixed

Floats = NDArray[np.float64]
T = TypeVar("T")
COMPUTE = ("products", "attention", "streams", "host", "optimizer")
COMMUNICATION = ("tp", "cp", "ep", "sharding", "send", "dp")
CLASSES = COMPUTE + COMMUNICATION  # the words of a job's breakdown; `send`: activations to the next stage
WIDEST = 10.0  # of logarithms: steps 20,000 times as long as others are no noise, and soon no number
HUGE = 1e12  # seconds or factors beyond any noise
SPREAD, SHARE = (0.0, WIDEST), (0.0, 1.0)  # limits of standard deviations of logarithms, and of shares


def number(default: float = 0.0, limits: tuple[float, float] = SPREAD) -> Any:
    """A field of a noise source, with its valid range."""
    return field(default=default, metadata={"limits": limits})


@dataclass(frozen=True)
class WorkSpread:
    """Standard deviations of the logarithm of a class of work's seconds."""

    rank: float = number()  # between GPUs, the same in all steps of a run
    step: float = number()  # between steps, the same on all GPUs
    own: float = number()  # of each operation (one microbatch's pass through a stage, one collective)


@dataclass(frozen=True)
class SlowGpus:
    """A few stragglers outside the spread of the others: their compute takes `factor` times as long."""

    share: float = number(limits=SHARE)
    factor: Distribution = Fixed(1.0)


@dataclass(frozen=True)
class CommonNoise:
    """Noise common to all GPUs: an autocorrelated factor, drift over a run, a factor per run, additive jitter."""

    sd: float = number()  # of the logarithm, between steps of a run
    correlation: float = number(limits=(-1.0, 1.0))  # with the step before
    drift: float = number(limits=(-WIDEST, WIDEST))  # of the logarithm, from the first step of a run to the last
    drift_sd: float = number()  # between runs
    run_sd: float = number()  # of the logarithm, between runs
    jitter: Distribution = Fixed(0.0)  # seconds added to a step, whatever its length


@lru_cache(8)  # noise models that differ in other numbers have the same
def _long_run(moves: tuple[tuple[float, ...], ...]) -> Floats:
    m = np.array(moves)
    system = np.vstack([m.T - np.eye(len(m)), np.ones(len(m))])
    return np.asarray(np.linalg.lstsq(system, np.append(np.zeros(len(m)), 1.0), rcond=None)[0])


@dataclass(frozen=True)
class NetworkRegimes:
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
        return _long_run(self.moves)

    def path(self, rng: np.random.Generator, steps: int, runs: int) -> NDArray[np.int64]:
        """[steps, runs]: states of consecutive steps, the first in long-run shares."""
        state = np.zeros((steps, runs), np.int64)
        if len(self.factors) == 1:
            return state
        total = np.cumsum(np.array(self.moves), axis=1)
        state[0] = np.searchsorted(np.cumsum(self.shares), rng.random(runs)).clip(max=len(self.factors) - 1)
        for k in range(1, steps):
            state[k] = (rng.random(runs)[:, None] > total[state[k - 1]]).sum(axis=1).clip(max=len(self.factors) - 1)
        return state


@dataclass(frozen=True)
class Stalls:
    """Stalls of the whole job: a rate per node, and the seconds of each."""

    per_node_hour: float = number(limits=(0.0, HUGE))
    seconds: Distribution = Fixed(0.0)

    def per_step(self, nodes: float, step_seconds: float) -> float:
        """Expected stalls in a step."""
        return self.per_node_hour * nodes * step_seconds / 3600


@dataclass(frozen=True)
class ScheduledSlowdown:
    """Steps that are slow for a known reason: the first of a run, the first after an evaluation or a checkpoint."""

    name: str
    factor: Distribution = Fixed(1.0)  # of the step's seconds


@dataclass(frozen=True)
class NoiseModel:
    """All sources of noise of a job's steps. By default every step is the same."""

    spread: Mapping[str, WorkSpread] = field(default_factory=lambda: MappingProxyType({}))
    slow: SlowGpus = SlowGpus()
    load: Distribution = Fixed(1.0)  # work of a microbatch: forward, backward, all stages alike
    common: CommonNoise = CommonNoise()
    network: NetworkRegimes = field(default=NetworkRegimes(), metadata={"whole": True})  # not joined by number
    stalls: Stalls = Stalls()
    scheduled: tuple[ScheduledSlowdown, ...] = ()

    def __post_init__(self) -> None:
        unknown = sorted(set(self.spread) - set(CLASSES))
        if unknown:
            raise PresageError(f"unknown class of work {unknown[0]!r}: choose from {', '.join(CLASSES)}")
        object.__setattr__(self, "spread", MappingProxyType(dict(self.spread)))

    def __reduce__(self) -> tuple[type[NoiseModel], tuple[Any, ...]]:
        """Pickled by its values: a read-only mapping cannot be pickled."""
        return type(self), (dict(self.spread), *(getattr(self, f.name) for f in fields(self)[1:]))

    def of(self, kind: str) -> WorkSpread:
        """The spread of a class of work; none by default."""
        return self.spread.get(kind, WorkSpread())

    def numbers(self) -> dict[str, float]:
        """Every number by its path: `spread.products.rank`, `stalls.seconds.median`."""
        return dict(self._known)

    def changed(self, values: Mapping[str, float]) -> NoiseModel:
        """A copy with other numbers at these paths."""
        known = self._known
        unknown = sorted(p for p in values if p not in known)
        if unknown:
            raise PresageError(f"the noise has no number {unknown[0]!r}: choose from {', '.join(known)}")
        return _changed(self, _nested(values)) if values else self

    @cached_property
    def _known(self) -> dict[str, float]:
        return dict(_numbers(self, ""))


NO_NOISE = NoiseModel()


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


def _nested(values: Mapping[str, float]) -> dict[str, Any]:
    """Numbers by path as mappings in mappings."""
    tree: dict[str, Any] = {}
    for path, number in values.items():
        *above, name = path.split(".")
        at = tree
        for word in above:
            at = at.setdefault(word, {})
        at[name] = number
    return tree


def _changed(value: T, tree: Any) -> T:
    """The value with other numbers, which lie in the tree as they do in the value."""
    if not isinstance(tree, dict):
        return tree  # type: ignore[no-any-return]
    if is_dataclass(value):
        return replace(value, **{n: _changed(getattr(value, n), part) for n, part in tree.items()})  # type: ignore[type-var]
    parts = {n: _changed(x, tree[n]) if n in tree else x for n, x in _members(value)}
    return parts if isinstance(value, Mapping) else tuple(parts.values())  # type: ignore[return-value]


NINETY = 2 * 1.6448536269514722  # standard deviations that the middle 90% of a Normal span


@dataclass(frozen=True)
class CredibleInterval:
    """The middle 90% of the values a number may have."""

    low: float
    high: float

    def drawn(self, value: float, z: float) -> float:
        """The number z standard deviations off; log-normal where the interval is above 0, and never across 0."""
        if self.low > 0 and value > 0:
            return float(value * np.exp(np.log(self.high / self.low) / NINETY * z))
        moved = value + (self.high - self.low) / NINETY * z
        return float(moved if self.low < 0 else max(0.0, moved))


@dataclass(frozen=True)
class Belief:
    """A noise model with intervals and sources of its numbers, by path (see `NoiseModel.numbers`)."""

    noise: NoiseModel
    intervals: Mapping[str, CredibleInterval] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)  # a path, or the start of several

    def drawn(self, rng: np.random.Generator) -> NoiseModel:
        """The noise with each number drawn from its interval."""
        return self.at({p: float(rng.standard_normal()) for p in sorted(self.intervals)})

    def at(self, scores: Mapping[str, float]) -> NoiseModel:
        """The noise with numbers so many standard deviations off."""
        numbers = self.noise.numbers()
        values = {p: self.intervals[p].drawn(numbers[p], z) for p, z in scores.items()}
        return self.noise.changed({p: _possible(p, v, type(self.noise)) for p, v in values.items()})


def _possible(path: str, value: float, model: type[NoiseModel]) -> float:
    """Cut at the upper limit; shares and correlations stay below 1."""
    high = limits_of(path, model)[1]
    return min(value, 0.99 if high == 1 else high)


@cache
def number_limits(model: type[NoiseModel]) -> dict[str, tuple[float, float]]:
    """Valid ranges by field name, of all sources and distributions."""
    kinds: list[Any] = [*Distribution.__subclasses__(), *get_type_hints(model).values()]
    kinds += [a for k in kinds for a in get_args(k)]
    each = [f for k in kinds if is_dataclass(k) for f in fields(k)]
    return {f.name: f.metadata["limits"] for f in each if "limits" in f.metadata}


def limits_of(path: str, model: type[NoiseModel] = NoiseModel) -> tuple[float, float]:
    """The valid range of the number at a path."""
    return number_limits(model).get(path.rpartition(".")[2], (-HUGE, HUGE))  # type: ignore[arg-type]


def _depth(model: NoiseModel, name: str) -> int:
    """Words of the paths that beliefs are joined by: a source's numbers one by one, by class of work where it is."""
    source = next((f for f in fields(model) if f.name == name), None)
    value = getattr(model, name, None)
    if source is None or source.metadata.get("whole") or isinstance(value, Distribution):
        return 1
    return 3 if isinstance(value, Mapping) else 2 if is_dataclass(value) else 1


def join_beliefs(first: Belief, later: Belief) -> Belief:
    """The first belief overridden by the later one, number by number; distributions and lists as wholes."""
    paths = specified_paths(later)
    names = [f.name for f in fields(later.noise)]
    noise = replace(
        later.noise, **{n: _over(getattr(first.noise, n), getattr(later.noise, n), n, paths) for n in names}
    )
    intervals = {p: i for p, i in first.intervals.items() if not _under(p, paths)} | dict(later.intervals)
    numbers = noise.numbers()
    intervals = {p: i for p, i in intervals.items() if p in numbers}
    return Belief(
        noise, intervals, {p: s for p, s in first.sources.items() if not _under(p, paths)} | dict(later.sources)
    )


def specified_paths(belief: Belief) -> set[str]:
    """Paths that a belief specifies: fields that differ from their defaults, or that have an interval."""
    model, out = belief.noise, set()
    for f in fields(model):
        value, default = getattr(model, f.name), default_of(f)
        parts = {f.name: (value, default)}
        for _ in range(_depth(model, f.name) - 1):
            parts = {f"{p}.{n}": (x, _member(d, n, x)) for p, (v, d) in parts.items() for n, x in _members(v)}
        out |= {p for p, (v, d) in parts.items() if v != d}
    for path in belief.intervals:
        words = path.split(".")
        out.add(".".join(words[: _depth(model, words[0])]))
    return out


def default_of(f: Any) -> Any:
    """The default of a dataclass field; MISSING where it has none."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def _member(whole: Any, name: str, like: Any) -> Any:
    """A default's part; that of a class of work which has no entry is the default of its type."""
    return (whole[name] if name in whole else type(like)()) if isinstance(whole, Mapping) else getattr(whole, name)


def _under(path: str, paths: set[str]) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in paths)


def _over(first: Any, later: Any, path: str, paths: set[str]) -> Any:
    """The later value where its path is specified, the first elsewhere; parts of values likewise."""
    if path in paths:
        return later
    if isinstance(first, Mapping):  # by class of work
        usual = {k: type(x)() for k, x in (*first.items(), *later.items())}
        keys = [k for k in CLASSES if k in usual]
        return {k: _over(first.get(k, usual[k]), later.get(k, usual[k]), f"{path}.{k}", paths) for k in keys}
    if not any(p.startswith(f"{path}.") for p in paths):
        return first
    return replace(first, **{n: _over(x, getattr(later, n), f"{path}.{n}", paths) for n, x in _members(first)})
