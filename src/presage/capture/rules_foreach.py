"""Ops over lists of tensors: one kernel for many tensors, or one op for each where CUDA's code does not take the lists.

The quick way asks that all tensors have one dtype and no holes, and that tensors which stand at the same place of
several lists have the same sizes and strides. A list of single numbers on the GPU (the step sizes of a capturable
optimizer) beside a list of weights is not taken so: each pair is an op of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from presage.capture.calls import Call
from presage.capture.lowering import Builder, Rule
from presage.graph.graph import Arg, Ref, Tensor

__all__ = ["RULES"]

PREFIX = "aten::_foreach_"
BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
TERNARY = "addcmul addcdiv lerp"
UNARY = "sqrt neg reciprocal abs exp sign"


def _rule(b: Builder, call: Call) -> None:
    lists = [a for a in call.inputs if isinstance(a, list) and a and all(isinstance(x, Ref) for x in a)]
    columns = [[b.get(x) for x in one] for one in lists]  # type: ignore[arg-type]
    if not columns or _at_once(columns, any_dtype=call.name.endswith("copy_")):
        b.same()
        return
    name = "aten::" + call.name.removeprefix(PREFIX)
    for place, first in enumerate(lists[0]):
        written = [first] if call.writes else []
        outputs = call.outputs[place : place + 1] or written
        with b.inside(call.name):
            inputs = [_at(a, place) for a in call.inputs]
            b.op(name, inputs, outputs, writes=written, overload=_overload(name, inputs))  # type: ignore[arg-type]


def _at_once(columns: Sequence[Sequence[Tensor]], any_dtype: bool) -> bool:
    """Whether one kernel takes all of it."""
    first = columns[0]
    dtypes = {t.dtype for column in columns for t in column}
    alike = all(
        len(column) == len(first)
        and all((t.shape, t.strides) == (f.shape, f.strides) for t, f in zip(column, first, strict=True))
        for column in columns
    )
    return alike and (any_dtype or len(dtypes) == 1) and all(_dense(t) for t in first)


def _dense(t: Tensor) -> bool:
    """Without holes or overlaps, in whatever order its dimensions lie."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.strides, strict=False) if n != 1):
        if stride != expected:
            return t.elements == 0
        expected *= size
    return len(t.shape) == len(t.strides)


def _at(argument: Arg, place: int) -> Arg:
    return argument[place] if isinstance(argument, list) and place < len(argument) else argument  # type: ignore[return-value]


def _overload(name: str, inputs: Sequence[Arg]) -> str:
    stem = name.removeprefix("aten::").rstrip("_")
    if stem == "lerp":
        return "Tensor" if isinstance(inputs[-1], Ref) else "Scalar"
    return "Tensor" if stem in ("add", "sub", "mul", "div") else ""


_STEMS = f"{BINARY} {TERNARY} {UNARY}".split()
RULES: dict[str, Rule] = dict.fromkeys([f"{PREFIX}{stem}{end}" for stem in _STEMS for end in ("", "_")], _rule)
RULES |= dict.fromkeys([f"{PREFIX}copy_", f"{PREFIX}zero_"], _rule)
