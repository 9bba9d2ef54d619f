"""Index, scatter, index_add, index_put: rows moved by index, with or without adding up.

Law: a sum of parts with fitted weights, by path. Moving: elements, bytes through the cache and from memory. Adding with
atomics: also a chain as long as the most frequent row is frequent. Adding in order (index_put): a radix sort in as many
passes as row numbers have bytes, then a chain over the repeats of each row. Whole rows that are a multiple of 16 bytes
are gathered as embeddings are. What lies behind a dimension of samples (x[:, i, j]) has weights of its own.

The largest or smallest of each place's numbers (scatter_reduce) has a chain of its records (`compared`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, prod

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, codes, ln
from presage.costs.families.embedding import EmbeddingLookup, far, gathered, missed, repeats
from presage.costs.rates import REFERENCE, Rates

CODES = codes(
    (
        "index",
        "_index_put_impl_",
        "scatter_add_",
        "scatter_",
        "index_add_",
        "index_copy_",
        "index_add",
        "scatter_add",
        "scatter",
        "index_put_",
        "masked_select",
        "take",
        "index_fill_",
        "masked_scatter_",
        "scatter_reduce_",
        "scatter_reduce",
    )
)
ALIKE = {
    "aten::index_add": "aten::index_add_",
    "aten::scatter_add": "aten::scatter_add_",
    "aten::scatter": "aten::scatter_",
    "aten::scatter_reduce": "aten::scatter_reduce_",
    "aten::index_put_": "aten::_index_put_impl_",
    "aten::take": "aten::index",
    "aten::index_fill_": "aten::index_copy_",
    "aten::masked_select": "aten::index",
    "aten::masked_scatter_": "aten::scatter_",
}
ATOMIC, ADDING = ("scatter_add_", "scatter_reduce_"), ("sum", "mean")
ONE_TILE = 2400  # indices that one thread block sorts

# Weights of the parts below, by least squares of ln(time) over the draws that are not held out.
WEIGHTS: dict[str, tuple[float, ...]] = {
    "rows": (0.937, 0.228, 0.0651, 0.278, 0.0, 0.0, 0.449, 0.0413),
    "scatter_": (1.06, 1.53, 0.0934, 1.68, 1.53, 0.0728, 0.00157, 0.094, 0.607, 0.0306),
    "scatter_add_": (1.28, 1.55, 0.0119, 2.45, 1.99, 0.703, 0.0, 0.0, 0.0, 0.0),
    "scatter_reduce_": (0.0, 0.0, 3.49, 1.13, 2.14, 0.0445, 0.0117, 3.92),
    "scatter_reduce_, 16 bits": (25.0, 0.0, 10.3, 3.73, 0.801, 1.49, 0.0374, 1.13),
    "put, narrow": (5.19, 0.0, 0.0, 0.14, 0.0818, 0.0, 0.00138, 0.093, 0.0, 0.0),
    "put": (3.44, 0.224, 0.0, 0.456, 0.0507, 0.000109, 0.0, 0.295, 0.0, 0.0),
    "index_copy_": (1.54, 0.0, 0.0576, 2.06, 0.864, 0.0732, 0.000314, 0.0, 1.15, 0.0171),
    "index_add_": (0.00852, 0.188, 0.72, 0.0, 0.0, 0.235, 0.0, 0.0552, 0.757, 0.072),
    "index_add_, few": (0.0, 0.0, 0.0, 0.0, 0.0, 119.0, 0.0, 0.137, 0.0, 0.317),
    "scatter_add_, 16 bits": (1.04, 0.737, 0.102, 2.81, 0.0, 0.279, 0.0, 0.517, 11.4, 0.112),
    "put, within": (4.48, 0.0, 0.0, 0.121, 0.088, 0.0575, 0.016, 0.00908, 0.334, 0.0),
    "index, within": (1.25, 1.34, 0.389, 0.128, 0.0, 0.0, 0.0, 1.06, 0.0, 0.0),
    "index": (1.25, 1.34, 0.389, 0.128, 0.0, 0.0, 0.0, 1.06, 0.0, 0.0),
}


@dataclass(frozen=True)
class IndexedBytes:
    count: int  # indices
    rows: int  # that an index can name
    before: int  # how often all is done: dimensions before the indexed ones
    columns: int  # elements moved for an index, each time
    width: int
    adds: bool
    distinct: float
    most: float


def moved(call: Call) -> IndexedBytes:
    x = call.tensors[0]
    indices = [t for t in call.tensors[1:] if t.dtype in ("int64", "int32", "bool")] or list(call.tensors[-1:])
    name = ALIKE.get(call.name, call.name)
    if name in ("aten::index", "aten::_index_put_impl_"):
        count, rows, before, columns = _picked(call, x, indices)
    else:
        index, source = indices[0], call.tensors[-1]
        elements = source.elements if source.dtype == x.dtype and source is not x else index.elements
        count = index.sizes[0] if index.sizes else 1
        dim = int(call.number(1)) if x.sizes else 0
        count = index.sizes[dim] if len(index.sizes) == len(x.sizes) and index.sizes else count
        rows, before, columns = (x.sizes[dim] if x.sizes else 1), 1, elements // max(1, count)
    adds = "add" in name or "reduce" in name or (name == "aten::_index_put_impl_" and call.number(3) > 0)
    known = repeats(call, max(1, count), max(1, rows))
    return IndexedBytes(count, max(1, rows), max(1, before), max(1, columns), x.width, adds, *known)


def _picked(call: Call, x: Shape, indices: list[Shape]) -> tuple[int, int, int, int]:
    """Indices, what they name, how often, elements for each; several index tensors go together."""
    places = call.inputs[1] if len(call.inputs) > 1 and isinstance(call.inputs[1], tuple) else ()
    named = [i for i, p in enumerate(places) if isinstance(p, Shape)] or [0]
    count = max((t.elements for t in indices if t.sizes != x.sizes or t.dtype != "bool"), default=1)
    rows = prod(x.sizes[i] for i in named if i < len(x.sizes))
    before = prod(x.sizes[: named[0]]) if named[-1] - named[0] < len(named) else 1
    return max(1, count), rows, before, prod(n for i, n in enumerate(x.sizes) if i not in named) // max(1, before)


# ---- parts, in seconds before their weights


def passed(m: IndexedBytes, rates: Rates) -> list[float]:
    slot, row = rates.floor / rates.sms, m.columns * m.width
    sectors, elements = 32 * ceil(row / 32) * m.before, m.count * m.columns * m.before
    again = max(0.0, m.count - m.distinct) * sectors
    return [
        rates.floor, rates.floor * min(1.0, elements / 4e3), elements * slot / 1024,
        m.count * sectors / rates.bandwidth, missed(m.distinct * sectors, again) / rates.bandwidth, m.most * slot,
        m.most * slot * min(m.columns, 1024), rates.floor * far(m.rows * row),
        elements * slot / 1024 * min(1.0, 4096 / (m.distinct * m.columns)), rates.floor * min(16, m.count),
    ]  # fmt: skip


def put(m: IndexedBytes, rates: Rates) -> list[float]:
    slot, row, warps = rates.floor / rates.sms, m.columns * m.width, ceil(m.columns / 128)
    passes = ceil(max(1.0, log2(m.rows + 1)) / 8) if m.count > ONE_TILE else 0
    every = m.count * m.before
    return [
        rates.floor, passes * rates.floor, (passes > 0) * rates.floor, m.most * rates.floor,
        m.most * rates.floor * min(1.0, warps * m.distinct / rates.sms / 8), m.count * (1 + passes) * slot,
        every * warps * slot, m.distinct * m.before * slot, every * row / rates.bandwidth,
        missed(every * row, 0.0) / rates.bandwidth,
    ]  # fmt: skip


def compared(m: IndexedBytes, rates: Rates) -> list[float]:
    """The largest or smallest of each row's: what is no new record is only read, and of `most` numbers in random order
    ln(most) are records, one waiting for the other."""
    slot, row = rates.floor / rates.sms, m.columns * m.width
    sectors, elements = 32 * ceil(row / 32) * m.before, m.count * m.columns * m.before
    again = max(0.0, m.count - m.distinct) * sectors
    return [
        rates.floor, elements * slot / 1024, m.count * sectors / rates.bandwidth,
        missed(m.distinct * sectors, again) / rates.bandwidth, rates.floor * log2(m.most + 1), m.most * slot,
        m.most * slot * min(m.columns, 1024), rates.floor * log2(1 + m.count / m.distinct),
    ]  # fmt: skip


def whole(m: IndexedBytes, rates: Rates) -> list[float]:
    return gathered(EmbeddingLookup(m.count, m.rows, m.columns, m.count, m.width, m.distinct, m.most), rates)


def path(call: Call, m: IndexedBytes) -> str:
    name = ALIKE.get(call.name, call.name).removeprefix("aten::")
    if m.before > 1 and name in ("index", "_index_put_impl_"):
        return "put, within" if m.adds else "index, within"
    if name == "index":
        lists = call.inputs[1] if len(call.inputs) > 1 else None
        first = isinstance(lists, tuple) and len(lists) == 1
        return "rows" if m.columns * m.width % 16 == 0 and first else "index"
    if name == "_index_put_impl_":
        return "index_copy_" if not m.adds else "put, narrow" if m.columns <= 32 else "put"
    if name == "index_add_" and m.count <= 16:
        return "index_add_, few"
    if name == "scatter_reduce_" and _reduction(call) in ADDING:
        name = "scatter_add_"
    return name + (", 16 bits" if name in ATOMIC and m.width == 2 else "")


def _reduction(call: Call) -> str:
    """The reduction of a scatter_reduce: sum, mean, amax, ...; amax where it is not told."""
    named = call.inputs[4] if len(call.inputs) > 4 else None
    return named if isinstance(named, str) else "amax"


def parts(name: str, m: IndexedBytes, rates: Rates) -> list[float]:
    if name.startswith("scatter_reduce_"):
        return compared(m, rates)
    return (put if name.startswith("put") else whole if name == "rows" else passed)(m, rates)


def law(call: Call, rates: Rates) -> Law:
    m = moved(call)
    name = path(call, m)
    seconds = sum(w * part for w, part in zip(WEIGHTS[name], parts(name, m, rates), strict=True))
    size = 8.0 * m.count + m.count * m.before * m.columns * m.width * (3 if m.adds else 2)
    return Law(max(0.5 * rates.floor, seconds), 0.0, size)


def features(call: Call, law: Law) -> list[float]:
    m = moved(call)
    row, name = m.before * m.columns * m.width, path(call, m)
    shares = [ln(p / law.seconds + 1e-6) for p in parts(name, m, REFERENCE)]
    return [
        float(list(WEIGHTS).index(name)), ln(law.seconds), ln(law.bytes / law.seconds), float(m.width),
        ln(m.columns), ln(m.count), ln(m.distinct), ln(m.count / m.distinct), ln(m.most), ln(m.distinct * row),
        ln(m.rows), ln(m.most / max(1, m.count)), ln(m.count * row), float(len(call.tensors)),
        float(_reduction(call) in ADDING), float(_reduction(call) == "prod"), call.facts.get("settled", 0.0), *shares,
        *[-1.0] * (PARTS - len(shares)),
    ]  # fmt: skip


PARTS = max(map(len, WEIGHTS.values()))
FAMILY = KernelFamily("index", frozenset(CODES), law, features, rounds=800, leaves=63, bound=0.3)
