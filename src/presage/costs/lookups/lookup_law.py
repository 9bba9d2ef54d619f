"""Kernel times of FBGEMM's table-batched embeddings, from memory traffic and the length of dependent reads.

Forward: a check of the indices, then a kernel in which 8, 16 or 32 lanes (by the widest table of the group) loop over a
bag. Tables come one after the other. A table takes the longest (as a soft maximum) of three: its chains of reads over
the warps that run at once, its bytes from and to memory, its bytes from L2. A group takes its tables, and the longest
chain of one bag, which counts alone where bags are few.

Backward: indices are made global and sorted by radix, 8 bits a pass; runs of equal ones are found; rows used fewer than
32 times are summed and updated by a warp each, the others by thread blocks that go over 1024 uses or fewer.

Everything a group's time needs is a sum over its tables (`terms`): maxima are sums of high powers and counts of wide
tables. So a search over placements adds rows of an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from presage.costs.lookups.table import TableArrays

Array = npt.NDArray[Any]
Params = Mapping[str, float]
KINDS = range(4)  # of kernels, by the widest table: to 32, 64, 128 columns, or wider
LANES: Array = np.array([8.0, 16.0, 32.0, 32.0])
WIDEST = (32, 64, 128)
SHARED: Array = np.array([1.03, 0.56, 0.0, 0.0])  # the longest of the bags that share a warp, in standard deviations
POWER, MICRO = 32.0, 1e-6  # sums of this power of microseconds stand for maxima
BLOCK = 1024.0  # uses of a row that one thread block goes over
RADIX, TILE = 8, 2400.0  # bits a pass; lookups that are sorted in one go

BY_KIND = ("warm", "cold", "warm_chain", "cold_chain", "update")
TERMS = (
    *(f"{name}{k}" for name in BY_KIND for k in KINDS),
    "walk", "steps", "lookups", "bags", "tables", "over32", "over64", "over128", "size", "weights", "long", "touched",
    "columns", "again", "near", "distinct", "half", "adaptive", "varied",
)  # fmt: skip
AT = {name: i for i, name in enumerate(TERMS)}


def lookup_terms(f: LookupTraffic, p: Params, kinds: Iterable[int | Array] = KINDS) -> Array:
    """[tables, TERMS]; sums over the tables of a group are what `forward` and `backward` take."""
    k = f.columns
    out = np.zeros((len(k), len(TERMS)))
    for kind in kinds:
        _fill_times(out, f, p, kind)
    rest: dict[str, Array | float] = {
        "walk": np.ceil(_longest(f, p) / 32) ** POWER, "steps": k.batch * _steps(f),
        "lookups": k.count, "bags": k.batch, "tables": 1.0,
        "over32": k.dim > 32, "over64": k.dim > 64, "over128": k.dim > 128, "size": k.size,
        "weights": k.size * k.dim * k.width, "long": f.long, "touched": k.distinct * f.row, "columns": k.count * k.dim,
        "again": f.again, "near": f.near, "distinct": k.distinct, "half": k.width < 4, "adaptive": f.adaptive,
        "varied": f.varied,
    }  # fmt: skip
    for name, column in rest.items():
        out[:, AT[name]] = column
    return out


def _fill_times(out: Array, f: LookupTraffic, p: Params, kind: int | Array) -> None:
    """Fill in the columns of one kind of kernel, or of a kind for each table."""
    table = np.arange(len(f.columns))
    for name, first in (("warm", 0.0), ("cold", 1.0)):
        missed = f.again + first * f.columns.distinct
        step = _step(f, p, missed, kind)
        out[table, AT[f"{name}0"] + kind] = _table_forward(f, p, missed, step, kind)
        chain = (_longest(f, p) * step + p["bag"]) / MICRO
        out[table, AT[f"{name}_chain0"] + kind] = chain**POWER
    out[table, AT["update0"] + kind] = _table_update(f, p, kind)


def _by_kernel(p: Params, name: str, f: LookupTraffic, kind: int | Array) -> Array:
    """A parameter of the compiled kernel that runs: one for each kind and width of weights."""
    given = np.array([[p[f"{name}{k}"], p[f"{name}{k}h"]] for k in KINDS])
    out: Array = given[kind, (f.columns.width < 4).astype(int)]
    return out


def _longest(f: LookupTraffic, p: Params) -> Array:
    """Lookups of a table's longest bag."""
    pooling = f.columns.pooling
    return np.where(f.varied, pooling + p["spread"] * np.sqrt(pooling), pooling)


def _steps(f: LookupTraffic) -> Array:
    """Mean number of steps of 32 lookups that a warp needs for a bag."""
    pooling = f.columns.pooling
    spread = np.where(
        f.varied, np.sqrt(1.5 * pooling), 0.0
    )  # three equal weights with the variance of a Poisson number
    steps = [np.ceil(np.maximum(1.0, pooling + side * spread) / 32) for side in (-1, 0, 1)]
    return np.asarray(np.mean(steps, axis=0))


def _step(f: LookupTraffic, p: Params, missed: Array, kind: int | Array) -> Array:
    """Seconds that a lookup adds to the chain of its bag. Bags that share a warp wait for each other's misses."""
    k, together = f.columns, p["together"] * 32 / LANES[kind]
    far, near = (1 - (1 - np.clip(m / np.maximum(1.0, k.count), 0, 1)) ** together for m in (missed, f.near))
    pace = _by_kernel(p, "pace", f, kind)
    read = p["own"] + near * p["l2"] + far * (p["miss"] + p["miss_byte"] * k.dim * k.width)
    return np.asarray(pace * read + p["more_columns"] * (np.ceil(k.dim / 128) - 1))


def _table_forward(f: LookupTraffic, p: Params, missed: Array, step: Array, kind: int | Array) -> Array:
    k = f.columns
    pooled = k.pooling + np.where(f.varied, SHARED[kind] * np.sqrt(k.pooling), 0.0)
    warps = _by_kernel(p, "warps", f, kind)
    chains = k.batch * LANES[kind] / 32 * (pooled * step + p["bag"]) / warps
    memory = missed * f.row * p["memory"] + k.batch * k.dim * 4 * p["output"]
    return _soft(p["soft"], chains, memory, f.near * f.row * p["through"])


def _table_update(f: LookupTraffic, p: Params, kind: int | Array) -> Array:
    """Rows used little by warps, the others by thread blocks; both sum the gradients of a row's uses."""
    k = f.columns
    row, short, long = (np.array([p[f"{name}{i}"] for i in KINDS])[kind] for name in ("row", "short", "long"))
    extra = np.where(k.width < 4, p["row_half"], 1.0) * np.where(f.adaptive, p["row_adaptive"], 1.0)
    summed, more = k.dim * 4 * p["gradient"], np.ceil(k.dim / 128) - 1
    warps = f.short_rows * (row * extra + k.dim * k.width * 2 * p["update"])
    warps = warps + f.short * (short + summed + more * p["short_more"])
    blocks = f.long * (long + summed) + (f.long_rows + f.long / BLOCK) * p["block"]
    return np.asarray(warps + blocks)


def _soft(power: float, *parts: Array) -> Array:
    most = np.maximum(1e-15, np.max(parts, axis=0))
    total: Array = most * np.sum([(part / most) ** power for part in parts], axis=0) ** (1 / power)
    return total


# ---- groups, from sums of terms (the last axis)


def kind_of(total: Array) -> Array:
    """Kernel kind of a group, by its widest table."""
    return np.asarray(np.sum([total[..., AT[f"over{w}"]] > 0.5 for w in WIDEST], axis=0))


def of_kind(total: Array, name: str) -> Array:
    start = AT[f"{name}0"]
    out: Array = np.take_along_axis(total[..., start : start + len(KINDS)], kind_of(total)[..., None], axis=-1)
    return out[..., 0]


def _fresh(total: Array, p: Params, cold: bool) -> Array | float:
    """Share of the touched rows not left in the cache by earlier steps: 1 if cold."""
    if cold:
        return 1.0
    touched = np.maximum(1.0, total[..., AT["touched"]])
    share: Array = 1 / (1 + (p["kept"] / touched) ** p["kept_power"])
    return share


def index_check_seconds(total: Array, p: Params) -> Array:
    """Seconds of the check of indices."""
    walk = p["check_walk"] * total[..., AT["walk"]] ** (1 / POWER) + p["check_start"]
    work = sum(p[f"check_{n}"] * total[..., AT[n]] for n in ("lookups", "steps", "bags"))
    return np.asarray(p["check_floor"] + np.hypot(walk, work))


def chain_seconds(total: Array, p: Params, cold: bool = False) -> Array:
    """The longest chain of reads, slower where many run at once."""
    share = _fresh(total, p, cold)
    warm, new = (MICRO * of_kind(total, f"{n}_chain") ** (1 / POWER) for n in ("warm", "cold"))
    load = np.minimum(1.0, total[..., AT["bags"]] * LANES[kind_of(total)] / 32 / p["resident"])
    return (warm + share * (new - warm)) * (1 + p["loaded"] * load)


def forward_seconds(total: Array, p: Params, cold: bool = False) -> Array:
    """Forward seconds of a group."""
    share = _fresh(total, p, cold)
    warm, new = of_kind(total, "warm"), of_kind(total, "cold")
    kernel = _soft(p["soft_chain"], warm + share * (new - warm), chain_seconds(total, p, cold))
    return p["forward_floor"] + cold * p["forward_cold"] + index_check_seconds(total, p) + kernel


def backward_seconds(total: Array, p: Params, cold: bool = False) -> Array:
    """Backward seconds of a group, weight update included."""
    lookups = total[..., AT["lookups"]]
    passes = np.ceil(np.log2(np.maximum(2.0, total[..., AT["size"]] + 1)) / RADIX) * (lookups > TILE)
    sort = passes * p["pass"] + lookups * (passes * p["sort"] + p["runs"])
    work = sum(p[f"walk_{n}"] * total[..., AT[n]] for n in ("lookups", "steps", "bags"))
    walk: Array = np.hypot(p["walk"] * total[..., AT["walk"]] ** (1 / POWER), work)
    blocks = p["blocks"] * (total[..., AT["long"]] > 0.5)
    start = p["backward_floor"] + cold * p["backward_cold"]
    return np.asarray(start + sort + walk + blocks + of_kind(total, "update"))


# ---- What the lookups of tables move: rows from memory, from L2, from the cache of an SM; rows by how they are upda

SECTOR = 32.0  # bytes: the least that is read
LONG = 5  # the first bin of rows that thread blocks update instead of warps: 32 uses


@dataclass(frozen=True)
class LookupTraffic:
    """Memory traffic of each table's lookups, one entry per table."""

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
    """Memory traffic of a batch's lookups, with caches of `cache` bytes (L2) and `own_cache` bytes on each of `sms`."""
    row = SECTOR * np.ceil(k.dim * k.width / SECTOR)
    long = np.minimum(k.count, (k.rows * k.uses)[:, LONG:].sum(axis=1))
    return LookupTraffic(
        k, row, _again(k, p["cache"] / row), _near(k, p["own_cache"] / row, p["sms"]), long,
        k.rows[:, LONG:].sum(axis=1), np.broadcast_to(adaptive, len(k)), np.broadcast_to(varied, len(k)),
    )  # fmt: skip


def characteristic_time(rows: Array, uses: Array, held: Array) -> Array:
    """Characteristic time (Che's approximation), in batches, of tables [tables, bins] in a cache of `held` rows."""
    low, high = np.full(len(held), 1e-9), np.full(len(held), 1e6)
    for _ in range(30):
        middle = np.sqrt(low * high)
        over = (rows * -np.expm1(-uses * middle[:, None])).sum(axis=1) > held
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return low


def _again(k: TableArrays, held: Array) -> Array:
    gone = np.exp(-k.uses * characteristic_time(k.rows, k.uses, held)[:, None])
    missed: Array = (k.rows * (k.uses - 1) * gone).sum(axis=1)
    return np.where(k.distinct <= held, 0.0, missed)


def _near(k: TableArrays, held: Array, sms: float) -> Array:
    """Each SM sees its share of a row's uses; the first there misses."""
    uses = k.uses / sms
    first = -sms * np.expm1(-uses)
    gone = np.exp(-uses * characteristic_time(k.rows, uses, held)[:, None])
    missed: Array = (k.rows * (first + (k.uses - first) * gone)).sum(axis=1)
    return np.minimum(missed, k.count)


# ---- What the law leaves, learned: a smooth function of a group's features (kernel ridge regression, Matern 3/2).

LENGTH = 1.0  # scale of the smooth function, in features
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
        parts = [matern(rows[i : i + CHUNK], self.points) @ self.weights for i in range(0, len(rows), CHUNK)]
        return np.exp(self.median + np.concatenate([*parts, np.zeros(0)])).reshape(x.shape[:-1])

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LookupCorrection:
        arrays = {n: np.array(value[n], float) for n in ("center", "scale", "points", "weights")}
        return LookupCorrection(**arrays, median=float(value["median"]))


def matern(a: Array, b: Array) -> Array:
    square = np.maximum(0.0, (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T)
    distance = np.sqrt(square * (3 / a.shape[1] / LENGTH**2))
    return np.asarray((1 + distance) * np.exp(-distance))


def correction_features(total: Array, p: Mapping[str, float]) -> Array:
    """Features of table groups from the sums of their tables' terms: sizes, cache sharing, kernels that run."""
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
