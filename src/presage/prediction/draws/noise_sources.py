"""Sources of noise: what can be steady or not by itself, whatever class of work it touches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from presage.noise.distribution import Fixed
from presage.noise.noise import Noise, Regimes, Slow, Spread, Stalls

__all__ = ["SOURCES", "NoiseSource", "active_sources", "only", "without", "without_class_noise"]


class NoiseSource(NamedTuple):
    """One of them, and the noise without it: spreads at their middle, no slow GPUs, no stalls, the usual network."""

    name: str
    words: str
    off: Callable[[Noise], Noise]


def _spread(noise: Noise, part: str) -> Noise:
    return noise.changed({p: 0.0 for p in noise.numbers() if p.startswith("spread.") and p.endswith(f".{part}")})


def _network(noise: Noise) -> Noise:
    n = noise.network
    usual = n.factors[int(np.argmax(n.shares))]
    return replace(noise, network=Regimes((usual,) * len(n.factors), n.moves))


def _common(noise: Noise, *names: str) -> Noise:
    return noise.changed({f"common.{name}": 0.0 for name in names})


def _jitter(noise: Noise) -> Noise:
    return replace(noise, common=replace(noise.common, jitter=Fixed(noise.common.jitter.mean)))


SOURCES = (
    NoiseSource("rank", "differences between GPUs", lambda n: _spread(n, "rank")),
    NoiseSource("slow", "a few slow GPUs", lambda n: replace(n, slow=Slow())),
    NoiseSource("own", "each operation's own noise", lambda n: _spread(n, "own")),
    NoiseSource("load", "work of microbatches", lambda n: replace(n, load=Fixed(n.load.mean))),
    NoiseSource("step", "classes of work, by step", lambda n: _spread(n, "step")),
    NoiseSource("network", "states of the network", _network),
    NoiseSource("common", "the pace of all, by step", lambda n: _common(n, "sd")),
    NoiseSource("drift", "drift over a run", lambda n: _common(n, "drift", "drift_sd")),
    NoiseSource("run", "the pace of all, by run", lambda n: _common(n, "run_sd")),
    NoiseSource("jitter", "jitter of steps", _jitter),
    NoiseSource("stalls", "stalls", lambda n: replace(n, stalls=Stalls())),
)


def active_sources(noise: Noise) -> tuple[NoiseSource, ...]:
    """Those that the noise has."""
    return tuple(s for s in SOURCES if s.off(noise).numbers() != noise.numbers() or _differs(s, noise))


def _differs(source: NoiseSource, noise: Noise) -> bool:
    """Distributions of measured values have no numbers to compare."""
    kind = {"load": noise.load, "jitter": noise.common.jitter}.get(source.name)
    return kind is not None and kind.sd > 0


def without(noise: Noise, names: Collection[str]) -> Noise:
    """With these sources steady."""
    for s in SOURCES:
        if s.name in names:
            noise = s.off(noise)
    return noise


def only(noise: Noise, names: Collection[str]) -> Noise:
    """With all sources steady but these."""
    return without(noise, [s.name for s in SOURCES if s.name not in names])


def without_class_noise(noise: Noise, kind: str) -> Noise:
    """With a class of work that takes as long on all GPUs and in all steps."""
    return replace(noise, spread={**noise.spread, kind: Spread()})
