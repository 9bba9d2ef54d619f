"""Matrix products: mm, addmm, bmm, baddbmm and their relatives.

Law: the product runs in tiles, one to an SM at a time, so its time is that of whole waves of the best of some tile
shapes, each as long as its arithmetic or its loads; long inner dimensions may be split over tiles and added up after.
Or it is the time of moving the three matrices, where that is longer. Tensor cores want rows in memory that start at
multiples of 16 bytes and are several times slower else; what counts is the dimension that is contiguous, so an odd
number of tokens costs nothing forward and much in a weight gradient. Features: the sizes, how they divide by tiles and
by powers of two, the best tile, the layouts, the type of number.

Closed form (`gemm_seconds`), for thousands of plans a second: whole waves of the best of a few tile shapes; a kernel
that keeps its SMs busy between waves hides part of the last one (`smooth`). Few tiles with a long inner dimension are
split along it. Moving the matrices hides behind the arithmetic (`overlap`, a norm's exponent), all but a part of the
stores. Its parameters are fitted by GPU and dtype (data/chips).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, ln
from presage.costs.rates import REFERENCE, Rates

TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64), (128, 192), (192, 128), (64, 256))
# What libraries have, either way round, and the share of an SM's rate that such a tile reaches.
SHAPES = (
    (64, 8), (64, 16), (64, 32), (64, 64), (64, 128), (64, 256), (64, 320), (128, 32), (128, 96), (128, 128),
    (128, 160), (128, 192), (128, 256), (192, 192), (160, 256),
)  # fmt: skip
REACHED = ((128 * 128, 1.0), (128 * 64, 0.9), (64 * 64, 0.7), (0, 0.5))
SPLITS = (1, 2, 4, 8, 16, 32)
STEP = 64  # elements of the inner dimension that a tile takes at once
LOADS = 2.6  # times the memory bandwidth that tiles load from the cache, each piece for two of them
TILE_COST, SPLIT_COST = 1.2e-6, 2e-6  # seconds
UNALIGNED = {2: 0.17, 4: 0.29, 8: 0.33}  # of the rate of tensor cores, by bytes that rows start at multiples of
KINDS = {"bfloat16": 0.0, "float16": 1.0, "tf32": 2.0, "float32": 3.0, "float64": 4.0}
ADDED = {"aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 2, "aten::baddbmm_": 2, "aten::_addmm_activation": 1,
         "aten::addmv": 1, "aten::addbmm": 2}  # fmt: skip


class GemmCall(NamedTuple):
    """[batch, m, k] x [batch, k, n]; a layout is 0 where rows are contiguous, 1 where columns are."""

    batch: int
    m: int
    n: int
    k: int
    left: int
    right: int
    kind: str
    width: int
    added: int  # 0 nothing, 1 a row, 2 a matrix


def gemm_call(call: Call) -> GemmCall:
    first = 1 if call.name in ADDED else 0
    a, b = call.tensors[first], call.tensors[first + 1]
    added = 0
    if first:
        added = 1 if call.tensors[0].elements <= b.sizes[-1] else 2
    kind = "tf32" if a.dtype == "float32" and call.tf32 else a.dtype
    batch, m, k = ([1] * 3 + list(a.sizes))[-3:]
    n = b.sizes[-1] if len(b.sizes) > 1 else 1
    if call.name in ("aten::mv", "aten::addmv", "aten::dot", "aten::vdot"):
        m, k, n = (a.sizes[0] if len(a.sizes) > 1 else 1), a.sizes[-1], 1
    return GemmCall(batch, m, n, k, _layout(a), _layout(b), kind, a.width, added)


def _layout(t: Shape) -> int:
    """0 where the last dimension is contiguous, 1 where the one before it is, 2 otherwise."""
    if len(t.strides) < 2 or t.sizes[-1] == 1 or t.strides[-1] == 1:
        return 0
    return 1 if t.sizes[-2] == 1 or t.strides[-2] == 1 else 2


def rows(p: GemmCall) -> tuple[int, int, int]:
    """Alignment (power of two) of contiguous rows: of the left matrix, of the right one, of all three."""
    left, right = alignment(p.m if p.left else p.k, 16), alignment(p.k if p.right else p.n, 16)
    return left, right, min(left, right, alignment(p.n, 16))


class GemmTiling(NamedTuple):
    """The fastest tiling of a GEMM."""

    seconds: float
    rows: int
    columns: int
    splits: int
    waves: float


def tiling(p: GemmCall, rates: Rates) -> GemmTiling:
    rate = rates.rate("float32" if p.kind == "tf32" else p.kind, p.kind == "tf32") / rates.sms
    if p.kind in ("bfloat16", "float16", "tf32"):
        rate *= UNALIGNED.get(p.width * rows(p)[2], 1.0)
    loads = LOADS * rates.bandwidth / rates.sms
    ways = ((a, b) for one, other in SHAPES for a, b in {(one, other), (other, one)})
    return min(_cut(p, a, b, s, rate, loads, rates) for a, b in ways for s in SPLITS if _may_split(p, a, b, s, rates))


def _may_split(p: GemmCall, a: int, b: int, splits: int, rates: Rates) -> bool:
    tiles = p.batch * ceil(p.m / a) * ceil(p.n / b)
    return splits == 1 or (p.k >= 256 * splits and tiles * splits <= 2 * rates.sms)


def _cut(p: GemmCall, a: int, b: int, splits: int, rate: float, loads: float, rates: Rates) -> GemmTiling:
    waves = p.batch * ceil(p.m / a) * ceil(p.n / b) * splits / rates.sms
    reached = next(share for size, share in REACHED if a * b >= size)
    inner = ceil(p.k / splits / STEP) * STEP
    tile = inner * max(2 * a * b / (rate * reached), (a + b) * p.width / loads) + TILE_COST
    added = SPLIT_COST + 8.0 * p.batch * p.m * p.n * splits / (2 * rates.bandwidth) if splits > 1 else 0.0
    return GemmTiling(ceil(waves) * tile + added, a, b, splits, waves)


def law(call: Call, rates: Rates) -> Law:
    p = gemm_call(call)
    moved = p.width * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    seconds = rates.floor + max(tiling(p, rates).seconds, moved / rates.bandwidth)
    return Law(seconds, 2.0 * p.batch * p.m * p.n * p.k, moved)


def features(call: Call, law: Law) -> list[float]:
    p = gemm_call(call)
    t = tiling(p, REFERENCE)
    out = [
        KINDS.get(p.kind, 5.0), float(p.left), float(p.right), float(p.added), ln(p.batch), ln(p.m), ln(p.n), ln(p.k),
        *(float(n) for n in rows(p)), ln(law.flops), ln(law.bytes),
        ln(law.flops / max(law.bytes, 1)), ln(p.batch * p.m * p.n), ln(p.m / p.n), ln(law.seconds),
        ceil(p.m / 128) * 128 / p.m, ceil(p.n / 128) * 128 / p.n, ceil(p.k / 64) * 64 / p.k,
        ln(law.flops / law.seconds), ln(law.bytes / law.seconds), float(min(p.m, p.n)), ln(p.k / min(p.m, p.n)),
        float(p.width * (p.m if p.left else p.k) % 128), ln(min(p.m, p.n)), float(t.rows), float(t.columns),
        float(t.splits), t.waves / ceil(t.waves), ln(ceil(t.waves)), ln(t.seconds), ln(t.seconds / law.seconds),
        p.m % t.rows / t.rows, p.n % t.columns / t.columns,
    ]  # fmt: skip
    for a, b in TILES:
        waves = p.batch * ceil(p.m / a) * ceil(p.n / b) / REFERENCE.sms
        out += [waves / ceil(waves), ln(ceil(waves))]
    return out


OPS = frozenset(
    f"aten::{n}"
    for n in ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "mv", "addmv", "dot", "_addmm_activation")
)
FAMILY = KernelFamily("gemm", OPS, law, features, rounds=2000, leaves=63, computes=True)


# ---- closed form

Tile = tuple[int, int, float, float]  # rows, columns, seconds by element of the inner dimension, seconds besides
WIDTHS = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
LARGE = 128.0 * 256.0  # elements of a tile that reaches the full rate
MOST_SPLITS, SPLIT_AT = 16.0, 256.0


class GemmShape(NamedTuple):
    """One launch of GEMMs of equal sizes, and the layout of their operands."""

    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1  # of a grouped GEMM: one expert each
    lhs_m_major: bool = False  # x has m contiguous, as in a weight gradient
    rhs_k_major: bool = False  # w has k contiguous, as a linear layer keeps its weights

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups * self.batch


@dataclass(frozen=True, slots=True)
class GemmParameters:
    """Fitted parameters of GEMMs of one dtype on one GPU."""

    menu: tuple[tuple[int, int], ...]  # tiles there are
    reach: float  # of the peak, in large tiles
    small: float  # how much smaller tiles lose
    fixed: float  # seconds of a large tile besides its arithmetic
    fill: float  # elements of the inner dimension that a tile's start costs
    smooth: float  # of the last wave's idle SMs, the part that is made use of
    overlap: float
    bandwidth: float  # of the peak
    store: float  # of the stores' time, the part that nothing hides
    split: float  # seconds that splitting costs
    launch: float  # seconds of the shortest kernel
    unaligned: tuple[float, float, float]  # of the rate, where rows start at multiples of 2, 4, 8 bytes
    turned: float = 1.0  # times the arithmetic, where the left matrix lies across: some tensor cores want it turned


class TileTimes(NamedTuple):
    """Inputs of the GEMM law for one dtype on one GPU, in seconds; fitting compiles the law with it."""

    menu: tuple[Tile, ...]
    sms: int
    bandwidth: float  # bytes/s
    fill: float  # these as in GemmParameters
    smooth: float
    overlap: float
    store: float
    split: float
    launch: float


def tile_times(t: GemmParameters, rate: float) -> tuple[Tile, ...]:
    """The menu with its times, where an SM does `rate` FLOPs a second at most."""
    out = []
    for rows, columns in t.menu:
        share = t.reach / (1 + t.small * max(0.0, 1 / rows + 1 / columns - 1 / 128 - 1 / 256))
        out.append((rows, columns, 2.0 * rows * columns / (rate * share), t.fixed * rows * columns / LARGE))
    return tuple(out)


def gemm_seconds(m: int, n: int, k: int, batch: int, slow: float, moved: float, stored: float, t: TileTimes) -> float:
    """Seconds, with the arithmetic `slow` times slower; `moved` are all bytes, `stored` those of the result."""
    inner = (-(-k // STEP) * STEP + t.fill) * slow
    best = 1e30
    for rows, columns, step, fixed in t.menu:
        count = batch * -(-m // rows) * -(-n // columns)
        seconds = inner * step + fixed
        if count > t.sms:
            whole = -(-count // t.sms)
            seconds *= whole - t.smooth * (whole - count / t.sms)
        elif k > SPLIT_AT:
            ways = t.sms / count if t.sms < count * MOST_SPLITS else MOST_SPLITS
            if ways > k / SPLIT_AT:
                ways = k / SPLIT_AT
            parts = inner * step / ways + fixed + t.split + 4.0 * ways * batch * m * n / t.bandwidth
            if parts < seconds:
                seconds = parts
        if seconds < best:
            best = seconds
    memory = moved / t.bandwidth
    if memory > best:
        memory, best = best, memory
    both: float = best * (1.0 + (memory / best) ** t.overlap) ** (1.0 / t.overlap)
    return t.launch + both + t.store * stored / t.bandwidth


def alignment_factor(s: GemmShape, width: float, shares: tuple[float, float, float]) -> float:
    """How much longer the arithmetic takes on tensor cores for rows that start at odd addresses."""
    odd = (s.m if s.lhs_m_major else s.k) | (s.k if s.rhs_k_major else s.n) | s.n
    at = (odd & -odd) * width
    if at >= 16.0:
        return 1.0
    return 1.0 / shares[2 if at >= 8.0 else 1 if at >= 4.0 else 0]
