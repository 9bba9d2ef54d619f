"""Running sums, products and maxima along one dimension.

Law: a row's numbers follow one another, so many nanoseconds each, whichever the dimension is (along another than the
fastest a thread goes down a column, and waits for memory each time); many rows keep the SMs busy at a pace of so much a
number and so much a row; or the bytes set the time. One row alone is scanned by all SMs.

Sweep: 3,700 draws along the fastest and other dimensions.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates

CODES = codes("cumsum cumprod _logcumsumexp _cummax_helper _cummin_helper logcumsumexp cummax cummin")
ALIKE = {f"aten::{a}": f"aten::{b}" for a, b in {
    "_cummin_helper": "_cummax_helper", "cummin": "_cummax_helper", "cummax": "_cummax_helper",
    "logcumsumexp": "_logcumsumexp",
}.items()}  # fmt: skip
COMPARING = ("aten::_cummax_helper",)
PLACE = {"aten::_cummax_helper": 3, "aten::_cummin_helper": 3}  # of the dimension among the inputs, where it is not 1
# Seconds from one number to the next along the fastest dimension and along others, and of an SM for a number.
PACES = {
    "aten::cumsum": (40e-9, 165e-9, 2.1e-9), "aten::cumprod": (40e-9, 165e-9, 2.1e-9),
    "aten::_logcumsumexp": (170e-9, 290e-9, 1.0e-8), "aten::_cummax_helper": (65e-9, 230e-9, 4.6e-9),
}  # fmt: skip
STEP, TOGETHER = (
    1e-6,
    0.55,
)  # seconds of a block of 512 threads for a step, and how much of one more block of an SM shows
MISS, CACHED, SECTOR = (
    5.5e-7,
    5e7,
    32,
)  # seconds for a number that is not in the cache, its bytes, and those read at once
ROW = 6.4e-8  # seconds of an SM for a row


class ScanCall(NamedTuple):
    """Sizes before, along and behind the dimension. Only the last dimension has blocks that scan rows together, even
    where all behind another are of size 1."""

    name: str
    before: int
    length: int
    behind: int
    last: bool

    @property
    def rows(self) -> int:
        return self.before * self.behind

    @property
    def alone(self) -> bool:
        """Whether one row is scanned by all SMs."""
        return self.rows == 1 and self.name not in COMPARING


class Blocks(NamedTuple):
    launched: int
    threads: int
    steps: int  # one after the other


def scan_call(call: Call) -> ScanCall:
    x = call.tensors[0]
    dim = int(call.number(PLACE.get(call.name, 1))) % max(1, len(x.sizes)) if x.sizes else 0
    sizes = (prod(x.sizes[:dim]), (x.sizes[dim] if x.sizes else 1), prod(x.sizes[dim + 1 :]))
    return ScanCall(ALIKE.get(call.name, call.name), *sizes, dim >= len(x.sizes) - 1)


def blocks(s: ScanCall) -> Blocks:
    """Along the last dimension 512 threads a block, in rows and columns about as the tensor has them, two numbers each
    (where it has 1024 times more rows than columns PyTorch's difference of logarithms wraps around: a block a row);
    along others a thread a column."""
    if not s.last:
        threads = min(512, s.behind)
        return Blocks(s.before * ceil(s.behind / threads), threads, s.length)
    shape = 9 + (s.length - 1).bit_length() - (s.rows - 1).bit_length()
    across = 1 << (max(4, min(9, shape // 2)) if shape >= 0 else 9)
    return Blocks(ceil(s.rows * across / 512), across, ceil(s.length / (2 * across)))


def chain(s: ScanCall, width: int, sms: int) -> float:
    """Seconds of the steps that follow one another."""
    near, far, _ = PACES[s.name]
    b = blocks(s)
    if s.last:
        return b.steps * STEP * near / PACES["aten::cumsum"][0] * max(1.0, TOGETHER * b.launched / sms)
    missed = max(0.0, 1 - CACHED / (2.0 * width * s.rows * s.length)) * min(1.0, s.behind * width / SECTOR)
    return s.length * ((far if s.behind > 1 else near) + missed * MISS)


def law(call: Call, rates: Rates) -> Law:
    x, s = call.tensors[0], scan_call(call)
    more = 8.0 * x.elements if s.name in COMPARING else 0.0  # indices
    moved = moved_law(float(x.nbytes), float(x.nbytes) + more, rates)
    if s.alone:
        return Law(moved.seconds + rates.floor, 0.0, moved.bytes, 2.0)
    pace = PACES[s.name][2]
    busy = max(x.elements * pace if s.behind == 1 else 0.0, s.rows * ROW / (32 if s.behind > 1 else 1)) / rates.sms
    seconds = max(chain(s, x.width, rates.sms), 0.0 if s.last else busy)
    return Law(max(moved.seconds, rates.floor + seconds), 0.0, moved.bytes)


def features(call: Call, law: Law) -> list[float]:
    s, width = scan_call(call), call.tensors[0].width
    b, pace = blocks(s), PACES[s.name][2]
    serial, busy = chain(s, width, REFERENCE_SMS), s.rows * s.length * pace / REFERENCE_SMS
    waves = b.launched * (512 if s.last else max(32, b.threads)) / (REFERENCE_SMS * 2048)
    return [
        *plain_features(call, law, CODES[s.name], 1), ln(s.before), ln(s.length), ln(s.behind), float(s.last),
        float(s.rows == 1), ln(s.rows), ln(s.before * ceil(s.behind / 512)), float(min(s.behind, 512)),
        float(alignment(s.length, 256)), ln(serial / law.seconds), ln(busy / law.seconds), ln(law.bytes / law.seconds),
        ln(s.rows / REFERENCE_SMS), ln(b.launched), float(b.threads), ln(b.steps), ln(waves), waves / ceil(waves),
        ln(b.steps * ceil(waves) * 1e-7 / law.seconds), ln(b.steps * waves * 1e-7 / law.seconds),
        ln(law.seconds / b.steps), float(s.behind * width),
    ]  # fmt: skip


FAMILY = KernelFamily("scan", frozenset(CODES), law, features, rounds=500, leaves=15, rate=0.08, bound=0.3)
