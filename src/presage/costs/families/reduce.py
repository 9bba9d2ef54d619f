"""Reductions over some dimensions, and running sums.

Law: the input's bytes over the bandwidth. Features: how much is kept and how much reduced, and whether the reduced
dimension is the fastest in memory.
"""

from __future__ import annotations

from math import ceil, prod

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates

CODES = codes(
    "sum mean amax argmax linalg_vector_norm var cumsum any max prod all min amin argmin std norm logsumexp var_mean "
    "cumprod"
)
ALIKE = {"aten::amin": "aten::amax", "aten::argmin": "aten::argmax", "aten::min": "aten::max", "aten::all": "aten::any",
         "aten::std": "aten::var", "aten::norm": "aten::linalg_vector_norm", "aten::var_mean": "aten::var",
         "aten::cumprod": "aten::cumsum", "aten::logsumexp": "aten::sum"}  # fmt: skip
SCANS = ("aten::cumsum", "aten::cumprod")
ROW = 0.35e-6  # seconds from one row to the next
PLACE = {"aten::linalg_vector_norm": 2, "aten::norm": 2}  # of the dimensions among the inputs, where it is not 1


def reduced(call: Call) -> tuple[int, ...]:
    """The dimensions reduced over: all, where none are named."""
    x = call.tensors[0]
    named = call.numbers(PLACE.get(call.name, 1))
    dims = tuple(int(d) % max(1, len(x.sizes)) for d in named)
    return dims or tuple(range(len(x.sizes)))


def segments(call: Call) -> list[tuple[bool, int]]:
    """The input's dimensions in memory order, fastest first: (is reduced, size) of each stretch."""
    x, dims = call.tensors[0], reduced(call)
    order = sorted((s, i, n) for i, (n, s) in enumerate(zip(x.sizes, x.strides, strict=False)) if n > 1)
    out: list[tuple[bool, int]] = []
    for _, i, n in order:
        if out and out[-1][0] == (i in dims):
            out[-1] = (out[-1][0], out[-1][1] * n)
        else:
            out.append((i in dims, n))
    return out


def law(call: Call, rates: Rates) -> Law:
    """Bytes over bandwidth; a cumulative sum along any but the fastest dimension is serial in rows."""
    x, parts = call.tensors[0], segments(call)
    kept = prod(n for over, n in parts if not over)
    if call.name not in SCANS:
        return moved_law(float(x.distinct), float(kept * x.width), rates)
    moved = moved_law(float(x.distinct), float(x.nbytes), rates)
    if not parts or parts[0][0]:
        return moved
    rows = max((n for over, n in parts if over), default=1)
    return Law(max(moved.seconds, rows * ROW * min(1.0, (kept / 32) ** 0.5)), 0.0, moved.bytes)


def features(call: Call, law: Law) -> list[float]:
    parts = segments(call)
    kept, over = (prod(n for which, n in parts if which is wanted) for wanted in (False, True))
    first, second, third, fourth = (*(n for _, n in parts), 1, 1, 1, 1)[:4]
    name = ALIKE.get(call.name, call.name)
    blocks = kept / REFERENCE_SMS
    return [
        *plain_features(call, law, CODES.get(name, -1.0), 1), ln(kept), ln(over), float(bool(parts) and parts[0][0]),
        ln(first), ln(second), ln(third), ln(fourth), float(len(parts)), float(first % 32), blocks / ceil(blocks),
        float(alignment(first, 16)),
    ]  # fmt: skip


FAMILY = KernelFamily("reduce", frozenset(CODES), law, features, rounds=800, leaves=31)
