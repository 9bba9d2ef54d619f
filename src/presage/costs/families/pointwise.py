"""Elementwise ops: one output element from the elements at the same place of each input.

Law: a launch, and the root of the sum of squares of what overlaps (`parts`): memory, caches and instructions. Memory
moves the distinct bytes of the inputs and those of the output, and where tensors do not lie alike and more than the L2
holds is read before the next element of a sector is, those again (`reduce.fetched`). Then the arithmetic that finds
each element's place counts, too, which grows with the loops left once neighbours are joined (`loops`). Weights are
fitted by kernel and width (data/kernel_laws.toml), without the sweep `large` and the draws that are held out.

Features: which op, and for each tensor its size, type, layout and length of runs (contiguous tensors get vectorised
kernels, others do not); the loops, and each part's share.

Sweep: 20,700 draws; a fifth are ops on one number, which take 0.9 or 1.2 us by turns.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod, sqrt

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, codes, fitted_numbers, flat, ln, plain_features
from presage.costs.families.loops import Loop, elementwise_loops
from presage.costs.families.reduce import BURST, CACHED, LINE, NEAR, SECTOR, WARP, cut, fetched, units
from presage.costs.rates import REFERENCE, Rates

CODES = codes(
    "neg abs exp log log1p sqrt rsqrt tanh sigmoid sin cos reciprocal erf floor sign relu isneginf gelu silu mish "
    "hardswish softplus elu leaky_relu log_sigmoid_forward hardtanh pow mul add div sub clamp clamp_min gt lt eq ge le "
    "ne maximum minimum gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward mish_backward "
    "hardswish_backward leaky_relu_backward elu_backward softplus_backward hardtanh_backward where masked_fill addcmul "
    "addcdiv lerp native_dropout_backward tril sgn remainder xlogy bitwise_not isnan logical_not "
    "log_sigmoid_backward _prelu_kernel _prelu_kernel_backward triu"
)
COMPARES = frozenset(codes("gt lt eq ge le ne isneginf isnan logical_not logical_and logical_or isinf isfinite"))
MOVES = frozenset(codes("add sub mul neg abs clamp_min threshold_backward where masked_fill maximum gt"))
KERNELS = ("vector", "vector cast", "strided", "strided cast")
NUMBERS = ("float64", "int64")  # types of tensors that Python's numbers become
MASKED = {"aten::where": (0,), "aten::masked_fill": (1,), "aten::native_dropout_backward": (1,)}  # which is a mask
FLOATS = ("float64", "float32", "bfloat16", "float16")


def canonical(name: str) -> str:
    """The op's name without the mark of an in-place op."""
    short = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return ALIKE.get(short, short)


# Ops that run the same kernels but for the arithmetic, which is free.
_ALIKE = {
    "sin": "tan asin", "cos": "acos", "floor": "ceil round trunc frac", "log": "log2 log10 logit special_entr digamma "
    "lgamma", "exp": "expm1 exp2", "tanh": "atan sinh cosh", "erf": "erfc erfinv", "pow": "square atan2 hypot",
    "hardtanh": "relu6 hardsigmoid", "hardtanh_backward": "hardsigmoid_backward", "elu": "selu celu", "sub": "rsub",
    "maximum": "bitwise_and bitwise_or fmax copysign", "minimum": "fmin", "gt": "logical_and logical_or",
    "div": "floor_divide", "remainder": "fmod", "clamp_min": "clamp_max threshold", "sigmoid": "softsign",
    "isneginf": "isinf isfinite", "sigmoid_backward": "logit_backward", "mul": "masked_scale", "xlogy": "logaddexp",
}  # fmt: skip
ALIKE = {f"aten::{other}": f"aten::{one}" for one, others in _ALIKE.items() for other in others.split()}


def alike(call: Call) -> str | None:
    """For an op without a model of its own: one that moves as many tensors."""
    return {1: "aten::exp", 2: "aten::add", 3: "aten::addcmul"}.get(len(call.sized))


def output(call: Call) -> tuple[int, int]:
    """Elements and width of the result."""
    elements = prod(broadcast(call))
    if canonical(call.name) in COMPARES:
        return elements, 1
    if call.name.endswith("_") and call.sized:
        return call.sized[0].elements, call.sized[0].width
    return elements, max((_rank(t) for t in _read(call)), default=(0, 4))[1]


def broadcast(call: Call) -> tuple[int, ...]:
    """Sizes of the result: each dimension as large as the largest input's."""
    longest = max((len(t.sizes) for t in call.sized), default=0)
    padded = [(1,) * (longest - len(t.sizes)) + t.sizes for t in call.sized]
    return tuple(max(n) if 0 not in n else 0 for n in zip(*padded, strict=True))


def _rank(t: Shape) -> tuple[int, int]:
    """Floats before whole numbers before booleans, then by width."""
    return (2 if t.dtype in FLOATS else 1 if t.dtype != "bool" else 0), t.width


def law(call: Call, rates: Rates) -> Law:
    elements, width = output(call)
    moved = float(sum(t.distinct for t in _read(call)) + elements * width)
    fixed, *others = (sum(group) for group in weighted(call, rates))
    return Law(max(0.5 * rates.floor, fixed + sqrt(sum(s * s for s in others))), 0.0, moved, float(_halves(call)))


def weighted(call: Call, rates: Rates) -> list[list[float]]:
    """The parts with the weights of the kernel."""
    elements, width = output(call)
    weights = iter(
        fitted_numbers("pointwise")["weights"][f"{KERNELS[int(_regime(call, elements))]} {2 if width == 2 else 4}"]
    )
    return [[next(weights) * part for part in group] for group in parts(call, rates)]


def parts(call: Call, rates: Rates) -> tuple[list[float], ...]:
    """Seconds before their weights. Fixed: the launches. Memory: bytes read and written, those that the L2 does not
    hold, those read again. Caches: bytes, lines. Instructions: elements, loops of their places, of all tensors."""
    (elements, width), tensors = output(call), _read(call)
    loops = elementwise_loops(broadcast(call), tensors)
    strided = _regime(call, elements) >= STRIDED
    again = [_again(tuple(loops), k, t.width) for k, t in enumerate(tensors)] if strided else []
    read, written = float(sum(t.distinct for t in tensors)), float(elements * width)
    moved = read + written
    full, each = (moved / CACHED) ** 3, elements * 1e-10 / rates.sms
    missed, passed, lines = (elements * sum(n) for n in zip(*again, strict=True)) if again else (0.0, 0.0, 0.0)
    places = len(loops) if strided else 0
    return (
        [rates.floor * _halves(call)],
        [n / rates.bandwidth for n in (read, written, moved * full / (1 + full), missed)],
        [passed / rates.bandwidth, lines * 1e-9 / rates.sms],
        [each, each * places, each * places * len(tensors)],
    )


@lru_cache(4096)
def _again(loops: tuple[Loop, ...], which: int, width: int) -> tuple[float, float, float]:
    """Bytes that an element of one tensor takes beyond its own, from memory and from the L2, and lines of a warp."""
    own = [Loop(n, (strides[which],)) for n, strides in loops]
    elements = float(prod(loop.size for loop in own))
    pieces, distinct = cut(own, elements)[0], prod(n for n, (stride,) in own if stride) / elements
    missed, passed = (fetched(pieces, width, *level) / elements for level in ((BURST, CACHED), (SECTOR, NEAR)))
    lines = units(cut(own, WARP)[0], width, LINE) / WARP
    return max(0.0, missed - distinct * width), max(0.0, passed - distinct * width), lines


def _halves(call: Call) -> int:
    """Launches: one counts places in 32 bits, and larger tensors are cut in halves until they fit."""
    elements, width = output(call)
    most = max([elements * width - width, *(t.distinct - t.width for t in call.sized)])
    return 1 << (max(0, most) // (2**31 - 1)).bit_length()


def _read(call: Call) -> list[Shape]:
    """The tensors read. One without dimensions is a number if it has the type of one, and else read for each element;
    the fourth argument of a clamp with numbers is its result."""
    written = canonical(call.name) == "aten::clamp" and call.shape(3) is not None
    given = call.tensors[:-1] if written else call.tensors
    return [t for t in given if t.sizes or (call.sized and t.dtype not in NUMBERS)]


def features(call: Call, law: Law) -> list[float]:
    elements, width = output(call)
    code = CODES.get(canonical(call.name), -1.0)
    loops = elementwise_loops(broadcast(call), _read(call))
    inner = loops[0] if loops else None
    groups = [sum(group) for group in weighted(call, REFERENCE)]
    strides = [float(min(s, 64)) for s in (inner.strides if inner else ())]
    return [
        *plain_features(call, law, code, 3, elements, _ordered(call)), float(width), float(call.name.endswith("_")),
        _regime(call, elements), ln(elements), float(len(loops)), ln(inner.size if inner else 1),
        *(*strides, 0.0, 0.0)[:2], ln(loops[1].size if len(loops) > 1 else 1),
        *(ln(group / sum(groups) + 1e-6) for group in groups),
    ]  # fmt: skip


def _ordered(call: Call) -> list[Shape]:
    """The tensors, those that are broadcast last, whichever side of the op they are on."""
    return flat(sorted(_read(call), key=lambda t: -t.distinct // t.width))


STRIDED = 2.0


def _regime(call: Call, elements: int) -> float:
    """Which kernel: 0 vectorised, 1 one long row with casts, 2 strided or broadcast, 3 that with casts."""
    tensors = _read(call)
    masks = MASKED.get(canonical(call.name), ())
    kinds = {t.dtype for i, t in enumerate(tensors) if i not in masks}
    casts = len(kinds) > 1 or (kinds == {"int64"} and canonical(call.name) in COMPARES and len(tensors) == 1)
    same = all((t.sizes, t.strides) == (tensors[0].sizes, tensors[0].strides) for t in tensors)
    plain = elements <= 1 or (same and all(t.is_dense and t.elements == elements for t in tensors))
    return float(casts) + (0.0 if plain else STRIDED)


def works(call: Call) -> bool:
    """Whether elements are worked on, not only moved."""
    return canonical(call.name) not in MOVES


OPS = frozenset([*CODES, *(f"{n}_" for n in CODES), *ALIKE, *(f"{n}_" for n in ALIKE)])
FAMILY = KernelFamily("pointwise", OPS, law, features, rounds=900, leaves=47, works=works)
