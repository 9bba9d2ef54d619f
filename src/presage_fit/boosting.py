"""Boosted trees fitted with LightGBM, as plain arrays (`presage.costs.trees`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.trees import Trees
from presage.errors import PresageError

OBJECTIVES = ("regression", "regression_l1", "huber", "fair", "quantile")  # the same with a constant taken off y
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
        "num_threads": 1,  # two that share a busy core wait for each other a hundred times longer than they work
        "verbosity": -1,
    }
    table = lightgbm.Dataset(rows, target - base, weight=weight)
    booster = lightgbm.train({**settings, **(extra or {})}, table, num_boost_round=rounds)
    return _from_text(booster.model_to_string(), base, rows.shape[1])


def _from_text(model: str, base: float, features: int) -> Trees:
    """The trees in LightGBM's own text format."""
    nodes = [node for tree in _blocks(model) for node in _walk(tree)]
    splits = np.array([isinstance(node, tuple) for node in nodes], np.bool_)
    found = [node for node in nodes if isinstance(node, tuple)]
    feature = np.array([f for f, _, _ in found], np.int16)
    threshold = _down(np.array([t for _, t, _ in found], np.float64))
    nan_left = np.array([n for _, _, n in found], np.bool_)
    value = np.array([node for node in nodes if not isinstance(node, tuple)], np.float32)
    return Trees(splits, feature, threshold, nan_left, value, base, features)


def _blocks(model: str) -> Iterator[dict[str, list[str]]]:
    """The fields of each tree."""
    for block in model.split("\nTree=")[1:]:
        lines = (line.partition("=") for line in block.partition("end of trees")[0].splitlines()[1:])
        yield {key: text.split() for key, equals, text in lines if equals}


def _walk(tree: Mapping[str, Sequence[str]]) -> Iterator[tuple[int, float, bool] | float]:
    """Splits (feature, threshold, whether NaN goes left) and leaf values, each split before what is under it."""
    left, right, value = tree.get("left_child", []), tree.get("right_child", []), tree["leaf_value"]
    waiting = [0 if left else -1]
    while waiting:
        node = waiting.pop()
        if node < 0:
            yield float(value[~node])
            continue
        threshold = float(tree["threshold"][node])
        yield int(tree["split_feature"][node]), threshold, _nan_left(int(tree["decision_type"][node]), threshold)
        waiting += [int(right[node]), int(left[node])]


def _nan_left(decision: int, threshold: float) -> bool:
    """LightGBM's decision type: bit 0 categorical, bit 1 the default is left, bits 2-3 what counts as missing."""
    categorical, default_left, missing = decision & 1, bool(decision & 2), decision >> 2 & 3
    if categorical or missing == 1:
        raise PresageError("trees with categorical splits, or with zeros for missing values, are not kept as arrays")
    return default_left if missing == 2 else threshold >= 0


def _down(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The largest float32 that is at most x."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    return np.where(near > x, np.nextafter(near, np.float32(-np.inf)), near)
