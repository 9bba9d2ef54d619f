"""What a GPU that was never calibrated shows of its own: a correction of another GPU's corrected law.

Fitted where published tables time a family's kernels on that GPU (tools/fit_tables.py), with what engines add taken
off. It looks at sizes and at waves on this GPU's SMs, not at layouts or at what is added, which tables do not vary: of
those the calibrated GPU's corrections tell. An attention's way back is corrected like its way there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from presage.costs.call import Call
from presage.costs.families import Law, attention, gemm
from presage.costs.families.common import ln
from presage.costs.rates import Rates
from presage.costs.trees import Trees

__all__ = ["Own", "features"]

Floats = npt.NDArray[np.float64]
KINDS = ("bfloat16", "float16")  # what tables time, and what runs alike
TILES = ((128, 256), (256, 128), (128, 128), (64, 64))
ROWS = 128


@dataclass(frozen=True)
class Own:
    """Of one family on one GPU."""

    family: str
    ops: tuple[str, ...]  # what their names begin with
    trees: Trees

    def factors(self, calls: Sequence[Call], laws: Sequence[Law], rates: Rates) -> Floats:
        """Times as long as the other GPU's correction says; one where nothing was measured."""
        out = np.ones(len(calls))
        at = [i for i, c in enumerate(calls) if self.knows(c)]
        if at:
            x = np.array([features(self.family, calls[i], laws[i], rates) for i in at], np.float32)
            out[at] = np.exp(self.trees.predict(x))
        return out

    def knows(self, call: Call) -> bool:
        return call.name.startswith(self.ops) and all(t.dtype in KINDS for t in call.tensors[:2] if t.sizes)


def features(family: str, call: Call, law: Law, rates: Rates) -> list[float]:
    return FEATURES[family](call, law, rates)


def _gemm(call: Call, law: Law, rates: Rates) -> list[float]:
    p = gemm.product(call)
    logs = (p.m, p.n, p.k, law.flops, law.bytes, law.seconds, p.batch * p.m * p.n, p.m / p.n)
    out = [*map(ln, logs), ln(law.flops / law.bytes), ln(law.flops / law.seconds), ln(law.bytes / law.seconds)]
    for rows, columns in TILES:
        out += _waves(p.batch * ceil(p.m / rows) * ceil(p.n / columns) / rates.sms)
    return out


def _attention(call: Call, _: Law, rates: Rates) -> list[float]:
    a = attention.attention(call)
    heads = a.b * a.h
    sizes = (heads, a.s, a.t, heads * a.s * a.t)
    return [*map(ln, sizes), float(a.d), float("cudnn" in call.name), *_waves(heads * ceil(a.s / ROWS) / rates.sms)]


def _waves(waves: float) -> list[float]:
    return [waves / ceil(waves), ln(ceil(waves))]


FEATURES: Mapping[str, Callable[[Call, Law, Rates], list[float]]] = {"gemm": _gemm, "attention": _attention}
