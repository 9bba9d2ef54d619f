"""Embedding lookups and their gradients, and gathers of whole rows: what they cost depends on how rows repeat.

Law: forward, the looked-up rows (those that repeat, once) and the result over the bandwidth; backward, the sort of the
indices, the gradient read, the distinct rows written. Where nothing is known of the indices they count as uniform.
"""

from __future__ import annotations

from math import exp, log

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, codes, ln, moved_law, plain_features
from presage.costs.rates import Rates

__all__ = ["FAMILY", "Lookup", "lookup"]

from typing import NamedTuple

CODES = codes("_embedding_bag _embedding_bag_dense_backward embedding_dense_backward gather index_select embedding "
              "_embedding_bag_forward_only".split())  # fmt: skip
GRADIENTS = ("aten::_embedding_bag_dense_backward", "aten::embedding_dense_backward")


class Lookup(NamedTuple):
    count: int  # indices
    rows: int  # of the table
    dim: int
    bags: int
    width: int
    distinct: float
    most: float


def lookup(call: Call) -> Lookup:
    name, t = call.name, call.tensors
    if name == "aten::_embedding_bag_dense_backward":
        parts = (t[1].elements, int(call.number(5)), t[0].sizes[-1], t[0].sizes[0], t[0].width)
    elif name == "aten::embedding_dense_backward":
        parts = (t[1].elements, int(call.number(2)), t[0].sizes[-1], t[1].elements, t[0].width)
    elif name in ("aten::_embedding_bag", "aten::_embedding_bag_forward_only"):
        parts = (t[1].elements, t[0].sizes[0], t[0].sizes[-1], t[2].elements, t[0].width)
    else:
        x, index = t[0], next((s for s in t[1:] if s.dtype in ("int64", "int32")), t[-1])
        dim = x.elements // max(1, x.sizes[0])
        count = index.sizes[0] if index.sizes else 1
        if index.elements and index.distinct == index.nbytes and len(index.sizes) > 1:  # one index for each element
            count, dim = index.elements, 1
        parts = (count, x.sizes[0], dim, count, x.width)
    count, rows = parts[0], max(1, parts[1])
    distinct = call.facts.get("distinct") or rows * (1 - exp(-count / rows))
    return Lookup(*parts, distinct, call.facts.get("most") or _most(count, rows))


def _most(count: int, rows: int) -> float:
    """How often the most frequent row comes when all are equally likely, about."""
    mean = count / rows
    return max(1.0, mean + (2 * mean * log(rows + 1)) ** 0.5)


def law(call: Call, rates: Rates) -> Law:
    k = lookup(call)
    row = k.dim * k.width
    if call.name in GRADIENTS:
        sort = 24.0 * 8 * k.count / 8
        return moved_law(sort + k.count * row, 2 * k.distinct * row, rates, 20)
    return moved_law(8.0 * k.count + min(k.distinct, k.count) * row, k.bags * row, rates, 2)


def features(call: Call, law: Law) -> list[float]:
    k = lookup(call)
    return [
        *plain_features(call, law, CODES[call.name], 1), ln(k.count), ln(k.rows), float(k.dim), ln(k.bags),
        ln(k.count / max(1, k.bags)), ln(k.distinct), ln(k.count / max(1.0, k.distinct)), ln(k.most), ln(k.rows * k.dim * k.width),
        float(k.count <= 3072), ln(k.distinct * k.dim * k.width), ln(k.count * k.dim * k.width), call.number(7) if "bag" in call.name else 0.0,
    ]  # fmt: skip


FAMILY = Family("embedding", frozenset(CODES), law, features, rounds=800, leaves=31)
