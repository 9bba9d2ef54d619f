"""A group's tensors as lists, and the foreach ops over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from presage.graph.graph import Arg, Ref
from presage.graph.lists import fits_one_foreach_kernel
from presage.whatif.edits.pen import Pen
from presage.whatif.edits.updating.updates import Update

__all__ = ["ONE_NAMES", "OVERLOADS", "Lists", "argument"]

TERNARY = ("self", "tensor1", "tensor2")
_NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("add", "List"): ("self", "other", "alpha"),
    ("div", "List"): ("self", "other"),
    ("sub", "List"): ("self", "other", "alpha"),
    ("maximum", "List"): ("self", "other"),
    ("lerp", "Scalar"): ("self", "tensors1", "weight"),
    ("pow", "ScalarAndTensor"): ("self", "exponent"),
    **{(stem, "Scalar"): ("self", "scalar") for stem in ("add", "mul", "div", "sub")},
    **{(stem, "ScalarList"): ("self", "scalars") for stem in ("mul", "div")},
    **{(stem, "Scalar"): (*TERNARY, "value") for stem in ("addcmul", "addcdiv")},
    **{(stem, "ScalarList"): (*TERNARY, "scalars") for stem in ("addcmul", "addcdiv")},
    **{(stem, ""): ("self",) for stem in ("neg", "sqrt", "reciprocal")},
}
ONE_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub"), ("self", "other", "alpha")),
    **dict.fromkeys(("mul", "div", "maximum"), ("self", "other")),
    **dict.fromkeys(("addcmul", "addcdiv"), (*TERNARY, "value")),
    **dict.fromkeys(("neg", "sqrt", "reciprocal"), ("self",)),
    "lerp": ("self", "end", "weight"),
    "pow": ("self", "exponent"),
    "copy": ("self", "src", "non_blocking"),
}
OVERLOADS = {"add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor", "lerp": "Scalar", "pow": "Scalar"}


List = list[Ref]
Input: TypeAlias = Arg | List | list[float]


class Lists:
    """A group's tensors as lists, and the pen that writes foreach ops over them."""

    def __init__(self, pen: Pen, group: Sequence[Update]) -> None:
        self.pen, self.group, self.first = pen, group, group[0]
        self.params = [Ref(u.parameter) for u in group]
        self.grads = [Ref(u.gradient) for u in group]
        self.states = [[Ref(u.states[k]) for u in group] for k in range(len(self.first.states))]
        self.steps = [Ref(u.step) for u in group if u.step is not None]

    def on(self, stem: str, overload: str, changed: List, *others: Input) -> List:
        """An op in place; returns the list it changes."""
        self._op(f"{stem}_", overload, [changed, *others], [], changed)
        return changed

    def make(self, stem: str, overload: str, *inputs: Input, brief: bool = False) -> List:
        """An op that makes a new list, which lives as long as the group's update; `brief`: until its last use."""
        source = next(a for a in inputs if isinstance(a, list))
        out = [self.pen.alike(r, kept=brief) for r in source if isinstance(r, Ref)]
        self._op(stem, overload, inputs, out, ())
        return out

    def _op(self, name: str, overload: str, inputs: Sequence[Input], out: List, written: Sequence[Ref]) -> None:
        columns = [[self.pen.get(r) for r in a if isinstance(r, Ref)] for a in inputs if isinstance(a, list)]
        if not fits_one_foreach_kernel([c for c in columns if c]):
            self._one_by_one(name, inputs, out)
            return
        names = _NAMES.get((name.rstrip("_"), overload), ())
        self.pen.op(
            f"_foreach_{name}", [argument(a) for a in inputs], out, overload=overload, names=names, writes=written
        )

    def _one_by_one(self, name: str, inputs: Sequence[Input], out: List) -> None:
        """Lists that CUDA's code takes apart: one op for each tensor."""
        stem = name.rstrip("_")
        for lane in range(len(self.group)):
            mine: list[Any] = [a[lane] if isinstance(a, list) else a for a in inputs]
            changed = [r for r in mine[:1] if isinstance(r, Ref) and not out]
            self.pen.op(
                name,
                mine,
                out[lane : lane + 1] or changed,
                overload=OVERLOADS.get(stem, ""),
                names=ONE_NAMES[stem],
                writes=changed,
                within=[f"aten::_foreach_{name}"],
            )

    def scalars(self, word: str, default: float = 0.0) -> list[float]:
        return [u.scalar(word, default) for u in self.group]

    def count_on_host(self) -> None:
        """Step counts on the host: one op over all of them, which is one for each there."""
        for name, within in (("empty", ()), ("to", ()), ("lift_fresh", ()), ("lift_fresh", ("aten::lift_fresh",))):
            self.pen.host(name, within)
        self.pen.host("_foreach_add_", overload="Tensor")
        for _ in self.group:
            self.pen.host("add_", ("aten::_foreach_add_", "aten::_foreach_add_"))

    def look_on_host(self, times: int) -> None:
        """The host reads its step counts."""
        for _ in range(times * len(self.group)):
            self.pen.host("_local_scalar_dense", ("aten::item",))
            self.pen.host("_local_scalar_dense", ("aten::item", "aten::_local_scalar_dense"))

    def count(self) -> None:
        """Step counts on the GPU; made where there are none yet."""
        self.steps = self.steps or [self.pen.standing((), "float32", "optimizer", "step") for _ in self.group]
        self.on("add", "Scalar", self.steps, 1)

    def negated(self) -> bool:
        if "maximize" in self.first.flags:
            self.grads = self.make("neg", "", self.grads, brief=self.first.algorithm == "adam")
        return "maximize" in self.first.flags

    def decayed(self, own: bool) -> bool:
        """Weight decay goes into the gradients; `own`: they are a copy already."""
        if "decay" not in self.first.flags:
            return own
        lists, factor = (self.grads, self.params), self.first.scalar("add(g,p)")
        if own:
            self.on("add", "List", *lists, factor)
        else:
            self.grads = self.make("add", "List", *lists, factor, brief=self.first.algorithm == "adam")
        return True


def argument(value: Input) -> Arg:
    return list(value) if isinstance(value, list) else value
