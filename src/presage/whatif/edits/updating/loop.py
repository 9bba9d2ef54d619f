"""Adam one parameter after the other, as `capturable=True, foreach=False` runs it: `_single_tensor_adam`."""

from __future__ import annotations

from collections.abc import Sequence

from presage.graph.graph import Arg, Ref
from presage.whatif.edits.pen import Pen
from presage.whatif.edits.updating.lists import ONE_NAMES, OVERLOADS
from presage.whatif.edits.updating.numbers import betas, eps, rate_of
from presage.whatif.edits.updating.updates import Update

__all__ = ["capturable_loop"]


def capturable_loop(pen: Pen, u: Update) -> None:
    """One parameter's Adam as `capturable=True, foreach=False` runs it."""
    one = _One(pen)
    p, g = Ref(u.parameter), Ref(u.gradient)
    average, square = (Ref(s) for s in u.states[:2])
    if "maximize" in u.flags:
        g = one.make("neg", g)
    step = Ref(u.step) if u.step is not None else pen.standing((), "float32", "optimizer", "step")
    one.on("add", step, 1, 1)
    if "decay" in u.flags:
        g = one.make("add", g, p, u.scalar("add(g,p)"))
    if "decoupled" in u.flags:
        one.on("mul", p, u.scalar("mul(p)", 1.0))
    beta1, beta2 = betas(u)
    one.on("lerp", average, g, 1 - beta1)
    one.on("mul", square, beta2)
    one.on("addcmul", square, g, g, 1 - beta2)
    first, second = (
        one.make("sub", 1, one.make("pow", beta, step), 1, within=["aten::rsub"]) for beta in (beta1, beta2)
    )
    size = one.make("neg", one.make("mul", one.make("reciprocal", first), rate_of(u)))
    root = one.make("sqrt", second)
    if "amsgrad" in u.flags:
        most = Ref(u.states[2])
        one.on("copy", most, one.make("maximum", most, square), False)
        square = most
    root = one.make("div", one.make("sqrt", square), one.make("mul", root, size))
    one.on("add", root, one.make("mul", one.make("reciprocal", size), eps(u)), 1)
    one.on("addcdiv", p, average, root, 1)


class _One:
    """Ops over single tensors. What they make is given back after its last use."""

    def __init__(self, pen: Pen) -> None:
        self.pen = pen

    def on(self, stem: str, changed: Ref, *others: Arg) -> Ref:
        self._op(f"{stem}_", [changed, *others], changed, [changed])
        return changed

    def make(self, stem: str, *inputs: Arg, within: Sequence[str] = ()) -> Ref:
        source = self.pen.get(next(a for a in inputs if isinstance(a, Ref)))
        out = self.pen.new(source.shape, source.dtype, source.strides, kept=True)
        self._op(stem, inputs, out, (), within)
        return out

    def _op(
        self, name: str, inputs: Sequence[Arg], out: Ref, written: Sequence[Ref], within: Sequence[str] = ()
    ) -> None:
        stem = name.rstrip("_")
        overload, names = OVERLOADS.get(stem, ""), ONE_NAMES[stem]
        self.pen.op(name, inputs, [out], overload=overload, names=names, writes=written, within=within)
