"""What the lookups of tables move: rows from memory, from L2, from the cache of an SM; rows by how they are updated.

Caches by Che's approximation of one that forgets what was longest unused: a row stays for a characteristic time, the
same for all rows, such that the rows held fill the cache; used c times, it is found again with probability
1 - exp(-c x time). FBGEMM walks over tables one after the other, so each has the caches to itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.embeddings.table import TableArrays

__all__ = ["LookupTraffic", "lookup_traffic", "time_held"]

Array = npt.NDArray[Any]
SECTOR = 32.0  # bytes: the least that is read
LONG = 5  # the first bin of rows that thread blocks update instead of warps: 32 uses


@dataclass(frozen=True)
class LookupTraffic:
    """One entry a table."""

    columns: TableArrays
    row: Array  # bytes read of a row
    again: Array  # lookups that miss L2 though their row was there before
    near: Array  # lookups that miss their SM's own cache
    long: Array  # lookups of rows that thread blocks update
    long_rows: Array
    adaptive: Array  # the optimizer keeps a state
    varied: Array  # bags differ in length

    @property
    def short(self) -> Array:
        return np.asarray(np.maximum(0.0, self.columns.count - self.long))

    @property
    def short_rows(self) -> Array:
        return np.asarray(np.maximum(0.0, self.columns.distinct - self.long_rows))


def lookup_traffic(
    k: TableArrays, p: Mapping[str, float], adaptive: Array | bool, varied: Array | bool
) -> LookupTraffic:
    """Of tables and a batch, with caches of `cache` bytes (L2) and `own_cache` bytes on each of `sms`."""
    row = SECTOR * np.ceil(k.dim * k.width / SECTOR)
    long = np.minimum(k.count, (k.rows * k.uses)[:, LONG:].sum(axis=1))
    return LookupTraffic(
        k, row, _again(k, p["cache"] / row), _near(k, p["own_cache"] / row, p["sms"]), long,
        k.rows[:, LONG:].sum(axis=1), np.broadcast_to(adaptive, len(k)), np.broadcast_to(varied, len(k)),
    )  # fmt: skip


def time_held(rows: Array, uses: Array, held: Array) -> Array:
    """The characteristic time, in units of the batch, of tables [tables, bins] in a cache of so many rows."""
    low, high = np.full(len(held), 1e-9), np.full(len(held), 1e6)
    for _ in range(30):
        middle = np.sqrt(low * high)
        over = (rows * -np.expm1(-uses * middle[:, None])).sum(axis=1) > held
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return low


def _again(k: TableArrays, held: Array) -> Array:
    gone = np.exp(-k.uses * time_held(k.rows, k.uses, held)[:, None])
    missed: Array = (k.rows * (k.uses - 1) * gone).sum(axis=1)
    return np.where(k.distinct <= held, 0.0, missed)


def _near(k: TableArrays, held: Array, sms: float) -> Array:
    """Each SM sees its share of a row's uses; the first there misses."""
    uses = k.uses / sms
    first = -sms * np.expm1(-uses)
    gone = np.exp(-uses * time_held(k.rows, uses, held)[:, None])
    missed: Array = (k.rows * (first + (k.uses - first) * gone)).sum(axis=1)
    return np.minimum(missed, k.count)
