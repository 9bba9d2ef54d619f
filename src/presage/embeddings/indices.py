"""Index data of embedding tables: files, pooling factors, distinct rows, row reuse and the fitted skew."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.lookups.row_reuse import BINS, STEEPEST, Reuse, zipf
from presage.costs.lookups.table import Table
from presage.errors import InputError, PresageError
from presage.files.arrays import check_zip, parse_npy, parse_npz
from presage.files.reading import read_bytes

Array = npt.NDArray[Any]
GOLDEN, STEPS = 0.6180339887, 22


@dataclass(frozen=True)
class Bags:
    """The lookups of one table: indices of all samples one after the other, and how many each sample has."""

    name: str
    indices: Array
    lengths: Array

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != len(self.indices) or (len(self.lengths) and self.lengths.min() < 0):
            raise PresageError(f"table {self.name}: lengths add up to {int(self.lengths.sum())}, not to "
                               f"{len(self.indices)} indices")  # fmt: skip
        if len(self.indices) and self.indices.min() < 0:
            raise PresageError(f"table {self.name}: an index is negative")


@dataclass(frozen=True)
class TableCounts:
    """Lookup statistics of one table in one batch."""

    name: str
    rows: int  # the largest index and one, unless it was told
    dim: int
    dtype: str
    pooling: float  # of all samples
    lookups: int  # of the batch, as are the rest
    distinct: int
    top: int
    hist: tuple[float, ...]
    alpha: float

    def table(self) -> Table:
        reuse = Reuse(self.alpha, self.hist, self.lookups, self.distinct, self.top)
        return Table(self.name, self.rows, self.dim, self.pooling, reuse, self.dtype)


def count_lookups(
    tables: Iterable[Bags], batch: int | None = None, dim: int = 128, dtype: str = "float32", rows: int | None = None
) -> Iterator[TableCounts]:
    """Statistics of each table over its first `batch` samples, or over all."""
    for bags in tables:
        samples = min(len(bags.lengths), batch or len(bags.lengths))
        used = bags.indices[: int(bags.lengths[:samples].sum())]
        uses = np.unique(used, return_counts=True)[1]
        size = max(rows or 0, int(bags.indices.max()) + 1 if len(bags.indices) else 1)
        bins = np.bincount(np.minimum(np.log2(np.maximum(1, uses)).astype(int), BINS - 1), minlength=BINS)
        hist = tuple((bins / max(1, len(uses))).tolist())
        pooling = float(bags.lengths.mean()) if len(bags.lengths) else 0.0
        alpha = likely_alpha(tuple(bins.tolist()), len(used), size)
        top = int(uses.max()) if len(uses) else 0
        yield TableCounts(bags.name, size, dim, dtype, pooling, len(used), len(uses), top, hist, alpha)


@lru_cache(4096)
def likely_alpha(bins: tuple[int, ...], lookups: int, rows: int) -> float:
    """Maximum-likelihood Zipf skew from the rows in each bin of use counts, unused rows included (Poisson)."""
    if not lookups:
        return 0.0
    counted = np.array([rows - sum(bins), *bins], float)

    def unlikely(alpha: float) -> float:
        expected = zipf(alpha, rows, float(lookups)).rows
        all_ = np.maximum(1e-3, np.array([rows - expected.sum(), *expected]))
        return float((all_ - counted * np.log(all_)).sum())

    low, high = 0.0, STEEPEST
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    cost = {x: unlikely(x) for x in (left, right)}
    for _ in range(STEPS):
        if cost[left] <= cost[right]:
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
        cost |= {x: unlikely(x) for x in (left, right) if x not in cost}
    best = min([*cost, 0.0], key=lambda x: cost.get(x, unlikely(x)))
    return round(best, 4)


# ---- Files of index data: NumPy, Parquet and tensors saved by torch, read as data only.

MOST = 8 << 30  # bytes of arrays in a file, unpacked
NO_TORCH = "tensors saved by torch need torch to be read: pip install 'presage[torch]'"
NO_ARROW = "Parquet needs pyarrow to be read: pip install pyarrow"


def read_indices(path: str | Path) -> list[Bags]:
    """The tables of one file."""
    path = Path(path)
    name = path.name.removesuffix(".gz")
    reader = next((r for ending, r in READERS.items() if name.endswith(ending)), None)
    if reader is None:
        raise InputError(path, f"should end in {', '.join(READERS)}, or those with .gz")
    value = reader(read_bytes(path, MOST), path)
    try:
        return list(_tables(value, name.rsplit(".", 1)[0]))
    except InputError:
        raise
    except PresageError as e:
        raise InputError(path, str(e)) from e


def _torch(data: bytes, path: Path) -> Any:
    try:
        import torch
    except ImportError as e:
        raise InputError(path, NO_TORCH) from e
    if data[:2] == b"PK":
        check_zip(data, path, MOST)
    try:
        return _arrays(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as e:  # of another's reader: it says no list of what it raises
        raise InputError(path, f"not plain tensors saved by torch ({type(e).__name__}): nothing else is read") from e


def _arrays(value: Any) -> Any:
    """Tensors in nested containers as arrays."""
    if isinstance(value, dict):
        return {str(k): _arrays(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_arrays(v) for v in value]
    return value.numpy() if hasattr(value, "numpy") else value


def _parquet(data: bytes, path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as e:
        raise InputError(path, NO_ARROW) from e
    try:
        table, out = parquet.read_table(io.BytesIO(data)), {}
    except Exception as e:  # of another's reader: it says no list of what it raises
        raise InputError(path, f"not a Parquet file ({type(e).__name__})") from e
    for name in table.column_names:
        values = table[name].to_pylist()
        if all(isinstance(v, int | list) or v is None for v in values):
            out[name] = [np.array([] if v is None else v, np.int64).reshape(-1) for v in values]
    return out


READERS: dict[str, Callable[[bytes, Path], Any]] = {
    ".npy": parse_npy, ".npz": partial(parse_npz, most=MOST), ".pt": _torch, ".pth": _torch, ".parquet": _parquet,
}  # fmt: skip


def _tables(value: Any, name: str) -> Iterator[Bags]:
    if isinstance(value, list) and 2 <= len(value) <= 3 and all(isinstance(v, np.ndarray) for v in value):
        keys = ("indices", "offsets", "lengths") if len(value) == 3 else ("indices", _second(value))
        value = dict(zip(keys, value, strict=True))
    if isinstance(value, np.ndarray):
        yield from _columns(_whole(value, name), name)
    elif isinstance(value, dict) and "indices" in value:
        yield from _joined(value)
    elif isinstance(value, dict) and value:
        yield from _named(value)
    else:
        raise PresageError("no arrays of indices in it")


def _second(value: list[Array]) -> str:
    """The name of the second array: lengths or offsets."""
    return "lengths" if int(value[1].sum()) == len(value[0]) else "offsets"


def _whole(value: Array, name: str) -> Array:
    if not np.issubdtype(value.dtype, np.integer):
        raise PresageError(f"{name} is of {value.dtype}, not of whole numbers")
    return value


def _columns(value: Array, name: str) -> Iterator[Bags]:
    """[samples], [samples, tables] or [samples, tables, lookups]."""
    if not 1 <= value.ndim <= 3 or not value.size:
        raise PresageError(f"an array of {value.ndim} dimensions and {value.size} numbers")
    cube = value.reshape(len(value), -1, 1) if value.ndim < 3 else value
    for t in range(cube.shape[1]):
        yield _fixed(name if cube.shape[1] == 1 else f"{name}.{t}", cube[:, t])


def _fixed(name: str, value: Array) -> Bags:
    """Bags of equal length from an array [samples, lookups]."""
    return Bags(name, np.ascontiguousarray(value).reshape(-1), np.full(len(value), value.shape[1]))


def _joined(value: Mapping[str, Array]) -> Iterator[Bags]:
    """All tables one after the other."""
    indices = _whole(np.asarray(value["indices"]), "indices").reshape(-1)
    lengths = _lengths(value, len(indices), "indices")
    rows = lengths if lengths.ndim == 2 else lengths.reshape(1, -1)
    ends = np.cumsum(rows.sum(axis=1))
    if not len(ends) or int(ends[-1]) != len(indices):
        raise PresageError(f"lengths add up to {int(rows.sum())}, not to {len(indices)} indices")
    for t, end in enumerate(ends.tolist()):
        yield Bags(str(t), indices[end - int(rows[t].sum()) : end], rows[t])


def _is_table(held: Any) -> bool:
    """[samples] or [samples, lookups] of whole numbers."""
    whole = isinstance(held, np.ndarray) and np.issubdtype(held.dtype, np.integer)
    return whole and held.ndim in (1, 2) and held.size > 0


def _lengths(value: Mapping[str, Array], count: int, name: str) -> Array:
    """Bag lengths: as given, or from the offsets."""
    if "lengths" in value:
        return _whole(np.asarray(value["lengths"]), "lengths")
    if "offsets" not in value:
        raise PresageError(f"{name} has neither lengths nor offsets beside it")
    offsets = _whole(np.asarray(value["offsets"]), "offsets")
    flat = offsets.reshape(-1)
    found = np.diff(flat) if len(flat) and flat[-1] == count else np.diff(np.append(flat, count))
    if (found < 0).any():
        raise PresageError(f"offsets fall, or go past the {count} indices that they point into")
    return found


def _named(value: Mapping[str, Any]) -> Iterator[Bags]:
    split = {k.removesuffix(".indices") for k in value if k.endswith(".indices")}
    for name in sorted(split):
        parts = {k: value[f"{name}.{k}"] for k in ("indices", "lengths", "offsets") if f"{name}.{k}" in value}
        indices = _whole(np.asarray(parts["indices"]), name).reshape(-1)
        yield Bags(name, indices, _lengths(parts, len(indices), name).reshape(-1))
    for name, held in value.items():
        if name.rsplit(".", 1)[0] in split:
            continue
        if isinstance(held, list):
            flat = np.concatenate([*held, np.zeros(0, np.int64)])
            yield Bags(name, flat, np.array([len(v) for v in held], np.int64))
        elif _is_table(held):
            yield _fixed(name, held.reshape(len(held), -1))
        else:
            raise PresageError(f"{name}: neither [samples] nor [samples, lookups] of whole numbers")
