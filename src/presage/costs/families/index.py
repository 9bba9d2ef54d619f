"""Index, scatter, index_add, index_put: rows moved by index, with or without adding up.

Law: the moved rows read and written over the bandwidth. Features: how many rows, how wide, how often they repeat.
"""

from __future__ import annotations

from math import prod

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, codes, ln, moved_law, plain_features
from presage.costs.rates import Rates

__all__ = ["FAMILY"]

CODES = codes("index _index_put_impl_ scatter_add_ scatter_ index_add_ index_copy_ index_add scatter_add scatter "
              "index_put_ masked_select take index_fill_ masked_scatter_".split())  # fmt: skip
ALIKE = {"aten::index_add": "aten::index_add_", "aten::scatter_add": "aten::scatter_add_", "aten::scatter": "aten::scatter_",
         "aten::index_put_": "aten::_index_put_impl_", "aten::take": "aten::index", "aten::index_fill_": "aten::index_copy_"}  # fmt: skip


def moved(call: Call) -> tuple[int, int]:
    """Elements moved, and indices."""
    x = call.tensors[0]
    indices = [t for t in call.tensors[1:] if t.dtype in ("int64", "int32", "bool")]
    count = max((t.elements for t in indices), default=1)
    if call.name in ("aten::index", "aten::take"):
        places = call.inputs[1] if len(call.inputs) > 1 and isinstance(call.inputs[1], tuple) else ()
        named = [i for i, p in enumerate(places) if p is not None]
        row = prod(n for i, n in enumerate(x.sizes) if i not in named)
        return count * max(1, row), count
    values = call.tensors[-1] if call.tensors[-1].dtype == x.dtype else x
    return values.elements, count


def law(call: Call, rates: Rates) -> Law:
    elements, count = moved(call)
    width = call.tensors[0].width
    passes = 3 if "add" in call.name or "put" in call.name else 2
    return moved_law(8.0 * count + elements * width * (passes - 1), elements * width, rates, 2)


def features(call: Call, law: Law) -> list[float]:
    elements, count = moved(call)
    rows = call.tensors[0].sizes[0] if call.tensors[0].sizes else 1
    distinct = call.facts.get("distinct") or min(count, rows)
    return [
        *plain_features(call, law, CODES[ALIKE.get(call.name, call.name)], 1), ln(elements), ln(count),
        ln(elements / max(1, count)), ln(rows), ln(distinct), ln(count / max(1.0, distinct)), ln(call.facts.get("most", 1.0)),
    ]  # fmt: skip


FAMILY = Family("index", frozenset(CODES), law, features, rounds=500, leaves=23)
