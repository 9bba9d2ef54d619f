"""Fourier transforms of cuFFT: real to complex, complex to complex and back, over one or more dimensions.

Law: a kernel goes through all numbers once for every so many of the transform's length, since what a block holds is a
few thousand; lengths with large prime factors take more. Time is the bytes of each pass, at a share of the bandwidth.
Features: batch, lengths, their largest prime factor, passes.

Sweep: 1,200 draws of one and two dimensions, both ways.
"""

from __future__ import annotations

from functools import cache
from math import prod

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, codes, ln, moved_law
from presage.costs.rates import Rates

CODES = codes("_fft_r2c _fft_c2c _fft_c2r")
HELD = 8192  # complex numbers that one pass transforms


@cache
def largest_factor(n: int) -> int:
    """The largest prime factor."""
    best, p = 1, 2
    while n > 1:
        while n % p == 0:
            best, n = p, n // p
        p += 1
    return best


def lengths(call: Call) -> tuple[int, ...]:
    """The lengths transformed; of what becomes real its own."""
    sizes = call.tensors[0].sizes
    dims = [int(d) % len(sizes) for d in call.numbers(1)] or [len(sizes) - 1]
    out = [sizes[d] for d in dims]
    if call.name == "aten::_fft_c2r":
        out[-1] = int(call.number(3)) or out[-1]
    return tuple(max(1, n) for n in out)


def passes(call: Call) -> int:
    """Times that all numbers are gone through."""
    return sum(1 if n <= HELD else 2 for n in lengths(call))


def widths(call: Call) -> tuple[int, int]:
    """Bytes of the input and of the result."""
    x, along = call.tensors[0], lengths(call)
    batch = x.elements / max(1, prod(x.sizes[int(d) % len(x.sizes)] for d in call.numbers(1)))
    whole = int(batch * prod(along))
    half = int(whole / along[-1] * (along[-1] // 2 + 1))
    one_sided = bool(call.number(3)) if call.name == "aten::_fft_r2c" else True
    if call.name == "aten::_fft_r2c":
        return 4 * whole, 8 * (half if one_sided else whole)
    return (8 * half, 4 * whole) if call.name == "aten::_fft_c2r" else (8 * whole, 8 * whole)


def law(call: Call, rates: Rates) -> Law:
    read, written = widths(call)
    more = passes(call) - 1
    return moved_law(float(read + more * (read + written) / 2), float(written * (1 + more / 2)), rates, more + 1)


def features(call: Call, law: Law) -> list[float]:
    along, x = lengths(call), call.tensors[0]
    read, written = widths(call)
    return [
        CODES[call.name], float(len(along)), ln(prod(along)), float(along[-1]), ln(along[0]), float(passes(call)),
        float(max(largest_factor(n) for n in along)), float(alignment(along[-1], 64)), ln(read), ln(written),
        ln(law.seconds), ln(x.elements / max(1, prod(along))), float(x.is_contiguous), call.number(3), call.number(2),
    ]  # fmt: skip


FAMILY = KernelFamily("fft", frozenset(CODES), law, features, rounds=300, leaves=15)
