"""Reductions over some dimensions, and running sums.

Law: the input's bytes over the bandwidth. Features: how much is kept and how much reduced, and whether the reduced
dimension is the fastest in memory.
"""

from __future__ import annotations

from math import prod

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, codes, ln, moved_law, plain_features
from presage.costs.rates import Rates

__all__ = ["FAMILY"]

CODES = codes(
    "sum mean amax argmax linalg_vector_norm var cumsum any max prod all min amin argmin std norm logsumexp var_mean "
    "cumprod"
)
ALIKE = {"aten::amin": "aten::amax", "aten::argmin": "aten::argmax", "aten::min": "aten::max", "aten::all": "aten::any",
         "aten::std": "aten::var", "aten::norm": "aten::linalg_vector_norm", "aten::var_mean": "aten::var",
         "aten::cumprod": "aten::cumsum", "aten::logsumexp": "aten::sum"}  # fmt: skip
PLACE = {"aten::linalg_vector_norm": 2, "aten::norm": 2}  # of the dimensions among the inputs, where it is not 1


def reduced(call: Call) -> tuple[int, ...]:
    """The dimensions reduced over: all, where none are named."""
    x = call.tensors[0]
    found = call.numbers(PLACE.get(call.name, 1))
    dims = tuple(int(d) % max(1, len(x.sizes)) for d in found)
    return dims or tuple(range(len(x.sizes)))


def law(call: Call, rates: Rates) -> Law:
    x = call.tensors[0]
    dims = reduced(call)
    kept = prod(n for i, n in enumerate(x.sizes) if i not in dims)
    written = x.nbytes if call.name in ("aten::cumsum", "aten::cumprod") else kept * x.width
    return moved_law(float(x.distinct), float(written), rates)


def features(call: Call, law: Law) -> list[float]:
    x, dims = call.tensors[0], reduced(call)
    kept = prod(n for i, n in enumerate(x.sizes) if i not in dims)
    over = max(1, x.elements // max(1, kept))
    sizes = [(s, n, i) for i, (n, s) in enumerate(zip(x.sizes, x.strides, strict=False)) if n > 1]
    inner = [n for s, n, i in sizes if i in dims and s == 1]
    first_kept = min((s for s, n, i in sizes if i not in dims), default=0)
    first_over = min((s for s, n, i in sizes if i in dims), default=0)
    outer = prod(n for s, n, i in sizes if i not in dims and s > first_over)
    name = ALIKE.get(call.name, call.name)
    return [
        *plain_features(call, law, CODES.get(name, -1.0), 1), ln(kept), ln(over), ln(inner[0] if inner else 1),
        float(bool(inner)), ln(first_kept + 1), ln(first_over + 1), ln(outer), ln(max(1, kept) / max(1, outer)),
        float(len(dims)),
    ]  # fmt: skip


FAMILY = Family("reduce", frozenset(CODES), law, features, rounds=800, leaves=31)
