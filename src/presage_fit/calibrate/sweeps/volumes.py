"""Convolutions that `conv_net` has few of: dilated ones over sequences, whole ones over volumes, and transposed ones
that enlarge sequences, images and volumes; first and last layers, large kernels and pointwise ones (`conv_ends`).

For the weights' gradient of dilated layers cuDNN takes kernels that do not split the sum over batch and places, so few
channels make it slow: channels, lengths and dilations are drawn apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import log_int, near, pick
from presage_fit.calibrate.sweeps.nets import build_conv_net, finished

KINDS = {"float32": 0.08, "tf32": 0.47, "bfloat16": 0.3, "float16": 0.15}
CHANNELS = (16, 24, 25, 30, 32, 32, 48, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256, 256, 320, 384, 512, 512, 768)
VOLUMES = (1, 4, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 128, 192, 256, 320)


def _channels(rng: np.random.Generator, some: tuple[int, ...] = CHANNELS) -> tuple[int, int]:
    i = int(pick(rng, some))
    return i, i if rng.random() < 0.6 else int(pick(rng, some))


def _sequence(rng: np.random.Generator) -> dict[str, Any]:
    """1-D, padded on one side before or on both, as temporal nets and vocoders have them."""
    i, o = _channels(rng)
    k, dilation = int(pick(rng, (2, 3, 3, 3, 5, 7, 11))), 2 ** int(rng.integers(0, 9))
    dilation = dilation if rng.random() < 0.7 else int(pick(rng, (1, 1, 3, 5)))
    length = log_int(rng, 64, 16000)
    before = rng.random() < 0.5
    return {"dims": 1, "size": [length + dilation * (k - 1) * before], "i": i, "o": o, "k": k, "stride": 1,
            "dilation": dilation, "groups": 1, "padding": 0 if before else dilation * (k - 1) // 2}  # fmt: skip


def _atrous(rng: np.random.Generator) -> dict[str, Any]:
    """2-D and dilated: segmentation, denoising."""
    i, o = _channels(rng)
    size = log_int(rng, 8, 160)
    return {"dims": 2, "size": [size, size], "i": i, "o": o, "k": int(pick(rng, (3, 3, 3, 5))), "stride": 1,
            "dilation": int(pick(rng, (2, 2, 3, 4, 6, 8, 12, 16, 18))), "groups": 1, "padding": None}  # fmt: skip


def _volume(rng: np.random.Generator) -> dict[str, Any]:
    """3-D: blocks of a U-Net, cubes and flat ones."""
    i, o = _channels(rng, VOLUMES)
    if rng.random() < 0.15:
        i *= 2  # what was kept joins what was enlarged
    side = int(pick(rng, (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 112, 128)))
    depth = side if rng.random() < 0.7 else int(pick(rng, (4, 8, 16, 32, 64)))
    return {"dims": 3, "size": [depth, side, side], "i": i, "o": o, "k": int(pick(rng, (1, 3, 3, 3, 3, 5))),
            "stride": int(pick(rng, (1, 1, 1, 1, 2))), "dilation": 1, "groups": 1, "padding": None}  # fmt: skip


def _enlarging(rng: np.random.Generator) -> dict[str, Any]:
    """Transposed, by 2 to 8."""
    dims = near(rng, {1: 0.25, 2: 0.5, 3: 0.25})
    i, o = _channels(rng, VOLUMES[1:] if dims == 3 else CHANNELS)
    by = int(pick(rng, (1, 2, 2, 2, 2, 4, 8))) if dims == 1 else int(pick(rng, (1, 2, 2, 2, 2, 2, 4)))
    k = int(pick(rng, (by, 2 * by, by + 1, 4))) if by > 1 else int(pick(rng, (3, 4)))
    size = log_int(rng, 16, 8000) if dims == 1 else log_int(rng, 1, 40 if dims == 3 else 112)
    return {"dims": dims, "size": [size] * dims, "i": i, "o": 3 if dims == 2 and rng.random() < 0.06 else o, "k": k,
            "stride": by, "dilation": 1, "groups": 1, "padding": max(0, (k - by) // 2) if by > 1 else 0,
            "transposed": True}  # fmt: skip


def sample_conv_volumes(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        p = near(rng, {_sequence: 0.34, _atrous: 0.1, _volume: 0.3, _enlarging: 0.26})(rng)
        n = log_int(rng, 1, 8 if p["dims"] == 3 else 128)
        found = finished(rng, near(rng, KINDS), n, p)
        if found is not None:
            return found


ENDS = (1, 1, 2, 3, 3, 3, 3, 4, 4, 8)  # channels of images, sounds and maps


def _end(rng: np.random.Generator) -> dict[str, Any]:
    """First and last layers: few channels on one side, large kernels, large sides; 1-D to 3-D."""
    dims, ends = near(rng, {1: 0.2, 2: 0.6, 3: 0.2}), [int(pick(rng, ENDS)), int(pick(rng, CHANNELS))]
    k = int(pick(rng, (3, 5, 7, 10, 15, 16, 64) if dims == 1 else (1, 3, 3, 4, 5, 5, 7, 7, 9, 11)))
    stride = int(pick(rng, (1, 1, 1, 2, 2, 4, max(1, k // 2))))
    size = log_int(rng, *{1: (500, 400_000), 2: (16, 640), 3: (16, 160)}[dims])
    i, o = ends if rng.random() < 0.6 else ends[::-1]
    return {"dims": dims, "size": [size] * dims, "i": i, "o": o, "k": k, "stride": stride, "dilation": 1, "groups": 1,
            "padding": None if rng.random() < 0.7 else 0}  # fmt: skip


def _latent(rng: np.random.Generator) -> dict[str, Any]:
    """Generators' first layers and encoders' last ones: sides of 1 to 8 with a kernel as large, or nearly."""
    side, k = int(pick(rng, (1, 1, 1, 2, 3, 4, 5, 7, 8))), int(pick(rng, (2, 3, 4, 4, 4, 5, 7, 8)))
    wide = (50, 64, 100, 100, 128, 128, 256, 256, 384, 512, 512, 768, 1024)
    stride = int(pick(rng, (1, 1, 2)))
    return {"dims": 2, "size": [side] * 2, "i": int(pick(rng, wide)), "o": int(pick(rng, wide)), "k": k,
            "stride": stride, "dilation": 1, "groups": 1, "padding": 0 if stride == 1 else (k - 1) // 2,
            "transposed": rng.random() < 0.65}  # fmt: skip


def _transformed(rng: np.random.Generator) -> dict[str, Any]:
    """Kernels of 5 to 11 at stride 1 between 16 to 256 channels, where cuDNN may take Fourier transforms."""
    i, o = (int(pick(rng, (16, 24, 32, 48, 64, 64, 96, 128, 192, 256))) for _ in range(2))
    side, k = log_int(rng, 8, 320), int(pick(rng, (5, 5, 5, 7, 7, 9, 11)))
    return {"dims": 2, "size": [side, int(pick(rng, (side, side, max(1, side * 3 // 4))))], "i": i,
            "o": i if rng.random() < 0.5 else o, "k": k, "stride": 1, "dilation": 1, "groups": 1,
            "padding": None}  # fmt: skip


def _pointwise(rng: np.random.Generator) -> dict[str, Any]:
    """Kernels of one place over sequences and images, which cuBLASLt or direct kernels may take."""
    dims = near(rng, {1: 0.5, 2: 0.4, 3: 0.1})
    i, o = (int(pick(rng, (*CHANNELS, 1, 3, 10, 21, 40, 100, 1000))) for _ in range(2))
    size = log_int(rng, *{1: (100, 64_000), 2: (7, 320), 3: (4, 64)}[dims])
    return {"dims": dims, "size": [size] * dims, "i": i, "o": o, "k": 1, "stride": 1, "dilation": 1, "groups": 1,
            "padding": 0}  # fmt: skip


def _deep(rng: np.random.Generator) -> dict[str, Any]:
    """Depthwise, with large kernels or strides."""
    c, side = int(pick(rng, (32, 64, 96, 144, 192, 240, 256, 384, 480, 672, 768, 960, 1152))), log_int(rng, 5, 128)
    return {"dims": 2, "size": [side] * 2, "i": c, "o": c, "k": int(pick(rng, (3, 3, 5, 5, 7, 7, 9, 11, 13, 31))),
            "stride": int(pick(rng, (1, 1, 2, 2, 3))), "dilation": 1, "groups": c, "padding": None}  # fmt: skip


def sample_conv_ends(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        p = near(rng, {_end: 0.3, _latent: 0.14, _transformed: 0.22, _pointwise: 0.2, _deep: 0.14})(rng)
        found = finished(rng, near(rng, KINDS), log_int(rng, 1, 256), p)
        if found is not None:
            return found


FAMILIES = {
    "conv_volumes": (sample_conv_volumes, build_conv_net, 4000),
    "conv_ends": (sample_conv_ends, build_conv_net, 4000),
}
