"""Embedding lookups and their gradients, and gathers of whole rows: what they cost depends on how rows repeat.

Law: a sum of parts with fitted weights, by path. Rows gathered: a thread block for each row, bytes through the L2 cache
and from memory. Bags: 32 columns of a bag a warp, a chain of reads as long as the bag. Gradients: to 3072 indices of a
plain embedding, one kernel that walks over them; else a radix sort in eight passes, partial sums of ten rows each,
thread blocks for as many rows as there could be, and for the most frequent row a chain of its partial sums. Where
nothing is known of the indices they count as uniform.

Sweep: 3,100 draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, expm1, log, sqrt

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, codes, ln
from presage.costs.rates import Rates

CODES = codes(
    (
        "_embedding_bag",
        "_embedding_bag_dense_backward",
        "embedding_dense_backward",
        "gather",
        "index_select",
        "embedding",
        "_embedding_bag_forward_only",
    )
)
BAGS = ("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
GRADIENTS = ("aten::_embedding_bag_dense_backward", "aten::embedding_dense_backward")
CACHE = 30e6  # bytes that stay in the L2 cache while others pass
FEW, ONE_TILE, PARTIAL = 3072, 2400, 10  # indices: without a sort; sorted by one block; in a partial sum
BLOCK = 4096  # bytes of a row that one thread block moves

# Weights of the parts below, by least squares of ln(time) over the draws that are not held out.
WEIGHTS: dict[str, tuple[float, ...]] = {
    "rows": (0.906, 0.425, 0.063, 0.627, 0.789, 0.0, 0.0, 0.0584),
    "walked": (1.03, 2.21, 2.44, 0.00265, 1.04, 3.24, 0.366),
    "bags": (1.78, 0.785, 0.0297, 0.00627, 0.0774, 0.101, 0.00336, 0.0, 0.0, 0.569),
    "bags summed, one tile": (
        21.8,
        15.2,
        0.0,
        0.0,
        0.156,
        0.0143,
        0.0188,
        0.00296,
        0.0,
        0.0,
        2.86,
        0.0305,
        0.000338,
        0.231,
    ),
    "bags summed": (62.2, 1.98, 0.454, 0.0, 0.0952, 0.0172, 0.0147, 0.00421, 1.03, 4.07, 0.0, 0.0445, 0.000888, 0.0),
    "atomic": (62.3, 1.16, 0.0, 0.0, 0.0, 0.0196, 0.0709, 0.00225, 0.159, 0.0, 0.0, 0.0109, 0.000186, 0.0475),
    "summed": (63.1, 0.587, 0.0, 0.0, 0.106, 0.00113, 0.0371, 0.00367, 0.182, 2.37, 1.1, 0.0312, 0.0019, 0.0),
    "few rows": (0.855, 0.282, 0.179, 0.0, 8.89),
    "elements": (1.25, 2.29, 0.000135, 0.201, 0.692, 2.56, 0.0, 2.43),
}


@dataclass(frozen=True)
class EmbeddingLookup:
    count: int  # indices
    rows: int  # of the table
    dim: int
    bags: int
    width: int
    distinct: float
    most: float


def lookup(call: Call) -> EmbeddingLookup:
    name, t = call.name, call.tensors
    if name == "aten::_embedding_bag_dense_backward":
        parts = (t[1].elements, int(call.number(5)), t[0].sizes[-1], t[0].sizes[0], t[0].width)
    elif name == "aten::embedding_dense_backward":
        parts = (t[1].elements, int(call.number(2)), t[0].sizes[-1], t[1].elements, t[0].width)
    elif name in BAGS:
        parts = (t[1].elements, t[0].sizes[0], t[0].sizes[-1], t[2].elements, t[0].width)
    else:
        parts = _gather(call)
    return EmbeddingLookup(*parts, *repeats(call, parts[0], max(1, parts[1])))


def _gather(call: Call) -> tuple[int, int, int, int, int]:
    x = call.tensors[0]
    index = next((s for s in call.tensors[1:] if s.dtype in ("int64", "int32")), call.tensors[-1])
    rows = x.sizes[0] if x.sizes else 1
    count, dim = (index.sizes[0] if index.sizes else 1), x.elements // max(1, rows)
    if call.name == "aten::embedding":
        count = index.elements
    elif index.elements and index.distinct == index.nbytes and len(index.sizes) > 1:  # one index for each element
        count, dim = index.elements, 1
    return count, rows, dim, count, x.width


def repeats(call: Call, count: int, rows: int) -> tuple[float, float]:
    """Distinct rows looked up and uses of the most frequent one; those of uniform indices where unknown."""
    distinct = call.facts.get("distinct") or -rows * expm1(-count / rows)
    return max(1.0, distinct), call.facts.get("most") or _most(count, rows)


def _most(count: int, rows: int) -> float:
    """How often the most frequent row comes when all are equally likely, about."""
    mean = count / rows
    if mean > 3:
        return mean + sqrt(2 * mean * log(rows + 1))
    k, expected = 1.0, float(count)
    while expected > 1 and k < 40:  # rows that come k times: about count * mean^(k-1) / k!
        expected *= mean / (k + 1)
        k += expected > 0.7
    return k


def missed(touched: float, again: float) -> float:
    """Bytes from memory: those touched if they do not fit into the cache, and as many of the repeats as are gone."""
    return touched + again * (1 - CACHE / touched) if touched > CACHE else 0.0


def far(table: float) -> float:
    """Probability that a table was evicted from the cache since its last use, its gradient streaming all of it."""
    return 1 / (1 + (CACHE / max(1.0, table)) ** 2)


# ---- parts, in seconds before their weights


def gathered(k: EmbeddingLookup, rates: Rates) -> list[float]:
    row = k.dim * k.width
    sectors = 32 * ceil(row / 32)
    blocks = k.count * ceil(row / BLOCK)
    from_memory = missed(k.distinct * sectors, max(0.0, k.count - k.distinct) * sectors)
    return [
        rates.floor, rates.floor * far(k.rows * row), rates.floor * blocks / rates.sms,
        k.count * sectors / rates.bandwidth, from_memory / rates.bandwidth, k.bags * row / rates.bandwidth,
        max(0.0, k.bags * row - CACHE) / rates.bandwidth, rates.floor * min(1.0, k.count * k.dim / 4e3),
    ]  # fmt: skip


def few(k: EmbeddingLookup, rates: Rates) -> list[float]:
    row = k.dim * k.width
    one = rates.floor * k.count
    return [rates.floor, one, one * far(k.rows * row), rates.floor * far(k.rows * row), k.count * row / rates.bandwidth]


def bags(k: EmbeddingLookup, rates: Rates) -> list[float]:
    warps, pool, out = k.bags * ceil(k.dim / 32), k.count / max(1, k.bags), far(k.rows * k.dim * k.width)
    slot = rates.floor / rates.sms
    chain = (pool - 1) * ceil(warps / (rates.sms * 62)) * rates.floor
    steps = k.count * ceil(k.dim / 32) * slot
    sectors = 32 * ceil(k.dim * k.width / 32)
    from_memory = missed(k.distinct * sectors, max(0.0, k.count - k.distinct) * sectors)
    return [
        rates.floor, rates.floor * out, warps * slot, warps * slot * out, chain, chain * out, steps,
        steps * out * min(1.0, k.distinct / max(1, k.count)), from_memory / rates.bandwidth,
        k.bags * k.dim * k.width / rates.bandwidth,
    ]  # fmt: skip


def walked(k: EmbeddingLookup, rates: Rates) -> list[float]:
    slot, row = rates.floor / rates.sms, k.dim * k.width
    return [
        rates.floor, k.count * slot, k.count * slot * far(k.rows * row), k.count * ceil(k.dim / 32) * slot,
        k.count * row / rates.bandwidth, k.most * slot, rates.floor * far(k.rows * row),
    ]  # fmt: skip


def summed(k: EmbeddingLookup, rates: Rates) -> list[float]:
    slot, row, warps = rates.floor / rates.sms, k.dim * k.width, ceil(k.dim / 32)
    partial = k.distinct + max(0.0, k.count - k.distinct) / PARTIAL
    possible, wide = min(k.count, k.rows), ceil(warps / 32)
    chain = k.most / PARTIAL * rates.floor
    sums = 4.0 * partial * k.dim
    return [
        rates.floor, 8 * 32.0 * k.count / rates.bandwidth, 8 * missed(32.0 * k.count, 0.0) / rates.bandwidth,
        (k.count / PARTIAL + possible) * wide * slot, possible * wide * slot, partial * warps * slot,
        k.distinct * warps * slot, k.count * warps * slot, missed(k.bags * row, k.count * row) / rates.bandwidth,
        missed(sums, 0.0) / rates.bandwidth, k.distinct * row / rates.bandwidth * far(k.rows * row), chain,
        chain * min(64, warps), min(PARTIAL, k.most) * rates.floor,
    ]  # fmt: skip


def path(call: Call, k: EmbeddingLookup) -> str:
    if call.name in BAGS:
        return "bags"
    if call.name == "aten::embedding_dense_backward":
        few = k.count <= FEW
        return "walked" if few else "atomic" if k.count > 100 * k.rows else "summed"
    if call.name in GRADIENTS:
        return "bags summed, one tile" if k.count <= ONE_TILE else "bags summed"
    if call.name == "aten::index_select" and k.count <= 16:
        return "few rows"
    if k.dim * k.width % 16:
        return "elements"
    return "rows"


PARTS = {
    "bags": bags, "walked": walked, "atomic": summed, "summed": summed, "bags summed": summed,
    "bags summed, one tile": summed, "elements": gathered, "few rows": few, "rows": gathered,
}  # fmt: skip


def weighed(name: str, k: EmbeddingLookup, rates: Rates) -> float:
    return sum(w * part for w, part in zip(WEIGHTS[name], PARTS[name](k, rates), strict=True))


def law(call: Call, rates: Rates) -> Law:
    k = lookup(call)
    moved = 8.0 * k.count + (k.count + (k.distinct if call.name in GRADIENTS else k.bags)) * k.dim * k.width
    return Law(max(0.5 * rates.floor, weighed(path(call, k), k, rates)), 0.0, moved)


def features(call: Call, law: Law) -> list[float]:
    k = lookup(call)
    row = k.dim * k.width
    return [
        CODES[call.name], float(list(PARTS).index(path(call, k))), ln(law.seconds), ln(law.bytes / law.seconds),
        float(k.dim), float(k.width), ln(k.count), ln(k.count / max(1, k.bags)), ln(k.distinct),
        ln(k.count / k.distinct), ln(k.most), ln(k.most / max(1.0, k.count)), ln(k.rows), ln(k.rows * row),
        ln(k.distinct * row), ln(k.bags * row),
        ln(k.count / max(1, k.rows)), call.number(7) if "bag" in call.name else 0.0,
    ]  # fmt: skip


FAMILY = KernelFamily("embedding", frozenset(CODES), law, features, rounds=800, leaves=31)
