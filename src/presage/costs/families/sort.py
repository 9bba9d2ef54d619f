"""Sort, topk, nonzero, unique, counts of values: whole arrays and arrays of rows.

Law: a sum of parts with fitted weights, by path. Rows of up to 4096 numbers are sorted by one thread block each, padded
to a power of two up to 32 and in 64s of threads above; few longer rows all together and many one by one, in radix
passes of eight bits; topk of short rows by one block a row, else in passes over the bits of the numbers. Counting has
a block add to bins of its own with atomics where they fit, which wait for each other where bins are few, else all add
to the same ones. What is not zero is counted, picked and written down, a place for each dimension.
"""

from __future__ import annotations

from math import ceil

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, codes, ln
from presage.costs.families.embedding import missed
from presage.costs.rates import Rates

CODES = codes(("sort", "topk", "nonzero", "_unique2", "argsort", "unique_dim", "searchsorted", "histc", "bincount"))
ALIKE = {"aten::argsort": "aten::sort", "aten::unique_dim": "aten::_unique2", "aten::searchsorted": "aten::nonzero",
         "aten::histc": "aten::bincount"}  # fmt: skip
OWN_BINS = 6144  # that fit into a block's shared memory
ONE_TILE = 4096  # numbers that one thread block counts
BLOCKS = (32, 128, 1024, 2048, 4096)  # columns that one thread block's kernels are made for

# Weights of the parts below, by least squares of ln(time) over the draws that are not held out.
WEIGHTS: dict[str, tuple[float, ...]] = {
    "sort 32": (3.18, 0.0, 0.0, 1.65, 0.818, 0.539, 90.8, 0.861, 0.121),
    "topk": (0.0, 1.86, 0.155, 0.0, 5.71, 8.65, 23.2, 0.0, 0.0),
    "sort together": (22.7, 2.38, 0.0, 0.127, 0.0, 0.0, 11.8, 3.05, 1.08),
    "nonzero": (4.65, 2.08, 2.13, 0.0, 3.2, 0.0),
    "bincount": (1.34, 3.13, 0.0, 2.74, 0.993, 0.292),
    "bincount, many": (1.08, 5.62, 0.0, 262.0, 59.6, 0.0006),
    "_unique2": (0.0, 3.06, 0.0, 0.0, 2.0, 0.0, 21.9, 2.55, 0.0),
    "topk passes": (0.0, 2.02, 0.0, 2.0, 0.785, 0.0156, 29.3, 0.0328, 0.189),
    "_unique2, one tile": (0.0, 1.36, 0.0, 4.69, 309.0, 0.0, 0.0, 0.0, 0.0),
    "sort block": (3.7, 1.89, 0.851, 1.07, 0.0, 2.23, 0.0, 1.26, 0.0),
    "sort 128": (0.733, 0.712, 0.0, 4.02, 5.04, 2.84, 0.0, 0.0, 0.0),
    "sort segments": (0.0, 7.7, 0.0, 0.0, 3.96, 1.09, 0.0, 7.81, 0.0911),
}


def shape(call: Call) -> tuple[int, int, int]:
    """Rows, columns, bytes of a number."""
    x = call.tensors[0]
    columns = max(1, x.sizes[-1]) if x.sizes else 1
    if call.name not in ("aten::sort", "aten::argsort", "aten::topk"):
        return 1, max(1, x.elements), x.width
    return max(1, x.elements // columns), columns, x.width


def path(call: Call) -> str:
    rows, columns, _ = shape(call)
    name = ALIKE.get(call.name, call.name).removeprefix("aten::")
    if name == "sort":
        if columns <= BLOCKS[-1]:
            return "sort 32" if columns <= 32 else "sort 128" if columns <= 128 else "sort block"
        return "sort segments" if rows > 128 else "sort together"
    if name == "topk":
        return "topk" if columns < 1024 or (rows > 64 and columns < 8192) else "topk passes"
    if name == "bincount":
        return name if bins(call) <= OWN_BINS else f"{name}, many"
    return f"{name}, one tile" if name == "_unique2" and columns <= 2400 else name


def bins(call: Call) -> float:
    """Values that are counted; where nothing tells, as many as numbers."""
    given = call.number(1, 100) if call.name == "aten::histc" else call.facts.get("values", call.number(2))
    return max(1.0, given or call.tensors[0].elements)


def counted(call: Call, rates: Rates) -> list[float]:
    """Bytes; numbers; bins; numbers that wait, all in all and in one thread block."""
    n, width, slot = max(1, call.tensors[0].elements), call.tensors[0].width, rates.floor / rates.sms
    few = min(1.0, 32 / bins(call))
    return [rates.floor, n * width / rates.bandwidth, n * slot / 1024, n * slot / 1024 * few,
            rates.floor * min(1.0, n / 1024) * few, bins(call) * min(1.0, n / ONE_TILE) * slot]  # fmt: skip


def picked(call: Call, rates: Rates) -> list[float]:
    """Parts of nonzero, half of them taken to be so: bytes read, places written, kernels for a tile and for more."""
    x, slot = call.tensors[0], rates.floor / rates.sms
    n, dims = max(1, x.elements), max(1, len(x.sizes))
    return [rates.floor, rates.floor * (n > ONE_TILE), rates.floor * (dims > 1), n * x.width / rates.bandwidth,
            4.0 * n * dims / rates.bandwidth, n * slot / 1024]  # fmt: skip


def parts(call: Call, rates: Rates) -> list[float]:
    name = path(call)
    if name.startswith(("bincount", "nonzero")):
        return (counted if name.startswith("bincount") else picked)(call, rates)
    return _sorting(call, rates)


def _sorting(call: Call, rates: Rates) -> list[float]:
    rows, columns, width = shape(call)
    slot, elements = rates.floor / rates.sms, rows * columns
    moved = elements * width / rates.bandwidth
    passes = width
    block = next((b for b in BLOCKS if columns <= b), BLOCKS[-1]) / 1024
    return [
        rates.floor, rates.floor * width, rows * slot, ceil(rows / rates.sms) * rates.floor * block, passes * moved,
        passes * missed(elements * width, 0.0) / rates.bandwidth, rates.floor * min(columns, 4096) / 4096,
        elements * slot / 1024,
        passes * elements * slot / 1024,
    ]  # fmt: skip


def law(call: Call, rates: Rates) -> Law:
    weights = WEIGHTS[path(call)]
    seconds = sum(w * part for w, part in zip(weights, parts(call, rates), strict=True))
    rows, columns, width = shape(call)
    return Law(max(0.5 * rates.floor, seconds), 0.0, 4.0 * rows * columns * width)


def features(call: Call, law: Law) -> list[float]:
    rows, columns, width = shape(call)
    return [
        float(list(WEIGHTS).index(path(call))), float(width), ln(rows), ln(columns), ln(law.seconds),
        ln(rows * columns),
        call.number(1) if call.name == "aten::topk" else 0.0, ln(law.bytes / law.seconds),
        ln(bins(call)) if path(call).startswith("bincount") else -1.0,
        float(len(call.tensors[0].sizes)) if path(call) == "nonzero" else 0.0,
    ]  # fmt: skip


FAMILY = KernelFamily("sort", frozenset(CODES), law, features, rounds=500, leaves=63)
