"""Indices drawn with a skew."""

import numpy as np


def draws(alpha: float, rows: int, count: int, seed: int = 0) -> np.ndarray:
    """Row numbers drawn by the power law, its integral inverted."""
    u, e = np.random.default_rng(seed).random(count), 1 - alpha
    x = (rows + 1) ** u if abs(e) < 1e-9 else (((rows + 1) ** e - 1) * u + 1) ** (1 / e)
    return np.minimum(x.astype(np.int64), rows)
