"""The ops of torch's optimizers over a group of parameters: foreach, fused, and those of capturable Adam.

Written as torch/optim has them (2.11 to 2.13): `_multi_tensor_adam`, `_fused_adam`, `_single_tensor_adam` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from presage.graph.edits.pen import Pen
from presage.graph.edits.updating.updates import Update
from presage.graph.graph import Arg, Ref

__all__ = ["capturable_loop", "foreach", "found_inf", "fused"]

_TERNARY = ("self", "tensor1", "tensor2")
_NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("add", "List"): ("self", "other", "alpha"),
    ("div", "List"): ("self", "other"),
    ("sub", "List"): ("self", "other", "alpha"),
    ("maximum", "List"): ("self", "other"),
    ("lerp", "Scalar"): ("self", "tensors1", "weight"),
    ("pow", "ScalarAndTensor"): ("self", "exponent"),
    **{(stem, "Scalar"): ("self", "scalar") for stem in ("add", "mul", "div", "sub")},
    **{(stem, "ScalarList"): ("self", "scalars") for stem in ("mul", "div")},
    **{(stem, "Scalar"): (*_TERNARY, "value") for stem in ("addcmul", "addcdiv")},
    **{(stem, "ScalarList"): (*_TERNARY, "scalars") for stem in ("addcmul", "addcdiv")},
    **{(stem, ""): ("self",) for stem in ("neg", "sqrt", "reciprocal")},
}
_SCALE = ("grad_scale", "found_inf")
_ADAM = (
    "self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps",
    "lr", "beta1", "beta2", "weight_decay", "eps", "amsgrad", "maximize", *_SCALE,
)  # fmt: skip
_SGD = (
    "self", "grads", "momentum_buffer_list", "weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize",
    "is_first_step", *_SCALE,
)  # fmt: skip
_ADAGRAD = (
    "self", "grads", "state_sums", "state_steps", "lr", "lr_decay", "weight_decay", "eps", "maximize", *_SCALE,
)  # fmt: skip

List = list[Ref]


class _Lists:
    """A group's tensors as lists, and the pen that writes foreach ops over them."""

    def __init__(self, pen: Pen, group: Sequence[Update]) -> None:
        self.pen, self.group, self.first = pen, group, group[0]
        self.params = [Ref(u.parameter) for u in group]
        self.grads = [Ref(u.gradient) for u in group]
        self.states = [[Ref(u.states[k]) for u in group] for k in range(len(self.first.states))]
        self.steps = [Ref(u.step) for u in group if u.step is not None]

    def on(self, stem: str, overload: str, changed: List, *others: Arg | List) -> List:
        """An op in place; returns the list it changes."""
        self._op(f"{stem}_", overload, [changed, *others], (), changed)
        return changed

    def make(self, stem: str, overload: str, *inputs: Arg | List, brief: bool = False) -> List:
        """An op that makes a new list, which lives as long as the group's update; `brief`: until its last use."""
        source = next(a for a in inputs if isinstance(a, list))
        out = [self.pen.alike(r, kept=brief) for r in source if isinstance(r, Ref)]
        self._op(stem, overload, inputs, out, ())
        return out

    def _op(self, name: str, overload: str, inputs: Sequence[Arg | List], out: List, written: Sequence[Ref]) -> None:
        names = _NAMES.get((name.rstrip("_"), overload), ())
        self.pen.op(
            f"_foreach_{name}", [_argument(a) for a in inputs], out, overload=overload, names=names, writes=written
        )

    def each(self, stem: str, changed: List, other: List) -> None:
        """An op in place over lists that CUDA's code takes apart: one op for each tensor."""
        for a, b in zip(changed, other, strict=True):
            self.pen.op(
                f"{stem}_",
                [a, b],
                [a],
                overload="Tensor",
                names=("self", "other"),
                writes=[a],
                within=[f"aten::_foreach_{stem}_"],
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


def _argument(value: Arg | List) -> Arg:
    return list(value) if isinstance(value, list) else value


def foreach(pen: Pen, group: Sequence[Update], counted: bool, capturable: bool) -> None:
    """A group's updates over lists; `counted`: the host counts steps."""
    lists = _Lists(pen, group)
    write = {"adam": _adam, "sgd": _sgd, "adagrad": _adagrad, "rmsprop": _rmsprop}[group[0].algorithm]
    write(lists, counted, capturable or bool(lists.steps))


def _adam(o: _Lists, counted: bool, capturable: bool) -> None:
    own = o.negated()
    if capturable:
        o.count()
    elif counted:
        o.count_on_host()
    o.decayed(own)
    if "decoupled" in o.first.flags:
        o.on("mul", "Scalar", o.params, o.first.scalar("mul(p)", 1.0))
    average, square = o.states[:2]
    beta1, beta2 = _betas(o.first)
    o.on("lerp", "Scalar", average, o.grads, 1 - beta1)
    o.on("mul", "Scalar", square, beta2)
    o.on("addcmul", "Scalar", square, o.grads, o.grads, 1 - beta2)
    if capturable:
        _adam_on_gpu(o, beta1, beta2)
        return
    o.look_on_host(2)
    if "amsgrad" in o.first.flags:
        square = o.on("maximum", "List", o.states[2], square)
    root = o.make("sqrt", "", square)
    o.on("div", "ScalarList", root, o.scalars("div(t)", 1.0))
    o.on("add", "Scalar", root, _eps(o.first))
    o.on("addcdiv", "ScalarList", o.params, average, root, o.scalars("addcdiv(p,s,t)", -1e-3))


def _adam_on_gpu(o: _Lists, beta1: float, beta2: float) -> None:
    """The end of a capturable Adam: corrections are numbers on the GPU, which divide tensors one by one."""
    first, second = (o.make("pow", "ScalarAndTensor", beta, o.steps) for beta in (beta1, beta2))
    o.on("sub", "Scalar", first, 1)
    o.on("sub", "Scalar", second, 1)
    o.on("neg", "", second)
    o.on("div", "Scalar", first, _rate(o.first))
    o.on("reciprocal", "", first)
    o.on("sqrt", "", second)
    square = o.states[1]
    if "amsgrad" in o.first.flags:
        square = o.on("maximum", "List", o.states[2], square)
    root = o.make("sqrt", "", square)
    o.each("div", root, second)
    o.on("add", "Scalar", root, _eps(o.first))
    o.each("div", root, first)
    o.on("addcdiv", "Scalar", o.params, o.states[0], root, 1)


def _sgd(o: _Lists, counted: bool, capturable: bool) -> None:
    del counted, capturable  # it has no steps
    o.decayed(o.negated())
    rate = o.first.scalar("add(p,s)", o.first.scalar("add(p,g)", -1e-3))
    if "momentum" in o.first.flags:
        (buffer,) = o.states
        momentum = o.first.scalar("mul(s)", 0.9)
        o.on("mul", "Scalar", buffer, momentum)
        o.on("add", "List", buffer, o.grads, o.first.scalar("add(s,g)", 1.0))
        if "nesterov" in o.first.flags:
            o.on("add", "List", o.grads, buffer, momentum)
        else:
            o.grads = buffer
    o.on("add", "List", o.params, o.grads, rate)


def _adagrad(o: _Lists, counted: bool, capturable: bool) -> None:
    own = o.negated()
    if o.steps:
        o.count()
    elif counted:
        o.count_on_host()
    own = o.decayed(own)
    o.look_on_host(1 if counted and not capturable else 0)
    o.on("addcmul", "Scalar", o.states[0], o.grads, o.grads, 1)
    root = o.on("add", "Scalar", o.make("sqrt", "", o.states[0]), _eps(o.first, 1e-10))
    rates = [u.scalar("mul(g)", u.scalar("addcdiv(p,g,t)", -1e-2)) for u in o.group]
    scaled = o.on("mul", "ScalarList", o.grads, rates) if own else o.make("mul", "ScalarList", o.grads, rates)
    o.on("addcdiv", "Scalar", o.params, scaled, root, 1)


def _rmsprop(o: _Lists, counted: bool, capturable: bool) -> None:
    own = o.negated()
    if capturable:
        o.count()
    elif counted:
        o.count_on_host()
    o.decayed(own)
    flags, square = o.first.flags, o.states[0]
    o.on("mul", "Scalar", square, o.first.scalar("mul(s)", 0.99))
    o.on("addcmul", "Scalar", square, o.grads, o.grads, 1 - o.first.scalar("mul(s)", 0.99))
    if "centered" in flags:
        o.on("lerp", "Scalar", o.states[1], o.grads, 1 - o.first.scalar("mul(s)", 0.99))
        root = o.on("sqrt", "", o.make("addcmul", "Scalar", square, o.states[1], o.states[1], -1))
    else:
        root = o.make("sqrt", "", square)
    o.on("add", "Scalar", root, _eps(o.first))
    if "momentum" in flags:
        buffer = o.on("mul", "Scalar", o.states[-1], o.first.scalar("mul(s)", 0.9, 1))
        o.on("addcdiv", "Scalar", buffer, o.grads, root, 1)
        o.on("add", "List", o.params, buffer, o.first.scalar("add(p,s)", -1e-2))
    else:
        o.on("addcdiv", "Scalar", o.params, o.grads, root, o.first.scalar("addcdiv(p,g,t)", -1e-2))


# ---- fused


def found_inf(pen: Pen, found: Ref) -> None:
    """What a gradient scaler does for a fused optimizer: the sum of what it found, one number a device."""
    pen.host("to")
    out = pen.new((), pen.get(found).dtype)
    pen.op("add", [found, 0, 1], [out], overload="Tensor", names=_ONE_NAMES["add"])


def fused(pen: Pen, group: Sequence[Update], found: int | None = None, decoupled: bool = False) -> None:
    """A group's updates in one fused op, after its step counts, which are then on the GPU.

    `found`: what a gradient scaler found, by which the op and its step counts are left as they are; `decoupled`: Adam's
    weight decay, if any, is AdamW's.
    """
    skipped = None if found is None else Ref(found)
    lists, u = _Lists(pen, group), group[0]
    if skipped is not None:
        pen.host("to")
    if u.algorithm != "sgd":
        lists.count()
    head: list[Arg] = [_argument(lists.params), _argument(lists.grads)]
    most = "maximize" in u.flags
    written = [*lists.params, *lists.grads, *(r for state in lists.states for r in state)]
    states = [_argument(s) for s in lists.states]
    if u.algorithm == "adam":
        sizes = [_rate(u), *_betas(u), _decay(u), _eps(u)]
        maxima = states[2] if "amsgrad" in u.flags else []
        inputs = [*head, *states[:2], maxima, _argument(lists.steps), *sizes, "amsgrad" in u.flags, most, None, skipped]
        name, names = "_fused_adamw_" if decoupled and "decay" not in u.flags else "_fused_adam_", _ADAM
    elif u.algorithm == "adagrad":
        rate = -u.scalar("mul(g)", u.scalar("addcdiv(p,g,t)", -1e-2))
        inputs = [*head, *states, _argument(lists.steps), rate, 0.0, _decay(u), _eps(u, 1e-10), most, None, skipped]
        name, names = "_fused_adagrad_", _ADAGRAD
        written += lists.steps
    else:
        rate = -u.scalar("add(p,s)", u.scalar("add(p,g)", -1e-3))
        more = [_decay(u), u.scalar("mul(s)"), rate, 1 - u.scalar("add(s,g)", 1.0), "nesterov" in u.flags, most]
        inputs = [*head, states[0] if states else [], *more, False, None, skipped]
        name, names = "_fused_sgd_", _SGD
    pen.op(name, inputs, names=names, writes=written)
    if skipped is not None and lists.steps:
        lists.on("sub", "List", lists.steps, [skipped] * len(group), 1)


# ---- capturable, one parameter after the other


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
    beta1, beta2 = _betas(u)
    one.on("lerp", average, g, 1 - beta1)
    one.on("mul", square, beta2)
    one.on("addcmul", square, g, g, 1 - beta2)
    first, second = (
        one.make("sub", 1, one.make("pow", beta, step), 1, within=["aten::rsub"]) for beta in (beta1, beta2)
    )
    size = one.make("neg", one.make("mul", one.make("reciprocal", first), _rate(u)))
    root = one.make("sqrt", second)
    if "amsgrad" in u.flags:
        most = Ref(u.states[2])
        one.on("copy", most, one.make("maximum", most, square), False)
        square = most
    root = one.make("div", one.make("sqrt", square), one.make("mul", root, size))
    one.on("add", root, one.make("mul", one.make("reciprocal", size), _eps(u)), 1)
    one.on("addcdiv", p, average, root, 1)


_ONE_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "sub"), ("self", "other", "alpha")),
    **dict.fromkeys(("mul", "div", "maximum"), ("self", "other")),
    **dict.fromkeys(("addcmul", "addcdiv"), (*_TERNARY, "value")),
    **dict.fromkeys(("neg", "sqrt", "reciprocal"), ("self",)),
    "lerp": ("self", "end", "weight"),
    "pow": ("self", "exponent"),
    "copy": ("self", "src", "non_blocking"),
}
_OVERLOADS = {"add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor", "lerp": "Scalar", "pow": "Scalar"}


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
        overload, names = _OVERLOADS.get(stem, ""), _ONE_NAMES[stem]
        self.pen.op(name, inputs, [out], overload=overload, names=names, writes=written, within=within)


# ---- numbers


def _betas(u: Update) -> tuple[float, float]:
    return round(1 - u.scalar("lerp(s,g)", 0.1), 12), u.scalar("mul(s)", 0.999)


def _eps(u: Update, default: float = 1e-8) -> float:
    return u.scalar("add(t)", default)


def _rate(u: Update) -> float:
    """Adam's learning rate, from the step's size and its corrections; torch's default where that cannot be told."""
    size, corrected = -u.scalar("addcdiv(p,s,t)", -1e-3), u.scalar("div(t)")
    beta1, beta2 = _betas(u)
    if not 0 < corrected < 1 or not 0 < beta2 < 1 or size <= 0:
        return 1e-3
    steps = round(log(1 - corrected**2) / log(beta2))
    return round(size * (1 - beta1**steps), 12)


def _decay(u: Update) -> float:
    if "decoupled" in u.flags:
        return round((1 - u.scalar("mul(p)", 1.0)) / _rate(u), 9) if _rate(u) else 0.0
    return u.scalar("add(g,p)") if "decay" in u.flags else 0.0
