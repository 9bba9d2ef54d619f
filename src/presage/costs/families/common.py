"""Kernel families: a family is a law (seconds from bytes and FLOPs) and the features of its correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from typing import Any, NamedTuple

from presage.costs.call import Call, Shape
from presage.costs.rates import Rates
from presage.files.reading import shipped_toml
from presage.hardware import Gpu


class Law(NamedTuple):
    """The physical estimate of a call."""

    seconds: float
    flops: float
    bytes: float
    launches: float = 1.0  # about how many


@dataclass(frozen=True)
class KernelFamily:
    """One kind of kernels. `features` has the same length for every call; the trees correct `law`."""

    name: str
    ops: frozenset[str]
    law: Callable[[Call, Rates], Law]
    features: Callable[[Call, Law], Sequence[float]]
    rounds: int = 600
    leaves: int = 31
    rate: float = 0.05  # of learning
    least: int = 8  # rows of a leaf
    told: int | None = None  # whether the library was asked; what it told are all features after this one
    uneven: bool = False  # kernels jump from size to size: fitted again, bound wide
    bound: float = 0.1  # of ln(measured / law), beyond which an outlier pulls no harder; more where laws are rough
    computes: bool = False  # waits for its inputs, then works at the clock's pace; others stream
    parts: Callable[[Call], list[Call]] = lambda call: [call]  # the calls that an op is the sum of
    works: Callable[[Call], bool] = lambda _: False  # on every element, which takes power; others only move them
    at_once: Callable[[Call, float], float] = lambda *_: 1.0  # kernels side by side, given how many there are
    cold: Callable[[Law], float] = lambda _: 0.0  # least seconds with a cold cache, where the sweep cannot tell
    from_memory: Callable[[Call, Gpu], float] = lambda *_: 1.0  # share of the law's bytes that this GPU's memory moves


@cache
def fitted_numbers(family: str) -> dict[str, Any]:
    """The fitted numbers of a family's law: its table in data/kernel_laws.toml."""
    table: dict[str, Any] = shipped_toml("kernel_laws.toml")[family]
    return table


def ln(x: float) -> float:
    return log(x) if x > 1e-30 else -70.0


def alignment(n: int, most: int = 64) -> int:
    """The largest power of two up to `most` that divides n."""
    return min(n & -n, most) if n > 0 else most


def power(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (max(1, n).bit_length() - 1)


def shape_features(t: Shape | None, whole: int = 0) -> list[float]:
    """Size, width, kind of layout, length of the runs in memory, and how often each element is used of `whole`."""
    if t is None:
        return [-1.0] * 6
    own = t.distinct // t.width
    order = tuple((n, s) for n, s in t.order if s)
    inner = order[0] if order else (1, 1)
    repeated = own < max(whole, t.elements)
    kind = 2.0 if repeated else 0.0 if t.is_contiguous else 1.0 if t.is_dense else 3.0
    run = inner[0] if inner[1] == 1 else 1
    return [ln(t.distinct), float(t.width), kind, ln(run), float(len(order)), ln(max(whole, t.elements) / max(own, 1))]


def flat(shapes: Sequence[Shape]) -> list[Shape]:
    """The tensors as 1-D rows where all are dense with equal layout, else unchanged."""
    alike = all((t.sizes, t.strides) == (shapes[0].sizes, shapes[0].strides) and t.is_dense for t in shapes)
    return [Shape((t.elements,), (1,), t.dtype) for t in shapes] if alike else list(shapes)


def plain_features(
    call: Call, law: Law, code: float, tensors: int = 3, whole: int = 0, given: Sequence[Shape] | None = None
) -> list[float]:
    """Features common to most families: the op, its law, its tensors, the layout of the largest."""
    shapes = call.sized if given is None else given
    largest = max(shapes, key=lambda t: t.elements, default=None)
    out = [code, ln(law.seconds), ln(law.bytes), float(len(shapes))]
    for place in range(tensors):
        out += shape_features(shapes[place] if place < len(shapes) else None, whole)
    order = largest.order if largest is not None else ()
    inner, second = (*(n for n, _ in order), 1, 1)[:2]
    out += [ln(inner), ln(second), float(len(order)), float(alignment(inner, 16))]
    return out


def codes(names: str | Sequence[str]) -> dict[str, float]:
    """A number for each op, by its full name, from a line or a list of short ones."""
    each = names.split() if isinstance(names, str) else names
    return {f"aten::{name}": float(i) for i, name in enumerate(each)}


def moved_law(read: float, written: float, rates: Rates, kernels: int = 1) -> Law:
    """Bytes over bandwidth, plus the shortest kernel time for each kernel."""
    return Law(kernels * rates.floor + (read + written) / rates.bandwidth, 0.0, read + written)
