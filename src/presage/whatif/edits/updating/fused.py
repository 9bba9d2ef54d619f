"""The fused form of torch's optimizers (2.11 to 2.13): `_fused_adam` and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from presage.graph.graph import Arg, Ref
from presage.whatif.edits.pen import Pen
from presage.whatif.edits.updating.lists import ONE_NAMES, Lists, argument
from presage.whatif.edits.updating.numbers import betas, decay_of, eps, rate_of
from presage.whatif.edits.updating.updates import Update

__all__ = ["found_inf", "fused"]

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


def found_inf(pen: Pen, found: Ref) -> None:
    """What a gradient scaler does for a fused optimizer: the sum of what it found, one number a device."""
    pen.host("to")
    out = pen.new((), pen.get(found).dtype)
    pen.op("add", [found, 0, 1], [out], overload="Tensor", names=ONE_NAMES["add"])


def fused(pen: Pen, group: Sequence[Update], found: int | None = None, decoupled: bool = False) -> None:
    """A group's updates in one fused op, after its step counts, which are then on the GPU.

    `found`: what a gradient scaler found, by which the op and its step counts are left as they are; `decoupled`: Adam's
    weight decay, if any, is AdamW's.
    """
    skipped = None if found is None else Ref(found)
    lists = Lists(pen, group)
    if skipped is not None:
        pen.host("to")
    if group[0].algorithm != "sgd":
        lists.count()
    name, names, rest = _fused_adam(lists, decoupled) if group[0].algorithm == "adam" else _fused_other(lists)
    written = [*lists.params, *lists.grads, *(r for state in lists.states for r in state)]
    written += lists.steps if name == "_fused_adagrad_" else []
    inputs = [argument(lists.params), argument(lists.grads), *rest, None, skipped]
    pen.op(name, inputs, names=names, writes=written)
    if skipped is not None and lists.steps:
        lists.on("sub", "List", lists.steps, [skipped] * len(group), 1)


_Fused: TypeAlias = tuple[str, tuple[str, ...], list[Arg]]  # a name, the inputs' names, the inputs after the gradients


def _fused_adam(lists: Lists, decoupled: bool) -> _Fused:
    u, states = lists.first, [argument(s) for s in lists.states]
    maxima = states[2] if "amsgrad" in u.flags else []
    sizes = [rate_of(u), *betas(u), decay_of(u), eps(u)]
    flags = ["amsgrad" in u.flags, "maximize" in u.flags]
    name = "_fused_adamw_" if decoupled and "decay" not in u.flags else "_fused_adam_"
    return name, _ADAM, [*states[:2], maxima, argument(lists.steps), *sizes, *flags]


def _fused_other(lists: Lists) -> _Fused:
    u, states = lists.first, [argument(s) for s in lists.states]
    upward = "maximize" in u.flags
    if u.algorithm == "adagrad":
        rate = -u.scalar("mul(g)", u.scalar("addcdiv(p,g,t)", -1e-2))
        return (
            "_fused_adagrad_",
            _ADAGRAD,
            [*states, argument(lists.steps), rate, 0.0, decay_of(u), eps(u, 1e-10), upward],
        )
    rate = -u.scalar("add(p,s)", u.scalar("add(p,g)", -1e-3))
    sizes = [decay_of(u), u.scalar("mul(s)"), rate, 1 - u.scalar("add(s,g)", 1.0)]
    return "_fused_sgd_", _SGD, [states[0] if states else [], *sizes, "nesterov" in u.flags, upward, False]
