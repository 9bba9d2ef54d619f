"""The foreach form of torch's optimizers (2.11 to 2.13): `_multi_tensor_adam` and so on, capturable or not."""

from __future__ import annotations

from collections.abc import Sequence

from presage.whatif.edits.pen import Pen
from presage.whatif.edits.updating.lists import Lists
from presage.whatif.edits.updating.numbers import betas, eps, rate_of
from presage.whatif.edits.updating.updates import Update

__all__ = ["foreach"]


def foreach(pen: Pen, group: Sequence[Update], counted: bool, capturable: bool) -> None:
    """A group's updates over lists; `counted`: the host counts steps."""
    lists = Lists(pen, group)
    write = {"adam": _adam, "sgd": _sgd, "adagrad": _adagrad, "rmsprop": _rmsprop}[group[0].algorithm]
    write(lists, counted, capturable or bool(lists.steps))


def _begun(o: Lists, counted: bool, capturable: bool) -> bool:
    """Gradients as they are taken, and the step counted; whether the gradients are the update's own."""
    own = o.negated()
    if capturable:
        o.count()
    elif counted:
        o.count_on_host()
    return own


def _adam(o: Lists, counted: bool, capturable: bool) -> None:
    own = _begun(o, counted, capturable)
    o.decayed(own)
    if "decoupled" in o.first.flags:
        o.on("mul", "Scalar", o.params, o.first.scalar("mul(p)", 1.0))
    average, square = o.states[:2]
    beta1, beta2 = betas(o.first)
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
    o.on("add", "Scalar", root, eps(o.first))
    o.on("addcdiv", "ScalarList", o.params, average, root, o.scalars("addcdiv(p,s,t)", -1e-3))


def _adam_on_gpu(o: Lists, beta1: float, beta2: float) -> None:
    """The end of a capturable Adam: corrections are numbers on the GPU, which divide tensors one by one."""
    first, second = (o.make("pow", "ScalarAndTensor", beta, o.steps) for beta in (beta1, beta2))
    o.on("sub", "Scalar", first, 1)
    o.on("sub", "Scalar", second, 1)
    o.on("neg", "", second)
    o.on("div", "Scalar", first, rate_of(o.first))
    o.on("reciprocal", "", first)
    o.on("sqrt", "", second)
    square = o.states[1]
    if "amsgrad" in o.first.flags:
        square = o.on("maximum", "List", o.states[2], square)
    root = o.make("sqrt", "", square)
    o.on("div", "List", root, second)
    o.on("add", "Scalar", root, eps(o.first))
    o.on("div", "List", root, first)
    o.on("addcdiv", "Scalar", o.params, o.states[0], root, 1)


def _sgd(o: Lists, counted: bool, capturable: bool) -> None:
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


def _adagrad(o: Lists, counted: bool, capturable: bool) -> None:
    own = o.negated()
    if o.steps:
        o.count()
    elif counted:
        o.count_on_host()
    own = o.decayed(own)
    o.look_on_host(1 if counted and not capturable else 0)
    o.on("addcmul", "Scalar", o.states[0], o.grads, o.grads, 1)
    root = o.on("add", "Scalar", o.make("sqrt", "", o.states[0]), eps(o.first, 1e-10))
    rates = [u.scalar("mul(g)", u.scalar("addcdiv(p,g,t)", -1e-2)) for u in o.group]
    scaled = o.on("mul", "ScalarList", o.grads, rates) if own else o.make("mul", "ScalarList", o.grads, rates)
    o.on("addcdiv", "Scalar", o.params, scaled, root, 1)


def _rmsprop(o: Lists, counted: bool, capturable: bool) -> None:
    own = _begun(o, counted, capturable)
    o.decayed(own)
    flags, square = o.first.flags, o.states[0]
    o.on("mul", "Scalar", square, o.first.scalar("mul(s)", 0.99))
    o.on("addcmul", "Scalar", square, o.grads, o.grads, 1 - o.first.scalar("mul(s)", 0.99))
    if "centered" in flags:
        o.on("lerp", "Scalar", o.states[1], o.grads, 1 - o.first.scalar("mul(s)", 0.99))
        root = o.on("sqrt", "", o.make("addcmul", "Scalar", square, o.states[1], o.states[1], -1))
    else:
        root = o.make("sqrt", "", square)
    o.on("add", "Scalar", root, eps(o.first))
    if "momentum" in flags:
        buffer = o.on("mul", "Scalar", o.states[-1], o.first.scalar("mul(s)", 0.9, 1))
        o.on("addcdiv", "Scalar", buffer, o.grads, root, 1)
        o.on("add", "List", o.params, buffer, o.first.scalar("add(p,s)", -1e-2))
    else:
        o.on("addcdiv", "Scalar", o.params, o.grads, root, o.first.scalar("addcdiv(p,g,t)", -1e-2))
