"""Copies, fills, factories and views: what CUDA runs inside them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from presage.capture.calls import RecordedCall
from presage.capture.lowering import CallLowering, Rule
from presage.graph.graph import Arg, Ref
from presage.graph.lists import fits_one_foreach_kernel


def copy(b: CallLowering, to: Arg, source: Arg, *, sync: bool = False) -> None:
    written = [to] if isinstance(to, Ref) else []
    b.op("aten::copy_", [to, source, False], written, writes=written, sync=sync)


def fill(b: CallLowering, to: Ref, value: float = 0) -> None:
    """`zero_`: a fill with 0."""
    with b.inside("aten::zero_"):
        b.op("aten::fill_", [to, value], [to], writes=[to], overload="Scalar")


def zeros_like(b: CallLowering, ref: Ref) -> Ref:
    t = b.get(ref)
    with b.inside("aten::zeros_like"):
        b.host("aten::empty_like", ref)
        out = b.new(t.shape, t.dtype)
        fill(b, out)
    return out


def contiguous(b: CallLowering, ref: Arg, strides: Sequence[int] | None = None) -> Arg:
    """`contiguous()`: a copy where the tensor is not laid out so already."""
    if not isinstance(ref, Ref):
        return ref
    t = b.get(ref)
    if _laid_out(t.shape, t.strides, strides) if strides else t.is_contiguous:
        return ref
    with b.inside("aten::contiguous", "aten::clone"):
        out = b.new(t.shape, t.dtype, strides)
        with b.inside("aten::empty_like"):
            b.host("aten::empty")
        copy(b, out, ref)
    return out


def _laid_out(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(n == 1 or s == w for n, s, w in zip(shape, strides, wanted, strict=True))


def _to_copy(b: CallLowering, call: RecordedCall) -> None:
    out: Arg = b.out() if call.outputs else None
    with b.inside("aten::_to_copy"):
        b.host("aten::empty_strided")
        copy(b, out, call.inputs[0], sync=call.sync)


def _copy(b: CallLowering, _: RecordedCall) -> None:
    b.same(kernels=True)


def _clone(b: CallLowering, call: RecordedCall) -> None:
    with b.inside("aten::clone"):
        b.host("aten::empty_like", call.inputs[0])
        copy(b, b.out(), call.inputs[0])


def _filled(*makers: str, zero: bool = True, value: float = 0) -> Rule:
    def rule(b: CallLowering, call: RecordedCall) -> None:
        with b.inside(call.name):
            with b.inside(*makers[:-1]):
                b.host(makers[-1])
            if zero:
                fill(b, b.out())
            else:
                b.op("aten::fill_", [b.out(), value], call.outputs, writes=call.outputs, overload="Scalar")

    return rule


def _zero_(b: CallLowering, _: RecordedCall) -> None:
    fill(b, b.out())


def _random(inner: str) -> Rule:
    def rule(b: CallLowering, call: RecordedCall) -> None:
        with b.inside(call.name):
            b.host("aten::empty")
            b.op(inner, [b.out()], call.outputs, writes=call.outputs)

    return rule


def _arange(b: CallLowering, call: RecordedCall) -> None:
    out = b.get(b.out())
    with b.inside("aten::arange"):
        b.host("aten::empty")
        b.op("aten::arange", [0, 0, 1, b.view(out.storage, (0,), out.dtype)], call.outputs, overload="start_out")


def _viewed_by(*names: str) -> Rule:
    def rule(b: CallLowering, call: RecordedCall) -> None:
        with b.inside(call.name, *names[:-1]):
            b.op(names[-1], [call.inputs[0]], call.outputs[:1], kernels=False)

    return rule


def _many_views(*names: str) -> Rule:
    def rule(b: CallLowering, call: RecordedCall) -> None:
        for out in call.outputs:
            with b.inside(call.name, *names[:-1]):
                b.op(names[-1], [call.inputs[0]], [out], kernels=False)

    return rule


def _padded(b: CallLowering, call: RecordedCall) -> None:
    pads = call.inputs[1]
    assert isinstance(pads, list)
    source = b.get(call.inputs[0])
    with b.inside("aten::constant_pad_nd"):
        if all(isinstance(p, int) and p <= 0 for p in pads):
            with b.inside("aten::clone"):
                b.host("aten::empty_like", call.inputs[0])
                copy(b, b.out(), b.reshaped(call.inputs[0], b.get(b.out()).shape, source.strides))
            return
        b.host("aten::empty")
        b.op("aten::fill_", [b.out(), 0], call.outputs, writes=call.outputs, overload="Scalar")
        for p in pads:
            if p:
                with b.inside("aten::narrow", "aten::slice"):
                    b.host("aten::as_strided")
        inner = b.reshaped(b.out(), source.shape, b.get(b.out()).strides)
        copy(b, inner, call.inputs[0])


def _part_backward(view: str) -> Rule:
    def rule(b: CallLowering, call: RecordedCall) -> None:
        grad = b.get(call.inputs[0])
        whole = b.get(b.out())
        with b.inside(call.name):
            with b.inside("aten::zeros"):
                b.host("aten::empty")
                fill(b, b.out())
            with b.inside(view):
                b.host("aten::as_strided", b.out())
            strides = whole.strides[-len(grad.shape) :] if grad.shape else ()
            copy(b, b.reshaped(b.out(), grad.shape, strides), call.inputs[0])

    return rule


def _stack(b: CallLowering, call: RecordedCall) -> None:
    tensors, dim = call.inputs[0], call.inputs[1]
    assert isinstance(tensors, list)
    first = b.get(tensors[0])  # type: ignore[arg-type]
    place = dim + len(first.shape) + 1 if isinstance(dim, int) and dim < 0 else dim
    with b.inside("aten::stack"):
        if isinstance(place, int) and place < len(first.shape):
            b.op("aten::cat", [tensors, place], call.outputs)
            b.host("aten::view", b.out(), outputs=call.outputs)
            return
        for t in tensors:
            with b.inside("aten::unsqueeze"):
                b.host("aten::as_strided", t)  # type: ignore[arg-type]
        b.op("aten::cat", [tensors, place], call.outputs)


def _repeat(b: CallLowering, call: RecordedCall) -> None:
    source, repeats = b.get(call.inputs[0]), call.inputs[1]
    assert isinstance(repeats, list)
    counts = tuple(n for n in repeats if isinstance(n, int))
    sizes = (1,) * (len(counts) - len(source.shape)) + source.shape
    shape = (*counts, *sizes)
    with b.inside("aten::repeat"):
        for name in ("aten::expand", "aten::empty", "aten::unfold", "aten::expand_as"):
            b.host(name)
        if prod(shape):
            copy(b, b.reshaped(b.out(), shape), b.reshaped(call.inputs[0], shape, (0,) * len(shape)))


RULES: dict[str, Rule] = {
    "aten::_to_copy": _to_copy,
    "aten::copy_": _copy,
    "aten::clone": _clone,
    "aten::zeros": _filled("aten::empty"),
    "aten::zeros_like": _filled("aten::empty_like"),
    "aten::new_zeros": _filled("aten::new_empty", "aten::empty"),
    "aten::ones": _filled("aten::empty", zero=False, value=1),
    "aten::ones_like": _filled("aten::empty_like", zero=False, value=1),
    "aten::new_ones": _filled("aten::new_empty", zero=False, value=1),
    "aten::full": _filled("aten::empty", zero=False),
    "aten::full_like": _filled("aten::empty_like", zero=False),
    "aten::new_full": _filled("aten::new_empty", zero=False),
    "aten::scalar_tensor": _filled("aten::empty", zero=False),
    "aten::zero_": _zero_,
    "aten::rand": _random("aten::uniform_"),
    "aten::rand_like": _random("aten::uniform_"),
    "aten::randn": _random("aten::normal_"),
    "aten::randn_like": _random("aten::normal_"),
    "aten::randint": _random("aten::random_"),
    "aten::randint_like": _random("aten::random_"),
    "aten::bernoulli": _random("aten::bernoulli_"),
    "aten::arange": _arange,
    "aten::constant_pad_nd": _padded,
    "aten::slice_backward": _part_backward("aten::slice"),
    "aten::select_backward": _part_backward("aten::select"),
    "aten::diagonal_backward": _part_backward("aten::diagonal"),
    "aten::stack": _stack,
    "aten::repeat": _repeat,
}
VIEWS: dict[str, Rule] = {
    "aten::t": _viewed_by("aten::transpose", "aten::as_strided"),
    "aten::unbind": _many_views("aten::select", "aten::as_strided"),
    "aten::split": _many_views("aten::narrow", "aten::slice", "aten::as_strided"),
    "aten::split_with_sizes": _many_views("aten::as_strided"),
    "aten::detach": _viewed_by("detach"),
}
for _name in ("transpose", "expand", "permute", "select", "slice", "squeeze", "unsqueeze", "unfold", "diagonal"):
    VIEWS[f"aten::{_name}"] = _viewed_by("aten::as_strided")
RULES |= VIEWS


# ---- Ops over lists of tensors: one kernel for many tensors, or one op for each where CUDA does not take the lists.

PREFIX = "aten::_foreach_"
BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
TERNARY = "addcmul addcdiv lerp"
UNARY = "sqrt neg reciprocal abs exp sign"


def _foreach(b: CallLowering, call: RecordedCall) -> None:
    lists = [a for a in call.inputs if isinstance(a, list) and a and all(isinstance(x, Ref) for x in a)]
    columns = [[b.get(x) for x in one] for one in lists]  # type: ignore[arg-type]
    if not columns or fits_one_foreach_kernel(columns, any_dtype=call.name.endswith("copy_")):
        b.same()
        return
    name = "aten::" + call.name.removeprefix(PREFIX)
    for place, first in enumerate(lists[0]):
        written = [first] if call.writes else []
        outputs = call.outputs[place : place + 1] or written
        with b.inside(call.name):
            inputs = [_at(a, place) for a in call.inputs]
            b.op(name, inputs, outputs, writes=written, overload=_overload(name, inputs))  # type: ignore[arg-type]


def _at(argument: Arg, place: int) -> Arg:
    return argument[place] if isinstance(argument, list) and place < len(argument) else argument  # type: ignore[return-value]


def _overload(name: str, inputs: Sequence[Arg]) -> str:
    stem = name.removeprefix("aten::").rstrip("_")
    if stem == "lerp":
        return "Tensor" if isinstance(inputs[-1], Ref) else "Scalar"
    return "Tensor" if stem in ("add", "sub", "mul", "div") else ""


_STEMS = f"{BINARY} {TERNARY} {UNARY}".split()
FOREACH_RULES: dict[str, Rule] = dict.fromkeys(
    [f"{PREFIX}{stem}{end}" for stem in _STEMS for end in ("", "_")], _foreach
)
FOREACH_RULES |= dict.fromkeys([f"{PREFIX}copy_", f"{PREFIX}zero_"], _foreach)
