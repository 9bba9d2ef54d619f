"""Gradient-boosted regression trees as plain arrays: kept and evaluated without LightGBM, which fitted them.

Features are float32. A threshold that LightGBM found in float64 is rounded down to float32: a float32 value is at most
the one exactly where it is at most the other, so no row, seen or unseen, changes sides. Leaf values are rounded to
float32 and added up in float64. Where a feature is NaN a row goes the way it went in training; in a column that had no
NaN there, NaN counts as zero, as in LightGBM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.engine.compiled import compiled_at_once
from presage.errors import PresageError

Array = npt.NDArray[Any]
STORED = ("feature", "threshold", "nan_left", "splits", "value", "base", "features")


@dataclass(frozen=True, slots=True)
class Trees:
    """A sum of regression trees. Their nodes are numbered in a walk that goes left first, tree after tree."""

    feature: Array  # int16: the column a split looks at
    threshold: Array  # float32: left if the feature is at most this
    nan_left: Array  # bool
    children: Array  # int32 [nodes, 2], the right one first; of a leaf, the leaf itself
    value: Array  # float32, zero at splits
    roots: Array  # int32, one per tree
    depth: Array  # int32, one per tree: the most splits a row passes
    base: float  # what is predicted without any tree
    features: int  # columns a row must have

    def __len__(self) -> int:
        return len(self.roots)

    def predict(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """One number per row of a matrix [rows, features]."""
        given = np.asarray(x)
        if given.ndim != 2 or given.shape[1] != self.features:
            raise ValueError(f"trees over {self.features} features got a matrix of shape {given.shape}")
        columns = np.ascontiguousarray(given.T, np.float32)
        out = np.full(len(given), self.base)
        nodes = (self.feature, self.threshold, self.nan_left, self.children)
        _add_trees(*nodes, self.value, self.roots, self.depth, columns, bool(np.isnan(columns).any()), out)
        return out

    def to_arrays(self, prefix: str) -> dict[str, Array]:
        """What `np.savez_compressed` should keep, by `prefix.name`."""
        splits = self.children[:, 0] != self.children[:, 1]
        parts = (
            self.feature[splits],
            self.threshold[splits],
            np.packbits(self.nan_left[splits]),
            np.packbits(splits),
            self.value[~splits],
            np.float64(self.base),
            np.int32(self.features),
        )
        return {f"{prefix}.{name}": np.asarray(part) for name, part in zip(STORED, parts, strict=True)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], prefix: str) -> Trees:
        """The trees that `to_arrays` gave, from a dictionary or an opened .npz."""
        absent = [name for name in STORED if f"{prefix}.{name}" not in arrays]
        if absent:
            raise PresageError(f"no trees {prefix!r} here: {', '.join(absent)} missing")
        feature, threshold, nan_left, packed, value, base, features = (arrays[f"{prefix}.{n}"] for n in STORED)
        try:
            splits = np.unpackbits(packed, count=len(feature) + len(value)).astype(np.bool_)
            nan = np.unpackbits(nan_left, count=len(feature)).astype(np.bool_)
            return trees_of(splits, feature, threshold, nan, value, float(base), int(features))
        except (ValueError, TypeError, IndexError) as e:
            raise PresageError(f"trees {prefix!r}: the arrays do not belong together: {e}") from e


def trees_of(
    splits: Array, feature: Array, threshold: Array, nan_left: Array, value: Array, base: float, features: int
) -> Trees:
    """From which nodes split, in the order of the walk, and what splits and leaves hold."""
    children, roots, depth = _wired(splits)
    if int(splits.sum()) != len(feature) or len(value) != len(feature) + len(roots):
        raise ValueError("the last tree is not whole")
    if len(feature) and not 0 <= feature.min() <= feature.max() < features:
        raise ValueError(f"a split on a feature beyond {features}")
    n = len(splits)
    all_feature, all_threshold = np.zeros(n, np.int16), np.zeros(n, np.float32)
    all_nan, all_value = np.zeros(n, np.bool_), np.zeros(n, np.float32)
    all_feature[splits], all_threshold[splits], all_nan[splits] = feature, threshold, nan_left
    all_value[~splits] = value
    return Trees(all_feature, all_threshold, all_nan, children, all_value, roots, depth, base, features)


@compiled_at_once
def _wired(splits: Array) -> tuple[Array, Array, Array]:
    """Children, roots and depths from which nodes split, in the order of the walk."""
    children = np.empty((len(splits), 2), np.int32)
    roots, depth = np.empty(len(splits), np.int32), np.zeros(len(splits), np.int32)
    open_, waiting = np.empty(len(splits), np.int32), 0  # splits whose right side is still to come
    level = np.zeros(len(splits), np.int32)
    trees, goes_left = 0, False
    for k in range(len(splits)):
        if goes_left:
            level[k] = level[k - 1] + 1
        elif waiting:
            waiting -= 1
            children[open_[waiting], 0] = k
            level[k] = level[open_[waiting]] + 1
        else:
            roots[trees] = k
            trees += 1
        depth[trees - 1] = max(depth[trees - 1], level[k])
        goes_left = splits[k]
        children[k, 0], children[k, 1] = k, k + goes_left
        if goes_left:
            open_[waiting] = k
            waiting += 1
    return children, roots[:trees].copy(), depth[:trees].copy()


@compiled_at_once
def _add_trees(
    feature: Array,
    threshold: Array,
    nan_left: Array,
    children: Array,
    value: Array,
    roots: Array,
    depth: Array,
    columns: Array,
    some_nan: bool,
    out: Array,
) -> None:
    """Add each tree's value to each row. All rows go down together, without a branch to guess: those at a leaf stay.

    Places are unsigned, for Numba tests the others for being negative.
    """
    rows = columns.shape[1]
    flat, sides, at = columns.ravel(), children.ravel(), np.empty(rows, np.int32)
    for tree in range(len(roots)):
        at[:] = roots[tree]
        for _ in range(depth[tree]):
            for row in range(rows):
                node = np.uint64(at[row])
                x = flat[np.uint64(feature[node]) * np.uint64(rows) + np.uint64(row)]
                goes_left = x <= threshold[node]
                if some_nan:
                    goes_left |= nan_left[node] & (x != x)
                at[row] = sides[np.uint64(2) * node + np.uint64(goes_left)]
        for row in range(rows):
            out[row] += value[np.uint64(at[row])]
