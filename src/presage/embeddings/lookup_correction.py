"""What the law leaves, learned: a smooth function of a group's features (kernel ridge regression, Matern 3/2).

Near measured groups it takes ln(measured / law) over, far from them it goes to its median.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.lookup_law import AT, KINDS, chain_seconds, kind_of, of_kind

__all__ = ["LookupCorrection", "correction_features", "fit_correction"]

Array = npt.NDArray[Any]
LENGTH, NOISE, SIZE = 1.0, 0.04, 0.08  # of the smooth function: its scale (in features), errors of rows, its spread
POINTS = 96  # groups it is held up by, chosen far from each other
CHUNK = 8192


@dataclass(frozen=True)
class LookupCorrection:
    center: Array  # of features
    scale: Array
    points: Array  # [groups, features], scaled
    weights: Array  # [groups]
    median: float

    def __call__(self, x: Array) -> Array:
        """The factor on the law, of features [..., features]."""
        rows = ((x - self.center) / self.scale).reshape(-1, len(self.center))
        parts = [_kernel(rows[i : i + CHUNK], self.points) @ self.weights for i in range(0, len(rows), CHUNK)]
        return np.exp(self.median + np.concatenate([*parts, np.zeros(0)])).reshape(x.shape[:-1])

    def to_json(self) -> dict[str, Any]:
        named = {n: getattr(self, n) for n in ("center", "scale", "points", "weights")}
        return {n: np.round(a, 5).tolist() for n, a in named.items()} | {"median": round(self.median, 6)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LookupCorrection:
        arrays = {n: np.array(value[n], float) for n in ("center", "scale", "points", "weights")}
        return LookupCorrection(**arrays, median=float(value["median"]))


def _kernel(a: Array, b: Array) -> Array:
    square = np.maximum(0.0, (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T)
    distance = np.sqrt(square * (3 / a.shape[1] / LENGTH**2))
    return np.asarray((1 + distance) * np.exp(-distance))


def fit_correction(x: Array, left: Array) -> LookupCorrection:
    """From features of groups and ln(measured / law)."""
    center, scale, median = x.mean(axis=0), x.std(axis=0) + 1e-6, float(np.median(left))
    rows = (x - center) / scale
    points = rows[_spread(rows, min(POINTS, len(rows)))]
    seen, ridge = _kernel(rows, points), (NOISE / SIZE) ** 2 * _kernel(points, points)
    weights = np.linalg.solve(seen.T @ seen + ridge + 1e-6 * np.eye(len(points)), seen.T @ (left - median))
    return LookupCorrection(center, scale, points, weights, median)


def _spread(rows: Array, count: int) -> list[int]:
    """Rows far from each other: the one in the middle first, then always the one farthest from those there are."""
    out = [int((rows**2).sum(axis=1).argmin())]
    near = ((rows - rows[out[0]]) ** 2).sum(axis=1)
    while len(out) < count:
        out.append(int(near.argmax()))
        near = np.minimum(near, ((rows - rows[out[-1]]) ** 2).sum(axis=1))
    return out


def correction_features(total: Array, p: Mapping[str, float]) -> Array:
    """Of groups, from the sums of their tables' terms: what is large, what is shared, what runs."""
    at = {name: total[..., i] for name, i in AT.items()}
    lookups, tables = np.maximum(1.0, at["lookups"]), np.maximum(1.0, at["tables"])
    kind = kind_of(total)
    ratio = np.maximum(of_kind(total, "cold"), 1e-9) / np.maximum(chain_seconds(total, p), 1e-9)
    columns = [
        np.log(ratio), np.log(np.maximum(1.0, at["bags"]) / tables), np.log(lookups), np.log(tables),
        np.log(np.maximum(1.0, at["columns"]) / lookups), np.log(lookups / np.maximum(1.0, at["distinct"])),
        (at["again"] + at["distinct"]) / lookups, at["near"] / lookups, at["long"] / lookups,
        np.log(np.maximum(1.0, at["touched"])), np.log(np.maximum(1.0, at["weights"])),
        at["half"] / tables, at["adaptive"] / tables, at["varied"] / tables, *(1.0 * (kind == k) for k in KINDS),
    ]  # fmt: skip
    return np.stack(np.broadcast_arrays(*columns), axis=-1)
