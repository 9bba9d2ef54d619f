"""Corrections of float32 products on GPUs that were never calibrated and are no Hoppers: one set of trees for all.

They see a product by its sizes, by its waves on the GPU at hand and by which side of the roofline it is on, and of the
GPU itself only its generation. Fitted (tools/fit_single.py) on NeuSight's train tables of bmm and linear on A100 40 GB,
P100, T4 and V100, and on the float32 products of our own H200, each GPU's level taken off first. That it is was decided
with labels of T4 and L4 in view (docs/labels.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from presage.costs.call import Call
from presage.costs.families import Law, gemm
from presage.costs.families.common import alignment, ln
from presage.costs.rates import Rates
from presage.costs.trees import Trees

__all__ = ["FILE", "Single", "features", "read"]

FILE = "float32.npz"
TILES = ((128, 128), (128, 64), (64, 64), (128, 32), (32, 32))
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Single:
    """ln(seconds / law) of float32 products."""

    trees: Trees

    def corrected(self, known: Floats, calls: Sequence[Call], laws: Sequence[Law], rates: Rates, made: float) -> Floats:
        """The corrections that are `known`, with those of float32 products in their places."""
        out = known.copy()
        at = [i for i, c in enumerate(calls) if is_single(c)]
        if at:
            x = np.array([features(calls[i], laws[i], rates, made) for i in at], np.float32)
            out[at] = self.trees.predict(x)
        return out


def is_single(call: Call) -> bool:
    return not call.tf32 and gemm.product(call).kind == "float32"


def features(call: Call, law: Law, rates: Rates, made: float) -> list[float]:
    """`made`: the compute capability of the GPU."""
    p = gemm.product(call)
    t = gemm.tiling(p, rates)
    arithmetic = law.flops / rates.rate("float32")
    memory = law.bytes / rates.bandwidth
    logs = (p.m, p.n, p.k, p.m * p.n * p.batch / rates.sms, arithmetic / memory, arithmetic / law.seconds, t.waves)
    out = [made, float(p.left), float(p.right), float(p.added), ln(p.batch), *map(ln, logs), float(t.rows * t.columns)]
    out += [float(t.splits), float(min(alignment(p.m), alignment(p.n))), float(alignment(p.k))]
    for rows, columns in TILES:
        waves = p.batch * ceil(p.m / rows) * ceil(p.n / columns) / rates.sms
        out += [
            waves / ceil(waves),
            ln(ceil(waves)),
            ceil(p.m / rows) * rows / p.m * ceil(p.n / columns) * columns / p.n,
        ]
    return out


def read(path: Path) -> Single:
    with np.load(path, allow_pickle=False) as held:
        return Single(Trees.from_arrays(dict(held), "single"))
