"""Elementwise ops, reductions and losses: those that CUDA runs as, or with, other ops."""

from __future__ import annotations

from presage.capture.calls import RecordedCall
from presage.capture.lowering import CallLowering, Rule
from presage.capture.rules_memory import contiguous, copy, fill
from presage.graph.graph import Arg, Ref


def renamed(name: str, *extra: Arg) -> Rule:
    """The op is another one inside."""

    def rule(b: CallLowering, call: RecordedCall) -> None:
        with b.inside(call.name):
            b.op(name, [*call.inputs, *extra], call.outputs, writes=call.writes)

    return rule


def _scalar_form(b: CallLowering, call: RecordedCall) -> None:
    """A form that takes a number wraps it and calls the one that takes a tensor."""
    if call.overload.startswith("Scalar") and not any(isinstance(a, Ref) for a in call.inputs[1:]):
        with b.inside(call.name):
            b.op(call.name, call.inputs, call.outputs, writes=call.writes, overload="Tensor")
    else:
        b.same()


def _add(b: CallLowering, call: RecordedCall) -> None:
    """To a dense tensor a sparse one is added row by row."""
    other = call.inputs[1]
    if _add_in_place(b, call):
        return
    if not isinstance(other, Ref) or other.id not in b.sparse:
        _scalar_form(b, call)
        return
    shape, values = b.sparse[other.id], b.get(other)
    with b.inside(call.name, *(["aten::add"] if call.name == "aten::add_" else [])):
        rows = b.view(values.storage, shape, values.dtype)
        index = b.view(values.storage, shape[:1], "int64")
        b.op("aten::index_add_", [call.inputs[0], 0, index, rows, 1], call.outputs, writes=call.writes)


_IN_PLACE_INSIDE = ("aten::linear", "aten::_scaled_dot_product_attention_math")


def _add_in_place(b: CallLowering, call: RecordedCall) -> bool:
    """These add a bias or a mask into what they have just made, but not where tensors are subclasses, as fakes are."""
    if call.name != "aten::add" or not b.within or b.within[-1] not in _IN_PLACE_INSIDE:
        return False
    target = call.inputs[0]
    if not isinstance(target, Ref) or b.get(target).shape != b.get(b.out()).shape:
        return False
    b.op("aten::add_", call.inputs, [target], writes=[target], overload=call.overload)
    b.merge(b.get(b.out()).storage, b.get(target).storage)
    return True


def _whole_form(b: CallLowering, call: RecordedCall) -> None:
    """A reduction over everything calls the one over given dimensions."""
    with b.inside(*([call.name] if call.overload in ("", "default") else [])):
        if call.overload in ("", "default"):
            b.op(call.name, [call.inputs[0], None, False, None], call.outputs, overload="dim")
        else:
            b.same()
        _widened(b, call)


def _widened(b: CallLowering, call: RecordedCall) -> None:
    """Whole numbers and truth values are first copied into the type they are summed in."""
    x, out = b.get(call.inputs[0]), b.get(b.out())
    whole = x.dtype == "bool" or "int" in x.dtype
    if x.dtype != out.dtype and (whole or call.name == "aten::cumsum"):
        with b.inside(call.name, "aten::to", "aten::_to_copy"):
            b.host("aten::empty_strided")
            copy(b, b.new(x.shape, out.dtype), call.inputs[0])


def _running(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    _widened(b, call)


def _foreach_norm(b: CallLowering, call: RecordedCall) -> None:
    """Partial norms, one per piece of 65,536 elements, of as many pieces as the largest tensor has."""
    b.same()
    sizes = [b.get(t).elements for t in call.inputs[0] if isinstance(t, Ref)]  # type: ignore[union-attr]
    pieces = -(-max(sizes, default=0) // 65536)
    with b.inside(call.name, "aten::zeros"):
        fill(b, b.empty((len(sizes) * pieces,), "float32"))


def _pow(b: CallLowering, call: RecordedCall) -> None:
    exponent = call.inputs[1]
    if call.overload == "Tensor_Scalar" and exponent in (0, 1) and not isinstance(exponent, bool):
        with b.inside("aten::pow"):
            if exponent == 1:
                copy(b, b.out(), call.inputs[0])
            else:
                b.op("aten::fill_", [b.out(), 1], call.outputs, writes=call.outputs, overload="Scalar")
    else:
        b.same()


def _rsub(b: CallLowering, call: RecordedCall) -> None:
    with b.inside(call.name):
        b.op("aten::sub", [call.inputs[1], call.inputs[0], call.inputs[2]], call.outputs, overload="Tensor")


def _into(name: str, inner: str | None = None) -> Rule:
    """The op makes its output and calls the form that writes into it, which resizes it."""

    def rule(b: CallLowering, call: RecordedCall) -> None:
        out = b.get(b.out())
        with b.inside(name):
            b.host("aten::empty")
            empty = b.view(out.storage, (0,), out.dtype)
            b.op(inner or name, [*call.inputs, empty], call.outputs, overload="out")

    return rule


def _hardtanh(b: CallLowering, call: RecordedCall) -> None:
    with b.inside(call.name):
        if call.name.endswith("_"):
            b.op("aten::clamp_", call.inputs, call.outputs, writes=call.writes)
            return
        b.host("aten::empty_like", call.inputs[0])
        with b.inside(call.name):
            b.op("aten::clamp", [*call.inputs, b.out()], call.outputs, overload="out")


def _softmax_backward(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    with b.inside(call.name):
        t = b.get(call.inputs[0])
        product = b.new(t.shape, t.dtype)
        b.op("aten::mul", [call.inputs[0], call.inputs[1]], [product], overload="Tensor")


def _safe_softmax(b: CallLowering, call: RecordedCall) -> None:
    x = b.get(call.inputs[0])
    dim = call.inputs[1]
    assert isinstance(dim, int)
    rows = tuple(1 if i == dim % len(x.shape) else n for i, n in enumerate(x.shape))
    with b.inside(call.name):
        soft = b.new(x.shape, b.get(b.out()).dtype)
        with b.inside("aten::softmax"):
            b.op("aten::_softmax", [call.inputs[0], dim, False], [soft])
        hidden, gone = b.new(x.shape, "bool"), b.new(rows, "bool")
        b.op("aten::isneginf", [call.inputs[0]], [hidden])
        b.op("aten::all", [hidden, dim, True], [gone], overload="dim")
        zero = b.new((), b.get(b.out()).dtype)
        with b.inside("aten::scalar_tensor"):
            b.host("aten::empty")
            b.op("aten::fill_", [zero, 0], [zero], writes=[zero], overload="Scalar")
        b.op("aten::where", [gone, zero, soft, b.out()], call.outputs, overload="self_out")


def _mean_of(b: CallLowering, call: RecordedCall, reduction: Arg) -> None:
    """The mean or sum a loss ends with, over its elementwise values."""
    if reduction not in (1, 2):
        return
    x = b.get(call.inputs[0])
    values = b.new(x.shape, x.dtype)
    name = "aten::mean" if reduction == 1 else "aten::sum"
    b.op(name, [values, None, False, None, b.out()], call.outputs, overload="out")


def _loss(place: int) -> Rule:
    def rule(b: CallLowering, call: RecordedCall) -> None:
        b.same()
        with b.inside(call.name):
            _mean_of(b, call, call.inputs[place])

    return rule


def _loss_backward(b: CallLowering, call: RecordedCall) -> None:
    with b.inside(call.name):
        with b.inside("aten::zeros_like"):
            b.host("aten::empty_like", call.inputs[1])
            fill(b, b.out())
        b.op(call.name, [*call.inputs, b.out()], call.outputs, writes=call.outputs, overload="grad_input")


def _binary_cross_entropy_backward(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    if call.inputs[4] == 1:
        with b.inside(call.name, "aten::div_"):
            b.op("aten::div_", [b.out(), 1], call.outputs, writes=call.outputs, overload="Tensor")


def _logits_loss(b: CallLowering, call: RecordedCall) -> None:
    """binary_cross_entropy_with_logits: a chain of elementwise ops and a mean."""
    x, target, weight, positive, reduction = (*call.inputs, None, None, 1)[:5]
    t = b.get(x)
    with b.inside(call.name):
        log, buffer, loss = b.new(t.shape, t.dtype), b.new((0,), t.dtype), b.new(t.shape, t.dtype)
        with b.inside("aten::log_sigmoid"):
            b.op("aten::log_sigmoid_forward", [x], [log, buffer])
        if isinstance(positive, Ref):
            rest, scaled = b.new(t.shape, t.dtype), b.new(t.shape, t.dtype)
            with b.inside("aten::sub"):
                b.op("aten::sub", [positive, 1, 1], [rest], overload="Tensor")
            b.op("aten::mul", [rest, target], [scaled], overload="Tensor")
            with b.inside("aten::add_"):
                b.op("aten::add_", [scaled, 1, 1], [scaled], writes=[scaled], overload="Tensor")
            b.op("aten::mul_", [log, scaled], [log], writes=[log], overload="Tensor")
        b.host("aten::empty_like", target)
        b.op("aten::fill_", [loss, 1], [loss], writes=[loss], overload="Scalar")
        b.op("aten::sub_", [loss, target, 1], [loss], writes=[loss], overload="Tensor")
        b.op("aten::mul_", [loss, x], [loss], writes=[loss], overload="Tensor")
        b.op("aten::sub_", [loss, log, 1], [loss], writes=[loss], overload="Tensor")
        if isinstance(weight, Ref):
            b.op("aten::mul_", [loss, weight], [loss], writes=[loss], overload="Tensor")
        if reduction == 1:
            with b.inside("aten::mean"):
                b.op("aten::mean", [loss, None, False, None], call.outputs, overload="dim")
        elif reduction == 2:
            with b.inside("aten::sum"):
                b.op("aten::sum", [loss, None, False, None], call.outputs, overload="dim_IntList")


def _logsumexp(b: CallLowering, call: RecordedCall) -> None:
    x, out = b.get(call.inputs[0]), b.get(b.out())
    with b.inside(call.name):
        kept, flat = b.new((out.elements,), x.dtype), b.new(out.shape, x.dtype)
        b.op("aten::amax", [call.inputs[0], call.inputs[1], True], [kept])
        size, infinite, shifted = b.new(out.shape, x.dtype), b.new(out.shape, "bool"), b.new(x.shape, x.dtype)
        with b.inside("aten::abs"):
            b.op("aten::abs", [flat, b.reshaped(size, (0,))], [size], overload="out")
        b.op("aten::eq", [size, 0.0], [infinite], overload="Scalar")
        b.op("aten::masked_fill_", [flat, infinite, 0], [flat], writes=[flat], overload="Scalar")
        b.op("aten::sub", [call.inputs[0], kept, 1], [shifted], overload="Tensor")
        b.op("aten::exp_", [shifted], [shifted], writes=[shifted])
        b.op("aten::sum", [shifted, call.inputs[1], False, None, b.out()], call.outputs, overload="IntList_out")
        b.op("aten::log_", [b.out()], call.outputs, writes=call.outputs)
        b.op("aten::add_", [b.out(), flat, 1], call.outputs, writes=call.outputs, overload="Tensor")


def _zeroed_first(b: CallLowering, call: RecordedCall) -> None:
    """A kernel that adds into its output, which is cleared before."""
    b.same()
    with b.inside(call.name):
        fill(b, b.out())


def _whole_input(*places: int) -> Rule:
    """The kernel wants these inputs contiguous."""

    def rule(b: CallLowering, call: RecordedCall) -> None:
        b.same()
        with b.inside(call.name):
            for place in places:
                contiguous(b, call.inputs[place])

    return rule


def _histogram(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    with b.inside(call.name, "aten::zeros"):
        b.host("aten::empty")
        fill(b, b.out())


def _masked_fill(b: CallLowering, call: RecordedCall) -> None:
    out = b.get(b.out())
    with b.inside(call.name):
        source = call.inputs[0]
        if isinstance(source, Ref) and b.get(source).shape != out.shape:
            source = b.reshaped(source, out.shape, (0,) * len(out.shape))
        with b.inside("aten::clone"):
            b.host("aten::empty_like", source)
            copy(b, b.out(), source)
        b.op(
            "aten::masked_fill_", [b.out(), *call.inputs[1:]], call.outputs, writes=call.outputs, overload=call.overload
        )


def _roll(b: CallLowering, call: RecordedCall) -> None:
    dims = call.inputs[2]
    if not isinstance(dims, list) or len(dims) <= 1:
        b.same()
        return
    t, source = b.get(call.inputs[0]), call.inputs[0]
    with b.inside(call.name):
        for i in range(len(dims)):
            out = b.out() if i == len(dims) - 1 else b.new(t.shape, t.dtype)
            b.op(call.name, [source, [call.inputs[1][i]], [dims[i]]], [out])  # type: ignore[index]
            source = out


_SCALAR_FORMS = [
    "add",
    "sub",
    "mul",
    "div",
    "remainder",
    "fmod",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "floor_divide",
]
RULES: dict[str, Rule] = {
    "aten::relu": renamed("aten::clamp_min", 0),
    "aten::relu_": renamed("aten::clamp_min_", 0),
    "aten::sum": _whole_form,
    "aten::mean": _whole_form,
    "aten::cumsum": _running,
    "aten::cumprod": _running,
    "aten::_foreach_norm": _foreach_norm,
    "aten::pow": _pow,
    "aten::rsub": _rsub,
    "aten::abs": _into("aten::abs"),
    "aten::hardtanh": _hardtanh,
    "aten::hardtanh_": _hardtanh,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::mse_loss": _loss(2),
    "aten::smooth_l1_loss": _loss(2),
    "aten::huber_loss": _loss(2),
    "aten::binary_cross_entropy": _loss(3),
    "aten::soft_margin_loss": _loss(2),
    "aten::mse_loss_backward": _loss_backward,
    "aten::smooth_l1_loss_backward": _loss_backward,
    "aten::huber_loss_backward": _loss_backward,
    "aten::binary_cross_entropy_backward": _binary_cross_entropy_backward,
    "aten::binary_cross_entropy_with_logits": _logits_loss,
    "aten::logsumexp": _logsumexp,
    "aten::nll_loss_backward": _zeroed_first,
    "aten::nll_loss2d_backward": _zeroed_first,
    "aten::max_pool2d_with_indices_backward": _zeroed_first,
    "aten::max_pool3d_with_indices_backward": _zeroed_first,
    "aten::adaptive_max_pool2d_backward": _zeroed_first,
    "aten::adaptive_max_pool3d_backward": _zeroed_first,
    "aten::avg_pool3d_backward": _zeroed_first,
    "aten::upsample_nearest2d_backward": _whole_input(0),
    "aten::histc": _histogram,
    "aten::masked_fill": _masked_fill,
    "aten::roll": _roll,
}
for _name in _SCALAR_FORMS:
    RULES[f"aten::{_name}"] = RULES[f"aten::{_name}_"] = _scalar_form
RULES |= {"aten::add": _add, "aten::add_": _add}
