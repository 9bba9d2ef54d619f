"""Matrix products: mm, addmm, bmm, baddbmm and their relatives.

Law: the products run in tiles, `sms` of them at a time, so the time is that of whole waves of the best of a few tile
shapes, or that of moving the three matrices, whichever is longer. Features: the sizes, how they divide by tiles and by
powers of two, the layouts, the type of number.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.families.common import Family, Law, alignment, ln
from presage.costs.rates import Rates

__all__ = ["FAMILY", "Product", "product"]

TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64), (128, 192), (192, 128), (64, 256))
KINDS = {"bfloat16": 0.0, "float16": 1.0, "tf32": 2.0, "float32": 3.0, "float64": 4.0}
ADDED = {"aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 2, "aten::baddbmm_": 2, "aten::_addmm_activation": 1,
         "aten::addmv": 1, "aten::addbmm": 2}  # fmt: skip


class Product(NamedTuple):
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


def product(call: Call) -> Product:
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
    return Product(batch, m, n, k, _layout(a), _layout(b), kind, a.width, added)


def _layout(t: Shape) -> int:
    """0 where the last dimension is contiguous, 1 where the one before it is, 2 otherwise."""
    if len(t.strides) < 2 or t.sizes[-1] == 1 or t.strides[-1] == 1:
        return 0
    return 1 if t.sizes[-2] == 1 or t.strides[-2] == 1 else 2


def law(call: Call, rates: Rates) -> Law:
    p = product(call)
    rate = rates.rate(call.tensors[0].dtype if p.added == 0 else call.tensors[1].dtype, p.kind == "tf32")
    waves = min(ceil(p.batch * ceil(p.m / a) * ceil(p.n / b) / rates.sms) * a * b for a, b in TILES)
    moved = p.width * p.batch * (p.m * p.k + p.k * p.n + p.m * p.n)
    seconds = 2 * rates.floor + max(2.0 * waves * rates.sms * p.k / rate, moved / rates.bandwidth)
    return Law(seconds, 2.0 * p.batch * p.m * p.n * p.k, moved)


def features(call: Call, law: Law) -> list[float]:
    p = product(call)
    out = [
        KINDS.get(p.kind, 5.0), float(p.left), float(p.right), float(p.added), ln(p.batch), ln(p.m), ln(p.n), ln(p.k),
        float(alignment(p.m, 16)), float(alignment(p.n, 16)), float(alignment(p.k, 16)), ln(law.flops), ln(law.bytes),
        ln(law.flops / max(law.bytes, 1)), ln(p.batch * p.m * p.n), ln(p.m / p.n), ln(law.seconds),
        float(p.m % 128), float(p.n % 128), float(p.k % 64), ln(min(p.m, p.n)),
    ]  # fmt: skip
    for a, b in TILES:
        waves = p.batch * ceil(p.m / a) * ceil(p.n / b) / 132
        out += [waves / ceil(waves), ln(ceil(waves))]
    return out


OPS = frozenset(
    f"aten::{n}"
    for n in ("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "mv", "addmv", "dot", "_addmm_activation")
)
FAMILY = Family("gemm", OPS, law, features, rounds=1500, leaves=63)
