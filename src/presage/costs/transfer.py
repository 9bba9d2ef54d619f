"""Kernels that stream, carried over from the GPU that was calibrated to one that was not.

What a kernel takes on the calibrated GPU over the time of its bytes tells why. Quicker than its bytes: a cache helps,
and does here too. Slower: its instructions or its waits set the pace, and they go by SMs and clock, not by bandwidth;
here it takes as much longer as those are fewer and slower, or the time of its bytes if that is more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from presage.costs.call import Call
from presage.costs.families import Family, Law
from presage.costs.rates import Rates
from presage.costs.trees import Trees
from presage.hardware import Gpu

__all__ = ["streamed"]

Floats = npt.NDArray[np.float64]


def streamed(
    family: Family, trees: Trees, calls: Sequence[Call], laws: Sequence[Law], there: Gpu, here: Gpu
) -> tuple[Floats, Floats]:
    """Seconds with a warm and with a cold cache on the GPU `here`, whose laws are given."""
    rates = Rates.of(there)
    known = [family.law(c, rates) for c in calls]
    x = np.array([[*family.features(c, law), 0.0] for c, law in zip(calls, known, strict=True)], np.float32)
    bytes_there, bytes_here = (np.array([law.seconds for law in some]) for some in (known, laws))
    slower = there.sms * there.boost_clock / (here.sms * here.boost_clock)
    out = []
    for cold in (0.0, 1.0):
        x[:, -1] = cold
        ratio = np.exp(trees.predict(x))
        paced = np.maximum(bytes_here, bytes_there * ratio * slower)
        out.append(np.where(ratio <= 1.0, bytes_here * ratio, paced))
    return out[0], out[1]
