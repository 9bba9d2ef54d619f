"""What other fleets say of slow GPUs: how many there were in each, and so how many another may have.

Shares differ from fleet to fleet as a Beta distribution says, whose two numbers are not known but weighed by how well
they explain the counts: few fleets make a wide prior. A fleet that is to be judged is left out, and all of its site
with it, because several tables are of the same machines.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

__all__ = ["SLOW", "KnownFleet", "known_fleets", "share_weights", "without"]

Floats = NDArray[np.float64]
SLOW = 4.0  # standard deviations of the body above the median, from where a GPU of a known fleet is counted as slow
AVERAGES = np.geomspace(0.001, 0.2, 30)  # of a fleet's share, tried
STRENGTHS = np.geomspace(0.5, 200, 25)  # GPUs that an average is worth


@dataclass(frozen=True)
class KnownFleet:
    """A fleet that was measured."""

    name: str
    site: str
    gpu: str
    work: str
    gpus: int
    slow: int
    body_sd: float
    largest: float  # factor of its slowest GPU


@cache
def known_fleets() -> tuple[KnownFleet, ...]:
    """Those that come with presage."""
    table = tomllib.loads(files("presage").joinpath("data/noise/fleets.toml").read_text(encoding="utf-8"))
    return tuple(KnownFleet(**f) for f in table["fleets"])


def without(name: str, fleets: Sequence[KnownFleet] | None = None) -> tuple[KnownFleet, ...]:
    """The fleets of other sites than that of a fleet; all, where nothing is known of it."""
    fleets = known_fleets() if fleets is None else tuple(fleets)
    sites = {f.site for f in fleets if f.name == name or f.site in name.lower()}
    return tuple(f for f in fleets if f.site not in sites)


def share_weights(shares: Floats, fleets: Sequence[KnownFleet]) -> Floats:
    """How likely each of these shares of slow GPUs is in another fleet; together 1."""
    from scipy.special import betainc, betaln

    average, strength = (m.ravel() for m in np.meshgrid(AVERAGES, STRENGTHS))
    a, b = average * strength, (1 - average) * strength
    slow, rest = np.array([f.slow for f in fleets]), np.array([f.gpus - f.slow for f in fleets])
    fit = np.sum(betaln(slow[:, None] + a, rest[:, None] + b) - betaln(a, b), axis=0)
    weight = np.exp(fit - fit.max())
    ends = np.concatenate([[0.0], np.sqrt(shares[1:] * shares[:-1]), [1.0]])
    each = np.diff(betainc(a[:, None], b[:, None], ends), axis=1)
    return np.asarray(weight @ each / weight.sum())
