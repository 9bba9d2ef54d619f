"""Running sums, products and maxima along one dimension.

Law: a row's numbers follow one another, so many nanoseconds each, whichever the dimension is (along another than the
fastest a thread goes down a column, and waits for memory each time); many rows keep the SMs busy at a pace of so much a
number and so much a row; or the bytes set the time. One row alone is scanned by all SMs.

Sweep: 1,700 draws along the fastest and other dimensions. Held out: geomean 14%, p90 27%.
"""

from __future__ import annotations

from math import ceil, prod

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates

CODES = codes("cumsum cumprod _logcumsumexp _cummax_helper _cummin_helper logcumsumexp cummax cummin")
ALIKE = {f"aten::{a}": f"aten::{b}" for a, b in {
    "_cummin_helper": "_cummax_helper", "cummin": "_cummax_helper", "cummax": "_cummax_helper",
    "logcumsumexp": "_logcumsumexp",
}.items()}  # fmt: skip
PLACE = {"aten::_cummax_helper": 3, "aten::_cummin_helper": 3}  # of the dimension among the inputs, where it is not 1
# Seconds from one number to the next along the fastest dimension and along others, and of an SM for a number.
PACES = {
    "aten::cumsum": (40e-9, 165e-9, 2.1e-9), "aten::cumprod": (40e-9, 165e-9, 2.1e-9),
    "aten::_logcumsumexp": (170e-9, 290e-9, 1.0e-8), "aten::_cummax_helper": (65e-9, 230e-9, 4.6e-9),
}  # fmt: skip
ROW = 6.4e-8  # seconds of an SM for a row


def shape(call: Call) -> tuple[int, int, int]:
    """Sizes before, along and behind the dimension."""
    x = call.tensors[0]
    dim = int(call.number(PLACE.get(call.name, 1))) % max(1, len(x.sizes)) if x.sizes else 0
    return prod(x.sizes[:dim]), (x.sizes[dim] if x.sizes else 1), prod(x.sizes[dim + 1 :])


def law(call: Call, rates: Rates) -> Law:
    x = call.tensors[0]
    before, length, behind = shape(call)
    more = 8.0 * x.elements if "max" in call.name or "min" in call.name else 0.0  # indices
    moved = moved_law(float(x.nbytes), float(x.nbytes) + more, rates)
    if before * behind == 1:
        return Law(moved.seconds + rates.floor, 0.0, moved.bytes, 2.0)
    near, far, pace = PACES[ALIKE.get(call.name, call.name)]
    rows = before * behind
    busy = max(x.elements * pace if behind == 1 else 0.0, rows * ROW / (32 if behind > 1 else 1)) / rates.sms
    return Law(max(moved.seconds, rates.floor + max(length * (far if behind > 1 else near), busy)), 0.0, moved.bytes)


def features(call: Call, law: Law) -> list[float]:
    before, length, behind = shape(call)
    name = ALIKE.get(call.name, call.name)
    near, far, pace = PACES[name]
    serial, busy = length * (far if behind > 1 else near), before * behind * length * pace / REFERENCE_SMS
    return [
        *plain_features(call, law, CODES[name], 1), ln(before), ln(length), ln(behind), float(behind > 1),
        float(before * behind == 1), ln(before * behind), ln(before * ceil(behind / 512)), float(min(behind, 512)),
        float(alignment(length, 256)), ln(serial / law.seconds), ln(busy / law.seconds), ln(law.bytes / law.seconds),
        ln(before * behind / REFERENCE_SMS),
    ]  # fmt: skip


FAMILY = KernelFamily("scan", frozenset(CODES), law, features, rounds=500, leaves=15, rate=0.08, bound=0.3)
