"""Lengths of documents that sequences are packed of: a law by name, or a file of measured ones."""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError, PresageError
from presage.files.reading import lines, read_json

Floats = NDArray[np.float64]
POINTS = 256  # lengths, each as likely, that stand for a distribution
LAWS = {
    "fixed": "fixed TOKENS",
    "uniform": "uniform LEAST MOST",
    "lognormal": "lognormal MEDIAN SIGMA (of the logarithm)",
    "exponential": "exponential MEAN",
}
DRAWS = 200  # rows, of which the most usual one stands for all
MOST = 1e9  # tokens


def parse_lengths(text: str | list[int], path: str | Path) -> tuple[int, ...]:
    """Lengths, each as likely: of a law such as "lognormal 900 1.1", of a file beside the job's, or as they are."""
    if isinstance(text, list):
        if not text or min(text) < 1 or max(text) > MOST:
            raise PresageError("should be lengths in tokens, 1 or more")
        return tuple(text)
    kind, *numbers = text.split()
    if kind not in LAWS:
        file = Path(path).parent / text
        if file.suffix or file.exists():
            return representative(read_lengths(file))
        raise PresageError(f"is {text!r}: a law ({'; '.join(LAWS.values())}), or a file of lengths")
    try:
        values = [float(x) for x in numbers]
        found = _law(kind, values)
    except (ValueError, TypeError):
        raise PresageError(f"is {text!r}: it should be like {LAWS[kind]!r}") from None
    return tuple(max(1, round(min(x, MOST))) for x in found)


def _law(kind: str, values: list[float]) -> list[float]:
    """Quantiles in the middle of equal shares."""
    if not values or min(values) < 0 or max(values) > MOST:
        raise ValueError
    shares = [(i + 0.5) / POINTS for i in range(POINTS)]
    if kind == "fixed":
        (tokens,) = values
        return [tokens]
    if kind == "uniform":
        least, most = values
        return [least + share * (most - least) for share in shares]
    if kind == "exponential":
        (mean,) = values
        return [-mean * float(np.log1p(-share)) for share in shares]
    median, sigma = values
    normal = NormalDist()
    return [median * float(np.exp(sigma * normal.inv_cdf(share))) for share in shares]


def representative(values: Floats) -> tuple[int, ...]:
    """A few hundred lengths that stand for many."""
    shares = (np.arange(POINTS) + 0.5) / POINTS
    return tuple(max(1, round(float(x))) for x in np.quantile(values, shares))


def read_lengths(path: str | Path) -> Floats:
    """Tokens of documents: a number a line; a CSV file with a column `length` or `tokens`, and `count` for a histogram;
    a JSON list, or an object of counts by length."""
    path = Path(path)
    values = _from_json(path) if path.suffix == ".json" else _from_csv(path)
    if not len(values) or not ((values >= 1) & (values < 1e12)).all():
        raise InputError(path, "lengths should be numbers of tokens, 1 or more")
    return values


def _from_json(path: Path) -> Floats:
    found = read_json(path)
    try:
        if isinstance(found, dict):
            return _repeated([float(k) for k in found], [float(v) for v in found.values()])
        return np.array([float(x) for x in found])
    except (TypeError, ValueError):
        raise InputError(path, "should be a list of lengths, or an object of counts by length") from None


def _from_csv(path: Path) -> Floats:
    try:
        rows: list[list[str]] = [r for r in csv.reader(lines(path)) if r]
    except csv.Error as e:
        raise InputError(path, "is not text: a length in tokens on each line was expected") from e
    names = [x.strip().lower() for x in rows[0]] if rows else []
    at = next((names.index(n) for n in ("length", "lengths", "tokens") if n in names), None)
    counts = next((names.index(n) for n in ("count", "counts", "documents") if n in names), None)
    body: Any = rows if at is None else rows[1:]
    try:
        values = [float(r[at or 0]) for r in body]
        return np.array(values) if counts is None else _repeated(values, [float(r[counts]) for r in body])
    except (ValueError, IndexError):
        raise InputError(path, "should have a length in tokens on each line, or a column `length`") from None


def _repeated(values: list[float], counts: list[float]) -> Floats:
    """A histogram as equally likely values, the least of which stand for a ten-thousandth."""
    weights = np.array(counts)
    if not len(weights) or weights.min() < 0 or not 0 < weights.sum() < np.inf:
        raise ValueError
    return np.repeat(
        np.array(values), np.maximum(1, np.round(weights / weights.sum() * 10_000)).astype(int) * (weights > 0)
    )


@lru_cache(256)
def packed_documents(lengths: tuple[int, ...], sequence: int) -> tuple[int, ...]:
    """What a usual row is packed of: documents one after the other, the last cut off. Of many rows drawn, the one whose
    attention is nearest to their mean."""
    rng = np.random.default_rng(0)
    rows = [_row(lengths, sequence, rng) for _ in range(DRAWS)]
    work = [sum(n * n for n in row) for row in rows]
    mean = sum(work) / len(work)
    return min(zip(rows, work, strict=True), key=lambda r: abs(r[1] - mean))[0]


def _row(lengths: tuple[int, ...], sequence: int, rng: np.random.Generator) -> tuple[int, ...]:
    left, out = sequence, []
    while left > 0:
        one = min(int(lengths[rng.integers(len(lengths))]), left)
        out.append(one)
        left -= one
    return tuple(out)


def lengths_text(lengths: tuple[int, ...]) -> str:
    """In a few words."""
    if not lengths:
        return ""
    ordered = sorted(lengths)
    return f"packed documents of {ordered[len(ordered) // 2]:,} tokens (median)"
