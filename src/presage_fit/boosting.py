"""Boosted trees fitted with LightGBM, as plain arrays (`presage.costs.trees`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.trees import Trees
from presage.errors import PresageError

OBJECTIVES = ("regression", "regression_l1", "huber", "fair", "quantile")  # the same with a constant taken off y
DUMPED_INF = 1e300  # LightGBM's dump has this for an infinite threshold: all but NaN go left
# Of each fit: two that share a busy core wait for each other a hundred times longer than they work. Trees do not depend
# on it.
THREADS = int(os.environ.get("PRESAGE_FIT_THREADS", "1"))
NO_LIGHTGBM = "fitting trees needs LightGBM: pip install 'presage[fit]'"


def fit(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    rounds: int = 400,
    leaves: int = 31,
    rate: float = 0.05,
    min_leaf: int = 10,
    seed: int = 0,
    objective: str = "regression",
    extra: Mapping[str, Any] | None = None,
) -> Trees:
    """Trees that predict y from the rows of x. The same data and seed give the same trees.

    Every column is a number; a kind of thing (a dtype, a layout) is one too, or several 0/1 columns. `objective`
    (one of OBJECTIVES) and `extra` (lambda_l2, feature_fraction, monotone_constraints, ...) are LightGBM's.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective {objective!r}: should be one of {', '.join(OBJECTIVES)}")
    try:
        import lightgbm
    except ImportError as e:
        raise PresageError(NO_LIGHTGBM) from e
    rows, target = np.ascontiguousarray(x, np.float32), np.asarray(y, np.float64)
    weight = np.ones(len(target)) if weights is None else np.asarray(weights, np.float64)
    base = float(np.average(target, weights=weight))
    settings = {
        "objective": objective,
        "num_leaves": leaves,
        "learning_rate": rate,
        "min_data_in_leaf": min_leaf,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "boost_from_average": False,  # the average is taken off here, so that it is not hidden in the first tree
        "num_threads": THREADS,
        "verbosity": -1,
    }
    table = lightgbm.Dataset(rows, target - base, weight=weight)
    booster = lightgbm.train({**settings, **(extra or {})}, table, num_boost_round=rounds)
    return _as_arrays(booster.dump_model()["tree_info"], base, rows.shape[1])


def no_trees(features: int) -> Trees:
    """Trees that predict zero."""
    none = np.zeros(0)
    return Trees(none.astype(bool), none.astype(np.int16), none.astype(np.float32), none.astype(bool),
                 none.astype(np.float32), 0.0, features)  # fmt: skip


def joined(first: Trees, more: Trees, where: Sequence[tuple[int, float, bool]]) -> Trees:
    """The sum of both, of `more` only in rows where each (feature, threshold, whether it lies above) of `where` holds:
    every tree of it gets these splits above its root, with leaves of zero beside them."""
    left, right = sum(above for _, _, above in where), sum(not above for _, _, above in where)  # leaves of zero
    before = np.array([node for _, _, above in where for node in ([True, False] if above else [True])], bool)
    lowest = np.minimum(0, np.minimum.accumulate(np.cumsum(np.where(more.splits, 1, -1))))
    ends = np.flatnonzero(np.diff(lowest, prepend=0) < 0) + 1  # a tree has one leaf more than splits
    trees = np.split(more.splits, ends[:-1])
    roots = np.repeat(np.cumsum([0, *(t.sum() for t in trees[:-1])]), len(where))
    leaves = np.split(more.value, np.cumsum([(~t).sum() for t in trees[:-1]]))
    leaves[0] = leaves[0] + np.float32(more.base)

    def with_conditions(held: npt.NDArray[Any], of_each: list[Any]) -> npt.NDArray[Any]:
        return np.insert(held, roots, np.tile(np.array(of_each, held.dtype), len(trees)))

    return Trees(
        np.concatenate([first.splits, *(part for t in trees for part in (before, t, np.zeros(right, bool)))]),
        np.concatenate([first.feature, with_conditions(more.feature, [f for f, _, _ in where])]),
        np.concatenate([first.threshold, with_conditions(more.threshold, [t for _, t, _ in where])]),
        np.concatenate([first.nan_left, with_conditions(more.nan_left, [False] * len(where))]),
        np.concatenate([first.value, *(np.pad(part, (left, right)) for part in leaves)]),
        first.base,
        first.features,
    )


def _as_arrays(trees: Iterable[Mapping[str, Any]], base: float, features: int) -> Trees:
    """LightGBM's own description of its trees as arrays."""
    nodes = [node for tree in trees for node in _walk(tree["tree_structure"])]
    splits = np.array([isinstance(node, tuple) for node in nodes], np.bool_)
    found = [node for node in nodes if isinstance(node, tuple)]
    feature = np.array([f for f, _, _ in found], np.int16)
    threshold = _down(np.array([t for _, t, _ in found], np.float64))
    nan_left = np.array([n for _, _, n in found], np.bool_)
    value = np.array([node for node in nodes if not isinstance(node, tuple)], np.float32)
    return Trees(splits, feature, threshold, nan_left, value, base, features)


def _walk(root: Mapping[str, Any]) -> Iterator[tuple[int, float, bool] | float]:
    """Splits (feature, threshold, whether NaN goes left) and leaf values, each split before what is under it."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if "leaf_value" in node:
            yield float(node["leaf_value"])
            continue
        if node["decision_type"] != "<=" or node["missing_type"] == "Zero":
            raise PresageError("trees with categorical splits, or with zeros for missing values, cannot be arrays")
        threshold = float(node["threshold"])
        threshold = inf if threshold >= DUMPED_INF else threshold
        yield (
            node["split_feature"],
            threshold,
            node["default_left"] if node["missing_type"] == "NaN" else threshold >= 0,
        )
        waiting += [node["right_child"], node["left_child"]]


def _down(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The largest float32 that is at most x."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    return np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)
