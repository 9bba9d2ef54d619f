"""Ops over lists of tensors: one kernel for many tensors, or one op for each where CUDA does not take the lists."""

from __future__ import annotations

from collections.abc import Sequence

from presage.capture.calls import RecordedCall
from presage.capture.lowering import CallLowering, Rule
from presage.graph.graph import Arg, Ref
from presage.graph.lists import fits_one_foreach_kernel

__all__ = ["RULES"]

PREFIX = "aten::_foreach_"
BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow"
TERNARY = "addcmul addcdiv lerp"
UNARY = "sqrt neg reciprocal abs exp sign"


def _rule(b: CallLowering, call: RecordedCall) -> None:
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
RULES: dict[str, Rule] = dict.fromkeys([f"{PREFIX}{stem}{end}" for stem in _STEMS for end in ("", "_")], _rule)
RULES |= dict.fromkeys([f"{PREFIX}copy_", f"{PREFIX}zero_"], _rule)
