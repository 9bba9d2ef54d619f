"""Fit the trees of convolutions' workspaces (`presage.memory.workspace_trees`) on sweeps of nets, groups and libraries.

    python -m presage_fit.workspaces data/h200_pack/conv_{net,grouped,library,volumes,ends}.jsonl.gz \\
        src/presage/data/h200/workspace.npz

Each convolution counts twice: with what cuDNN tells of its engine (it must be installed), and without. A fifth of the
draws (by number, seed 0) is held out for the score, which is that of trees fitted without them; the trees that are
written are fitted on all draws.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.cudnn import CudnnEngine, engines
from presage.costs.families.conv import Conv, conv
from presage.costs.kernel_files import write_arrays
from presage.costs.trees import Trees
from presage.hardware import gpu
from presage.memory.workspace_trees import (
    COPIED,
    ROLES,
    UNIT,
    WorkspaceTrees,
    features,
    image_products,
    may_go_by_image,
    sizes,
)
from presage_fit.boosting import fit
from presage_fit.kernel_models import from_leaf

CONVERTS = ("ToNhwc", "ToNchw", "convertTensor", "tensorTransform", "AddPadding")  # kernels that copy whole tensors
SLACK = 4096  # bytes: allocations are rounded, and small tables come with them
HELD = 0.2
GPU = "h200"
IMAGES = ("net", "grouped", "library")  # in the names of sources that tell what goes image by image
IMAGES_NEAR = 0.02  # of the bytes of the products for each image, within which they are meant
SETTINGS: dict[str, Any] = {"rounds": 120, "leaves": 63, "rate": 0.1, "min_leaf": 5}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredWorkspace:
    """A convolution, the bytes that it had at most besides its results, and which tensors were copied into them."""

    draw: int
    conv: Conv
    engine: CudnnEngine | None
    nbytes: int
    copied: tuple[int, int, int]

    @property
    def right(self) -> bool:
        """Whether cuDNN told these bytes."""
        return self.engine is not None and abs(self.engine.workspace - self.nbytes) <= SLACK

    @property
    def extra(self) -> int:
        return max(0, self.nbytes - sum(a * b for a, b in zip(self.copied, sizes(self.conv), strict=True)))


def read(paths: Sequence[Path]) -> list[MeasuredWorkspace]:
    lines = [line for path in paths for line in gzip.decompress(path.read_bytes()).splitlines()]
    found = [m for draw, line in enumerate(lines) for m in _measured(draw, json.loads(line))]
    told = engines([m.conv for m in found], gpu(GPU))
    return [*found, *(replace(m, engine=e) for m, e in zip(found, told, strict=True) if e)]


def _measured(draw: int, row: dict[str, Any]) -> Iterator[MeasuredWorkspace]:
    params = row["p"]
    if len(params.get("workspace", ())) != len(row.get("ops", ())):
        return  # a call that ran other ops besides
    for leaf, nbytes in zip(row["ops"], params["workspace"], strict=True):
        c = conv(from_leaf(SimpleNamespace(**leaf), params))
        converts = any(word in kernel for kernel, _ in leaf["kernels"] for word in CONVERTS)
        yield MeasuredWorkspace(draw, c, None, nbytes, _copied(c, nbytes) if converts else (0, 0, 0))


def _copied(c: Conv, nbytes: int) -> tuple[int, int, int]:
    """The copies that explain most of a workspace: exactly if any do, else those that leave least."""

    def left(taken: tuple[int, ...]) -> int:
        return nbytes - sum(a * b for a, b in zip(taken, sizes(c), strict=True))

    fits = [taken for taken in product((1, 0), repeat=3) if left(taken) >= -SLACK]
    large, small, weights = min(fits, key=left)
    return large, small, weights


def fitted(rows: Sequence[MeasuredWorkspace], images: Sequence[MeasuredWorkspace]) -> WorkspaceTrees:
    """`images`: those that tell what goes image by image."""
    copied, extra, right = {}, {}, {}
    for number, role in enumerate(ROLES):
        mine = [m for m in rows if m.conv.role == number and not m.conv.native]
        x = np.array([features(m.conv, m.engine) for m in mine], np.float32)
        nbytes, taken = np.array([sizes(m.conv) for m in mine], float), np.array([m.copied for m in mine], float)
        copied[role] = tuple(_whether(x, taken[:, k], nbytes[:, k]) for k in range(3))
        y = np.log2(1 + np.array([m.extra for m in mine]) / UNIT)
        extra[role] = fit(x, y, objective="regression_l1", **SETTINGS)
        told = np.array([m.engine is not None for m in mine])
        right[role] = _whether(x[told], np.array([float(m.right) for m in mine])[told], nbytes[told].sum(1))
    return WorkspaceTrees(copied, extra, right, by_image(images))


def by_image(rows: Sequence[MeasuredWorkspace]) -> Trees:
    """Trees for whether a planar pointwise weight gradient is a product for each image; large ones count more."""
    mine = [m for m in rows if may_go_by_image(m.conv) and m.engine is None]
    x = np.array([features(m.conv, None) for m in mine], np.float32)
    products = np.array([image_products(m.conv) for m in mine], float)
    taken = np.abs(np.array([m.nbytes for m in mine]) / products - 1) < IMAGES_NEAR
    return fit(x, taken.astype(float), np.sqrt(products), **SETTINGS)


def _whether(x: npt.NDArray[np.float32], taken: Floats, nbytes: Floats) -> Trees:
    """Trees for whether a tensor is copied; large ones count more, none at all do not count."""
    some = nbytes > 0
    return fit(x[some], taken[some], np.sqrt(nbytes[some]), **SETTINGS)


def scored(trees: WorkspaceTrees, rows: Sequence[MeasuredWorkspace]) -> str:
    """Errors as shares of the convolution's tensors, for each role."""
    lines = []
    for number, role in enumerate(ROLES):
        mine = [m for m in rows if m.conv.role == number and not m.conv.native]
        found = np.array(trees.predict([m.conv for m in mine], [m.engine for m in mine]), float)
        off = np.abs(found - np.array([m.nbytes for m in mine]))
        tensors = np.array([sum(m.conv.sides) for m in mine])
        close, mean = np.mean(off < 0.05 * tensors), np.mean(off / tensors)
        share = off.sum() / tensors.sum()
        lines.append(f"{role}: {len(mine)} held out, {close:.1%} within 5%, mean {mean:.3f}, bytes {share:.3f}")
    return "\n".join(lines)


def main(*paths: str) -> None:
    *sources, target = map(Path, paths)
    rows = read(sources)
    lines = [len(gzip.decompress(s.read_bytes()).splitlines()) for s in sources]
    images = np.repeat([any(word in s.name for word in IMAGES) for s in sources], lines)
    held = np.random.default_rng(0).random(len(images)) < HELD
    trees, seen = (fitted(some, [m for m in some if images[m.draw]])
                   for some in (rows, [m for m in rows if not held[m.draw]]))  # fmt: skip
    arrays: dict[str, Any] = {}
    for role in ROLES:
        every = (*trees.copied[role], trees.extra[role], trees.right[role])
        for name, one in zip((*COPIED, "extra", "right"), every, strict=True):
            arrays |= one.to_arrays(f"{role}.{name}")
    arrays |= trees.by_image.to_arrays("by_image")
    write_arrays(
        target, arrays, {"source": ", ".join(s.name for s in sources), "draws": len(held), "held out": int(held.sum())}
    )
    for told in (False, True):
        print("told by cuDNN" if told else "guessed")
        print(scored(seen, [m for m in rows if held[m.draw] and (m.engine is not None) == told]))


if __name__ == "__main__":
    main(*sys.argv[1:])
