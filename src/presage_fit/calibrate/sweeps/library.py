"""Convolutions of library models: the layers that torchvision, transformers and torchaudio have, at any batch and size.

`library_layers.json` lists every distinct convolution of all models of torchvision 0.28, of 60 of transformers 5 (with
their default settings) and of 12 of torchaudio 2.11, seen on the meta device, and positions of other widths: dimensions, transposed, channels in and
out, kernel, stride, dilation, groups, padding, and the input's size for an image of 224 or for 4 seconds of sound.
Which layers a model has is a fact of the library; batches, sizes of images, lengths, types of number and layouts are
drawn. cuDNN's choice of an engine depends on channels and groups as much as on sizes, and channels repeat.
"""

from __future__ import annotations

import json
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from presage_fit.calibrate.sweeps.common import log_int, near, pick
from presage_fit.calibrate.sweeps.convolution import BATCHES
from presage_fit.calibrate.sweeps.nets import KINDS, build_conv_net, finished

LAYERS = Path(__file__).with_name("library_layers.json")
IMAGES = (96, 128, 160, 192, 224, 224, 224, 224, 224, 240, 256, 256, 288, 299, 320, 384, 448, 512)
SHARES = {"grouped": 0.36, "positions": 0.07, "depthwise": 0.07, "dense": 0.5}  # positions: groups over sound
LARGEST = 1.6e9  # bytes of both sides in float32


@cache
def layers() -> dict[str, list[list[Any]]]:
    """The listed layers by their kind of groups."""
    out: dict[str, list[list[Any]]] = {name: [] for name in SHARES}
    for layer in json.loads(LAYERS.read_text("utf-8")):
        dims, i, groups = layer[0], layer[2], layer[7]
        some = "grouped" if dims > 1 else "positions"
        out["dense" if groups == 1 else "depthwise" if groups == i else some].append(layer)
    return out


def _scaled(rng: np.random.Generator, dims: int, size: list[int]) -> list[int]:
    """The input's size for an image or a sound of another size; single places stay."""
    if dims == 1:
        by = float(np.exp(rng.uniform(np.log(0.15), np.log(6))))
        return [max(1, round(n * by)) for n in size]
    by = int(pick(rng, IMAGES)) / 224
    sides = [n if n == 1 else max(1, ceil(n * by)) for n in size[-2:]]
    if dims == 2:
        return sides
    return [size[0] if rng.random() < 0.6 else max(1, round(size[0] * float(pick(rng, (0.5, 2))))), *sides]


def sample_conv_library(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        kind, some = near(rng, KINDS), layers()[near(rng, SHARES)]
        dims, transposed, i, o, k, stride, dilation, groups, padding, size = some[int(rng.integers(len(some)))]
        n = int(pick(rng, BATCHES)) if rng.random() < 0.5 else log_int(rng, 1, 256)
        p = {"dims": dims, "size": _scaled(rng, dims, size), "i": i, "o": o, "k": k, "stride": stride,
             "dilation": dilation, "groups": groups, "padding": padding, "transposed": bool(transposed)}  # fmt: skip
        found = finished(rng, kind, n, p, LARGEST)
        if found is not None:
            return found


FAMILIES = {"conv_library": (sample_conv_library, build_conv_net, 4000)}
