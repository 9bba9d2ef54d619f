"""Grouped convolutions as nets have them: every width of a group, few to many groups, long 1-D kernels, squeezed ones.

cuDNN runs groups in one of four ways, and which one depends on the width of a group, the type of number and the
direction; so all widths are drawn, with multiples of 8 and odd ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import log_int, near, pick
from presage_fit.calibrate.sweeps.convolution import BATCHES
from presage_fit.calibrate.sweeps.nets import build_conv_net, finished

WIDTHS = (2, 4, 4, 8, 8, 12, 16, 16, 20, 24, 24, 28, 32, 32, 36, 40, 48, 48, 56, 56, 64, 64, 72, 80, 84, 96, 104, 112,
          120, 128, 128, 144, 160, 168, 184, 192, 224, 232, 256, 264, 328)  # fmt: skip
GROUPS = (2, 2, 3, 4, 4, 6, 8, 8, 10, 12, 16, 16, 16, 20, 24, 32, 32, 32, 48, 64, 64, 128)
KINDS = {"float32": 0.1, "tf32": 0.4, "bfloat16": 0.35, "float16": 0.15}
SIDES = (4, 6, 7, 7, 8, 9, 10, 12, 14, 14, 14, 16, 19, 20, 24, 28, 28, 28, 32, 38, 40, 48, 56, 56, 64, 75, 80, 96, 112)
LENGTHS = (3, 5, 7, 9, 15, 16, 19, 31, 32, 63, 64, 95, 128, 128, 128)


def _image(rng: np.random.Generator, one: int, groups: int) -> dict[str, Any]:
    size, k = int(pick(rng, SIDES)), int(pick(rng, (1, 3, 3, 3, 3, 3, 5, 7)))
    other = size if rng.random() < 0.85 else int(pick(rng, SIDES))
    more = int(pick(rng, (1, 1, 1, 1, 1, 1, 2, 4)))  # channels of a group behind it
    stride = int(pick(rng, (1, 1, 1, 2)))
    dilation = int(pick(rng, (2, 4))) if k == 3 and stride == 1 and rng.random() < 0.05 else 1
    return {"dims": 2, "size": [size, other], "i": one * groups, "o": one * groups * more, "k": k, "stride": stride,
            "dilation": dilation, "groups": groups, "padding": None}  # fmt: skip


def _sound(rng: np.random.Generator, one: int, groups: int) -> dict[str, Any]:
    """1-D: positions of speech encoders, separable and squeezed blocks over frames."""
    k = int(pick(rng, LENGTHS))
    return {"dims": 1, "size": [log_int(rng, 30, 3000)], "i": one * groups, "o": one * groups, "k": k,
            "stride": int(pick(rng, (1, 1, 1, 2))) if k < 64 else 1, "dilation": 1, "groups": groups,
            "padding": k // 2}  # fmt: skip


def sample_conv_grouped(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        kind, make = near(rng, KINDS), near(rng, {_image: 0.66, _sound: 0.34})
        one, groups = int(pick(rng, WIDTHS)), int(pick(rng, GROUPS))
        n = int(pick(rng, BATCHES[:9])) if rng.random() < 0.7 else log_int(rng, 1, 200)
        if one * groups <= 4096:
            p = finished(rng, kind, n, make(rng, one, groups))
            if p is not None:
                return p


FAMILIES = {"conv_grouped": (sample_conv_grouped, build_conv_net, 4000)}
