"""What the kernel models share: a family is a law (seconds from bytes and FLOPs) and the features of its correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.rates import Rates

__all__ = ["Family", "Law", "alignment", "codes", "ln", "moved_law", "plain_features", "shape_features"]


class Law(NamedTuple):
    """The physical estimate of a call."""

    seconds: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Family:
    """One kind of kernels. `features` has the same length for every call; the trees correct `law`."""

    name: str
    ops: frozenset[str]
    law: Callable[[Call, Rates], Law]
    features: Callable[[Call, Law], Sequence[float]]
    rounds: int = 600
    leaves: int = 31


def ln(x: float) -> float:
    return log(x) if x > 1e-30 else -70.0


def alignment(n: int, most: int = 64) -> int:
    """The largest power of two up to `most` that divides n."""
    return min(n & -n, most) if n > 0 else most


def shape_features(t: Shape | None, reference: Shape | None = None) -> list[float]:
    """Size, width, kind of layout, length of the runs in memory."""
    if t is None:
        return [-1.0] * 6
    order = t.order
    inner = order[0] if order else (1, 1)
    if t.is_contiguous:
        kind = 0.0
    elif t.is_dense:
        kind = 1.0
    elif any(s == 0 and n > 1 for n, s in zip(t.sizes, t.strides, strict=False)):
        kind = 2.0
    else:
        kind = 3.0
    smaller = ln(reference.elements / t.elements) if reference is not None and t.elements else 0.0
    run = inner[0] if inner[1] == 1 else 1
    return [ln(t.distinct), float(t.width), kind, ln(run), float(len(order)), smaller]


def plain_features(call: Call, law: Law, code: float, tensors: int = 3) -> list[float]:
    """What most families use: which op, its law, its tensors, the ends of the largest one, its first numbers."""
    largest = max(call.tensors, key=lambda t: t.elements, default=None)
    out = [code, ln(law.seconds), ln(law.bytes), float(len(call.tensors))]
    for place in range(tensors):
        out += shape_features(call.tensors[place] if place < len(call.tensors) else None, largest)
    sizes = largest.sizes if largest is not None and largest.sizes else (1,)
    out += [ln(sizes[0]), ln(sizes[-1]), ln(sizes[-2] if len(sizes) > 1 else 1), float(len(sizes))]
    out += [float(alignment(sizes[-1], 16)), ln(largest.elements if largest is not None else 1)]
    numbers = [float(v) for v in call.inputs if isinstance(v, (bool, int, float))][:3]
    return out + numbers + [0.0] * (3 - len(numbers))


def codes(names: Sequence[str]) -> dict[str, float]:
    """A number for each op, in-place and plain ones alike."""
    return {f"aten::{name}": float(i) for i, name in enumerate(names)}


def moved_law(read: float, written: float, rates: Rates, kernels: int = 1) -> Law:
    """Bytes over bandwidth, and the shortest time of so many kernels."""
    return Law(kernels * rates.floor + (read + written) / rates.bandwidth, 0.0, read + written)
