"""Sources of noise that can be switched off one by one, for sensitivities."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from presage.noise.distribution import Fixed
from presage.noise.model import NetworkRegimes, NoiseModel, SlowGpus, Stalls, WorkSpread


class NoiseSource(NamedTuple):
    """A source and how to switch it off: spreads at their median, no slow GPUs, no stalls, the usual network."""

    name: str
    words: str
    off: Callable[[NoiseModel], NoiseModel]


def _spread(noise: NoiseModel, part: str) -> NoiseModel:
    return noise.changed({p: 0.0 for p in noise.numbers() if p.startswith("spread.") and p.endswith(f".{part}")})


def _network(noise: NoiseModel) -> NoiseModel:
    n = noise.network
    usual = n.factors[int(np.argmax(n.shares))]
    return replace(noise, network=NetworkRegimes((usual,) * len(n.factors), n.moves))


def _common(noise: NoiseModel, *names: str) -> NoiseModel:
    return noise.changed({f"common.{name}": 0.0 for name in names})


def _jitter(noise: NoiseModel) -> NoiseModel:
    return replace(noise, common=replace(noise.common, jitter=Fixed(noise.common.jitter.mean)))


SOURCES = (
    NoiseSource("rank", "differences between GPUs", lambda n: _spread(n, "rank")),
    NoiseSource("slow", "a few slow GPUs", lambda n: replace(n, slow=SlowGpus())),
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


def active_sources(noise: NoiseModel) -> tuple[NoiseSource, ...]:
    """Sources that vary in a noise model."""
    return tuple(s for s in SOURCES if s.off(noise).numbers() != noise.numbers() or _differs(s, noise))


def _differs(source: NoiseSource, noise: NoiseModel) -> bool:
    """Whether a distribution varies: measured values have no numbers to compare."""
    kind = {"load": noise.load, "jitter": noise.common.jitter}.get(source.name)
    return kind is not None and kind.sd > 0


def without_sources(noise: NoiseModel, names: Collection[str]) -> NoiseModel:
    """The noise with these sources switched off."""
    for s in SOURCES:
        if s.name in names:
            noise = s.off(noise)
    return noise


def only_sources(noise: NoiseModel, names: Collection[str]) -> NoiseModel:
    """The noise with all but these sources switched off."""
    return without_sources(noise, [s.name for s in SOURCES if s.name not in names])


def without_class_noise(noise: NoiseModel, kind: str) -> NoiseModel:
    """The noise with one class of work taking as long on all GPUs and in all steps."""
    return replace(noise, spread={**noise.spread, kind: WorkSpread()})
