"""The workspace that cuDNN takes for a convolution: sizes by mechanism, the choice among them by fitted trees.

Kernels that read another layout have their tensors copied into the workspace: whether input, output and weights are
copied is one tree model each, and the copies' sizes are exact. The rest is the algorithm's own: parts of a weight
gradient that are summed afterwards, products by image, Winograd and Fourier transforms, a persistent kernel's
counters. A fourth model has its size, which is taken to be the nearest of the sizes known by formula if one is near.
Weight gradients of pointwise convolutions in planar order are either such a product for each image, added up
afterwards, or done in another layout: a model of its own tells which, for nothing lies between.

Where cuDNN was asked for its engine (`presage.costs.cudnn`) it told the workspace, too: right to the byte in four of
five, but for what is chosen by the blocks that fit on the GPU at once, and for cuBLASLt's engines. A fifth model tells
where it is right; elsewhere the engine is among the features of the others.

Fitted on 80% of 136,800 convolutions drawn and measured on an H200 (cuDNN 9.19; `presage_fit.workspaces`). The
choices are taken to be the same on other GPUs. For tensor cores; float32 without TF32 has rules (`workspace_fp32`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod
from pathlib import Path

import numpy as np

from presage.costs.cudnn import CudnnEngine, engines
from presage.costs.families.conv import Conv, engine_features
from presage.costs.trees import Trees
from presage.files.arrays import read_npz
from presage.files.reading import DATA
from presage.hardware import Gpu

FILE = DATA / "h200" / "workspace.npz"
ROLES = ("forward", "data", "weight")
COPIED = ("large", "small", "weights")
UNIT = 65536.0  # bytes: the fourth model has log2(1 + bytes / UNIT)
LEAST = 0.05  # of a UNIT: less is nothing
NEAR = 1.25  # a size by formula within this factor is taken to be meant
TYPES = {"float32": 0.0, "tf32": 1.0, "bfloat16": 2.0, "float16": 3.0}
WINOGRAD = 36  # values of a transformed 6 x 6 tile, which makes 4 x 4 outputs


@dataclass(frozen=True)
class WorkspaceTrees:
    """For each role of a convolution: whether each tensor is copied, and what is taken besides."""

    copied: dict[str, tuple[Trees, ...]]
    extra: dict[str, Trees]
    right: dict[str, Trees]  # whether the workspace that cuDNN told is
    by_image: Trees  # whether a planar pointwise weight gradient is a product for each image

    def predict(self, convolutions: Sequence[Conv], engines: Sequence[CudnnEngine | None]) -> list[int]:
        """Bytes of the workspace of each, given what cuDNN told. PyTorch's own depthwise kernels take none."""
        out = [0] * len(convolutions)
        for number, role in enumerate(ROLES):
            mine = [i for i, c in enumerate(convolutions) if c.role == number and not c.native]
            if mine:
                found = self._of_role(role, [convolutions[i] for i in mine], [engines[i] for i in mine])
                for i, nbytes in zip(mine, found, strict=True):
                    out[i] = nbytes
        return out

    def _of_role(self, role: str, convolutions: Sequence[Conv], engines: Sequence[CudnnEngine | None]) -> list[int]:
        rows = np.array([features(c, e) for c, e in zip(convolutions, engines, strict=True)], np.float32)
        taken = np.column_stack([trees.predict(rows) > 0.5 for trees in self.copied[role]])
        copies = (taken * np.array([sizes(c) for c in convolutions], np.int64)).sum(1)
        extra = 2 ** self.extra[role].predict(rows) - 1
        rest = [_near(c, e * UNIT) if e >= LEAST else 0 for c, e in zip(convolutions, extra.tolist(), strict=True)]
        found = [int(a) + b for a, b in zip(copies, rest, strict=True)]
        right = self.right[role].predict(rows) > 0.5
        found = [e.workspace if e and r else n for e, r, n in zip(engines, right, found, strict=True)]
        images = [i for i, c in enumerate(convolutions) if may_go_by_image(c)]
        plain = np.array([features(convolutions[i], None) for i in images], np.float32)
        for i, share in zip(images, self.by_image.predict(plain) if images else (), strict=True):
            found[i] = image_products(convolutions[i]) if share > 0.5 else found[i]
        return found


@cache
def shipped(path: Path = FILE) -> WorkspaceTrees:
    arrays = read_npz(path)
    copied = {r: tuple(Trees.from_arrays(arrays, f"{r}.{t}") for t in COPIED) for r in ROLES}
    extra, right = ({r: Trees.from_arrays(arrays, f"{r}.{t}") for r in ROLES} for t in ("extra", "right"))
    return WorkspaceTrees(copied, extra, right, Trees.from_arrays(arrays, "by_image"))


_KNOWN: dict[tuple[Conv, CudnnEngine | None], int] = {}


def workspaces(convolutions: Sequence[Conv], chip: Gpu) -> list[int]:
    """Bytes that cuDNN takes for convolutions, or their gradients, besides the tensors; many at once are quicker."""
    keys = list(zip(convolutions, engines(convolutions, chip), strict=True))
    new = [k for k in dict.fromkeys(keys) if k not in _KNOWN]
    if new:
        _KNOWN.update(zip(new, shipped().predict([c for c, _ in new], [e for _, e in new]), strict=True))
    return [_KNOWN[k] for k in keys]


def sizes(c: Conv) -> tuple[int, int, int]:
    """Bytes of the large side, the small side and the weights in the layout that a kernel reads, with padding.

    Tensor cores take eight channels of half precision at a time, four of float32. Their grouped half-precision kernels
    lay several groups side by side in one tile, and for that have as many channels go into a group as come out of it.
    A pointwise weight is the same in all layouts.
    """
    step = 8 if c.width == 2 else 4
    wide, narrow = (_up(c.c, step), _up(c.k, step)) if c.groups == 1 else (c.c, c.k)
    if c.groups > 1 and c.width == 2:
        wide = narrow = max(c.c, c.k)
    weights = 0 if c.taps == 1 else c.width * narrow * (wide // c.groups) * c.taps
    return c.width * c.n * wide * prod(c.large), c.width * c.n * narrow * prod(c.small), weights


def may_go_by_image(c: Conv) -> bool:
    return c.role == 2 and c.taps == 1 and c.groups == 1 and not c.channels_last and max(c.stride) == 1


def image_products(c: Conv) -> int:
    """Bytes of a weight gradient for each image, in float32."""
    return 4 * c.k * (c.c // c.groups) * c.taps * c.n


def features(c: Conv, engine: CudnnEngine | None) -> list[float]:
    """Sizes and how they divide, layout, type of number, tiles of the three products; the engine."""
    large, small, _ = sizes(c)
    one_in, one_out = c.c // c.groups, c.k // c.groups
    places, tiles = c.n * prod(c.small), ceil(one_out / 128) * ceil(one_in * c.taps / 64) * c.groups
    return [
        TYPES.get(c.kind, 0.0), float(c.channels_last), float(c.transposed), log2(c.n), log2(c.c), log2(c.k),
        log2(c.groups), log2(one_in), log2(one_out), log2(prod(c.large)), log2(prod(c.small)), *c.small, *c.large[1:],
        c.c % 8, c.k % 8, one_in % 8, prod(c.large) % 8, prod(c.small) % 8, *c.kernel, c.taps, max(c.stride),
        min(c.stride), c.stride[2], max(c.dilation), sum(c.padding), log2(large), log2(small),
        log2(one_in * c.k * c.taps * c.width), log2(c.flops), log2(places), log2(tiles), log2(places / tiles),
        min(tiles / 132, 10), log2(ceil(places / 128) * ceil(c.k / 128)),
        log2(ceil(c.n * prod(c.large) / 128) * ceil(c.c / 128)), log2(c.k / c.c), log2(one_in * c.k * c.taps),
        log2(4 * c.n * one_in * c.k * c.taps / (large + small)), log2(places / c.n * (c.c + c.k)), float(prod(c.small)),
        c.n, (c.k // c.groups) % 8, log2(places / (one_in * c.taps)), log2(places / one_out),
        c.c % 64, c.k % 64, c.c % 256, c.k % 256, _up(c.c, 128) / c.c, _up(c.k, 128) / c.k,
        *engine_features(engine.facts() if engine else {}),
    ]  # fmt: skip


def _near(c: Conv, nbytes: float) -> int:
    """The size by formula that is nearest, or what is given where none is near."""
    best = min(_formulas(c), key=lambda n: abs(log2(n / nbytes)))
    return best if abs(log2(best / nbytes)) <= log2(NEAR) else int(nbytes)


def _formulas(c: Conv) -> Iterator[int]:
    """Sizes of the known algorithms' buffers: products by image, Winograd's tiles, spectra of images and weights."""
    one = image_products(c) // c.n
    yield one * c.n
    blocks = ceil(c.small[1] / 4) * ceil(c.small[2] / 4)
    yield WINOGRAD * 4 * (c.n * (c.c + c.k) * blocks + c.c * c.k)
    for side in (16, 32, 64):
        yield _spectrum(side) * 2 * (c.c * c.k + c.n * c.c) + one
    for tiles in (1, 2):
        yield _spectrum(32) * (c.c * c.k + c.n * (c.c + c.k) * tiles)


def _spectrum(side: int) -> int:
    """Bytes of a real square tile after its Fourier transform: half of it, in complex numbers of 8 bytes."""
    return side * (side // 2 + 1) * 8


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
