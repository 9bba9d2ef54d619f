"""Positive parameters of a law by least squares of ln(law / measured), with outliers counting less."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["least"]

Array = npt.NDArray[Any]
OUTLIER, STEP, BOUND, STIFFEST = 0.1, 1e-4, 2.0, 1e8


def least(
    law: Callable[[dict[str, float]], Array], start: Mapping[str, float], measured: Array, pull: float, rounds: int = 40
) -> dict[str, float]:
    """Levenberg and Marquardt's steps in the logarithms of the parameters.

    Residuals beyond 10% count as soft L1. A parameter e times its start costs as much as a residual of `pull`, so what
    the data do not tell stays where it was.
    """
    names, first = list(start), np.log(np.array(list(start.values())))

    def residuals(x: Array) -> Array:
        found = law(dict(zip(names, np.exp(x).tolist(), strict=True)))
        return np.asarray(np.log(np.maximum(found, 1e-12) / measured))

    def loss(now: Array, x: Array) -> float:
        soft = 2 * OUTLIER**2 * (np.sqrt(1 + (now / OUTLIER) ** 2) - 1)
        return float(soft.sum() + pull**2 * ((x - first) ** 2).sum())

    at, damping, now = first, 1e-2, residuals(first)
    for _ in range(rounds):
        slope = np.stack([(residuals(at + STEP * one) - now) / STEP for one in np.eye(len(at))], axis=1)
        weight = 1 / np.sqrt(1 + (now / OUTLIER) ** 2)
        square = (slope.T * weight) @ slope + pull**2 * np.eye(len(at))
        down = slope.T @ (weight * now) + pull**2 * (at - first)
        before = loss(now, at)
        while damping < STIFFEST:
            move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -down)
            there = at + np.clip(move, -BOUND, BOUND)
            then = residuals(there)
            if loss(then, there) < before:
                break
            damping *= 4
        else:
            break
        at, now, damping = there, then, max(1e-9, damping / 5)
        if before - loss(now, at) < 1e-5 * before:
            break
    return dict(zip(names, np.exp(at).tolist(), strict=True))
