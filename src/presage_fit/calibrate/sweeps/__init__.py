"""What is measured: for each family of ops a sampler of parameters (seeded, numpy) and a builder of the call (torch).

Parameters are plain JSON. Shapes are drawn to span real use, never copied from a workload
(`conv_library` draws layers of public libraries at sizes of its own). A builder returns the parts
of a call (forward, backward); what counts are the leaf ops the profiler sees in them, each with its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from presage_fit.calibrate.sweeps import (
    convolution,
    dense,
    groups,
    layers,
    library,
    memory,
    nets,
    norms,
    optimizers,
    pointwise,
    sparse,
    thin,
    various,
    volumes,
)
from presage_fit.calibrate.sweeps.common import Parts

__all__ = ["FAMILIES", "Family", "draw"]

Parameters = dict[str, Any]


class Family(NamedTuple):
    sample: Callable[[np.random.Generator], Parameters]
    build: Callable[[Any, Parameters], Parts]
    draws: int  # of a full sweep


FAMILIES: dict[str, Family] = {
    name: Family(*parts)
    for module in (
        dense,
        convolution,
        pointwise,
        memory,
        norms,
        sparse,
        optimizers,
        nets,
        groups,
        library,
        various,
        thin,
        layers,
        volumes,
    )
    for name, parts in module.FAMILIES.items()
}


def draw(name: str, seed: int = 0, count: int | None = None) -> list[Parameters]:
    """The family's draws: the same for the same seed, and a longer sweep begins with a shorter one."""
    rng = np.random.default_rng([seed, sum(map(ord, name))])
    return [FAMILIES[name].sample(rng) for _ in range(FAMILIES[name].draws if count is None else count)]
