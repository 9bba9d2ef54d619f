"""What is measured: for each family of ops a sampler of parameters (seeded, numpy) and a builder of the call (torch).

Parameters are plain JSON. Shapes are drawn to span real use, never copied from a workload. A builder returns a
callable; what counts are the leaf ops the profiler sees in it, each with its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from presage.calibrate.sweeps import convolution, dense, memory, norms, optimizers, sparse

__all__ = ["FAMILIES", "Family", "draw"]

Parameters = dict[str, Any]


class Family(NamedTuple):
    sample: Callable[[np.random.Generator], Parameters]
    build: Callable[[Any, Parameters], Callable[[], Any]]
    draws: int  # of a full sweep


FAMILIES: dict[str, Family] = {
    name: Family(*parts)
    for module in (dense, convolution, memory, norms, sparse, optimizers)
    for name, parts in module.FAMILIES.items()
}


def draw(name: str, seed: int = 0) -> list[Parameters]:
    """The family's draws: the same for the same seed, and a longer sweep begins with a shorter one."""
    rng = np.random.default_rng([seed, sum(map(ord, name))])
    return [FAMILIES[name].sample(rng) for _ in range(FAMILIES[name].draws)]
