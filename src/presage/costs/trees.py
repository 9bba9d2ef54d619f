"""Gradient-boosted regression trees as plain arrays: kept and evaluated without LightGBM, which fitted them.

Features are float32. A threshold that LightGBM found in float64 is rounded down to float32: a float32 value is at most
the one exactly where it is at most the other, so no row, seen or unseen, changes sides. Leaf values are rounded to
float32 and added up in float64. Where a feature is NaN a row goes the way it went in training; in a column that had no
NaN there, NaN counts as zero, as in LightGBM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from presage.engine.compiled import compiled_at_once, numba_pays
from presage.errors import PresageError

Array = npt.NDArray[Any]
SECONDS = 0.3e-6  # for a row to pass a tree without Numba
STORED = ("feature", "threshold", "nan_left", "splits", "value", "base", "features")


class Nodes(NamedTuple):
    """All nodes of all trees, numbered in a walk that goes left first, tree after tree."""

    feature: Array  # int16: the column a split looks at
    threshold: Array  # float32: left if the feature is at most this
    nan_left: Array  # bool
    children: Array  # int32 [nodes, 2], the right one first; of a leaf, the leaf itself
    value: Array  # float32, zero at splits


@dataclass(frozen=True)
class Trees:
    """A sum of regression trees: which nodes split, in the order of the walk, and what splits and leaves hold."""

    splits: Array  # bool, one per node
    feature: Array  # int16, one per split
    threshold: Array  # float32, one per split
    nan_left: Array  # bool, one per split
    value: Array  # float32, one per leaf
    base: float  # what is predicted without any tree
    features: int  # columns a row must have

    def __post_init__(self) -> None:
        height, splits = _height(self.splits), int(np.count_nonzero(self.splits))
        held = {x.shape for x in (self.feature, self.threshold, self.nan_left)}
        if held != {(splits,)} or self.value.shape != (len(self.splits) - splits,):
            raise ValueError(f"{len(self.splits)} nodes, but {len(self.feature)} splits and {len(self.value)} leaves")
        if len(height) and height[-1] >= height[:-1].min(initial=0):
            raise ValueError("the last tree is not whole")
        if splits and not 0 <= self.feature.min() <= self.feature.max() < self.features:
            raise ValueError(f"a split on a feature beyond {self.features}")

    def __len__(self) -> int:
        return len(self.value) - len(self.feature)

    def predict(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """One number per row of a matrix [rows, features]."""
        given = np.asarray(x)
        if given.ndim != 2 or given.shape[1] != self.features:
            raise ValueError(f"trees over {self.features} features got a matrix of shape {given.shape}")
        columns = np.ascontiguousarray(given.T, np.float32)
        out, some_nan = np.full(len(given), self.base), bool(np.isnan(columns).any())
        if numba_pays(SECONDS * len(self) * len(given)):
            _add_trees(*self.nodes, self.roots, self._depth, columns, some_nan, out)
        else:
            _add_trees_in_rounds(self.nodes, self.roots, columns, some_nan, out)
        return out

    @cached_property
    def roots(self) -> Array:
        """The first node of each tree."""
        return np.flatnonzero(_waiting(self.splits)[1]).astype(np.int32)

    @cached_property
    def nodes(self) -> Nodes:
        n, at = len(self.splits), self.splits
        feature, threshold = np.zeros(n, np.int16), np.zeros(n, np.float32)
        nan_left, value = np.zeros(n, np.bool_), np.zeros(n, np.float32)
        feature[at], threshold[at], nan_left[at], value[~at] = self.feature, self.threshold, self.nan_left, self.value
        return Nodes(feature, threshold, nan_left, _children(at), value)

    @cached_property
    def _depth(self) -> Array:
        """For each tree the most splits that a row passes."""
        return _depths(self.nodes.children, self.roots)

    def to_arrays(self, prefix: str) -> dict[str, Array]:
        """What `np.savez_compressed` should keep, by `prefix.name`."""
        packed = np.packbits(self.nan_left), np.packbits(self.splits)
        parts = (self.feature, self.threshold, *packed, self.value, np.float64(self.base), np.int32(self.features))
        return {f"{prefix}.{name}": np.asarray(part) for name, part in zip(STORED, parts, strict=True)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], prefix: str) -> Trees:
        """The trees that `to_arrays` gave, from a dictionary or an opened .npz."""
        absent = [name for name in STORED if f"{prefix}.{name}" not in arrays]
        if absent:
            raise PresageError(f"no trees {prefix!r} here: {', '.join(absent)} missing")
        feature, threshold, nan_left, packed, value, base, features = (arrays[f"{prefix}.{n}"] for n in STORED)
        try:
            splits = np.unpackbits(packed, count=len(feature) + len(value)).view(np.bool_)
            nan = np.unpackbits(nan_left, count=len(feature)).view(np.bool_)
            feature = feature.astype(np.int16, casting="same_kind", copy=False)
            threshold, value = (x.astype(np.float32, casting="same_kind", copy=False) for x in (threshold, value))
            return cls(splits, feature, threshold, nan, value, float(base), int(features))
        except (ValueError, TypeError, IndexError) as e:
            raise PresageError(f"trees {prefix!r}: the arrays do not belong together: {e}") from e


def _height(splits: Array) -> Array:
    """Nodes seen that split, less leaves seen, after each node: a tree ends where this is lower than ever before."""
    return np.cumsum(np.where(splits, np.int8(1), np.int8(-1)), dtype=np.int32)


def _waiting(splits: Array) -> tuple[Array, Array]:
    """Before each node: how many splits of its tree still wait for their right side, and whether a tree begins."""
    before = np.zeros(len(splits), np.int32)
    before[1:] = _height(splits)[:-1]
    lowest = np.minimum.accumulate(before)
    return before - lowest, np.diff(lowest, prepend=1) < 0


def _children(splits: Array) -> Array:
    """The right side of a split is the next node before which as many splits wait as before the split itself."""
    waiting, nodes = _waiting(splits)[0], np.arange(len(splits), dtype=np.int32)
    if len(splits) and waiting.max() <= np.iinfo(np.int16).max:
        waiting = waiting.astype(np.int16)  # much faster to sort
    order = np.argsort(waiting, kind="stable").astype(np.int32)
    right = nodes.copy()
    right[order[:-1]] = order[1:]
    return np.column_stack([np.where(splits, right, nodes), nodes + splits])


@compiled_at_once
def _depths(children: Array, roots: Array) -> Array:
    level, depth = np.zeros(len(children), np.int32), np.zeros(len(roots), np.int32)
    for tree in range(len(roots)):
        for k in range(roots[tree], roots[tree + 1] if tree + 1 < len(roots) else len(children)):
            depth[tree] = max(depth[tree], level[k])
            if children[k, 0] != k:
                level[children[k, 0]] = level[children[k, 1]] = level[k] + 1
    return depth


def _add_trees_in_rounds(nodes: Nodes, roots: Array, columns: Array, some_nan: bool, out: Array) -> None:
    """What `_add_trees` does, the same to the bit: all rows go down all trees together, without those at a leaf."""
    rows, right = columns.shape[1], nodes.children[:, 0]
    flat, at = columns.ravel(), np.repeat(roots, rows)
    going = np.flatnonzero(right[at] != at)
    row = (going % max(rows, 1)).astype(np.int32)
    while len(going):
        node = at[going]
        x = flat[nodes.feature[node].astype(np.int32) * np.int32(rows) + row]
        goes_left = x <= nodes.threshold[node]
        if some_nan:
            goes_left |= nodes.nan_left[node] & np.isnan(x)
        at[going] = node = np.where(goes_left, node + 1, right[node])
        on = right[node] != node
        going, row = going[on], row[on]
    sums = np.vstack([out, nodes.value[at].reshape(len(roots), rows)])
    out[:] = np.add.accumulate(sums)[-1]  # one after the other, where a plain sum would pair them


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
