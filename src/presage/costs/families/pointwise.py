"""Elementwise ops: one output element from the elements at the same place of each input.

Law: the distinct bytes of the inputs and the bytes of the output over the bandwidth; or, where tensors do not lie
alike, the arithmetic that finds each element's place, which grows with the loops left once neighbours are joined
(`loops`): 2 to 5 ps an element on an H200, more with a cast. Features: which op, and for each tensor its size, type,
layout and length of runs (contiguous tensors get vectorised kernels, others do not); the loops.
"""

from __future__ import annotations

from math import prod

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, codes, flat, ln, moved_law, plain_features
from presage.costs.families.loops import elementwise_loops
from presage.costs.rates import Rates

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
# Seconds of an SM for an element whose place is computed: whatever it is, for each loop, for a cast.
PLACED, PLACED_LOOP, PLACED_CAST = 2.3e-10, 5.0e-11, 2.8e-10
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
    return elements, max((_rank(t) for t in call.sized), default=(0, 4))[1]


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
    moved = moved_law(sum(t.distinct for t in call.sized), elements * width, rates)
    regime = _regime(call, elements, width)
    if regime < STRIDED:
        return moved
    loops = len(elementwise_loops(broadcast(call), call.sized))
    each = PLACED + PLACED_LOOP * loops + (PLACED_CAST if regime > STRIDED else 0.0)
    return Law(max(moved.seconds, rates.floor + elements * each / rates.sms), 0.0, moved.bytes)


def features(call: Call, law: Law) -> list[float]:
    elements, width = output(call)
    code = CODES.get(canonical(call.name), -1.0)
    loops = elementwise_loops(broadcast(call), call.sized)
    inner = loops[0] if loops else None
    strides = [float(min(s, 64)) for s in (inner.strides if inner else ())]
    return [
        *plain_features(call, law, code, 3, elements, _ordered(call)), float(width), float(call.name.endswith("_")),
        _regime(call, elements, width), ln(elements), float(len(loops)), ln(inner.size if inner else 1),
        *(*strides, 0.0, 0.0)[:2], ln(loops[1].size if len(loops) > 1 else 1),
    ]  # fmt: skip


def _ordered(call: Call) -> list[Shape]:
    """The tensors, those that are broadcast last, whichever side of the op they are on."""
    return flat(sorted(call.sized, key=lambda t: -t.distinct // t.width))


STRIDED = 2.0


def _regime(call: Call, elements: int, width: int) -> float:
    """Which kernel: 0 vectorised, 1 one long row with casts, 2 strided or broadcast, 3 that with casts."""
    sized = [t for t in call.sized if t.elements > 1]
    mixed = len({t.dtype for t in sized}) > 1 or (bool(sized) and sized[0].width != width)
    same = all((t.sizes, t.strides) == (sized[0].sizes, sized[0].strides) for t in sized)
    plain = same and all(t.is_dense and t.elements == elements for t in sized)
    return float(mixed) + (0.0 if plain else STRIDED)


def works(call: Call) -> bool:
    """Whether elements are worked on, not only moved."""
    return canonical(call.name) not in MOVES


OPS = frozenset([*CODES, *(f"{n}_" for n in CODES), *ALIKE, *(f"{n}_" for n in ALIKE)])
FAMILY = KernelFamily("pointwise", OPS, law, features, rounds=900, leaves=47, works=works)
