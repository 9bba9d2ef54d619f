"""How an op's results lie in memory, given how its inputs lie: the rules of PyTorch's CUDA ops.

A rule is trusted where it finds the old graph's strides from the old inputs; it is then asked about the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from presage.graph.arguments import aten
from presage.graph.families import family
from presage.graph.graph import Op, Tensor
from presage.whatif.edits.memory_layout import channels_last, contiguous, dense, is_channels_last, permuted

__all__ = ["iterated", "laid_out"]

Shape: TypeAlias = Sequence[int]
Rule: TypeAlias = Callable[[Shape, Sequence[Tensor]], tuple[int, ...]]


def laid_out(op: Op, out: Tensor, before: Sequence[Tensor], now: Sequence[Tensor]) -> tuple[int, ...]:
    """The strides of one of an op's results; those it had, where no rule knows better."""
    if len(out.strides) != len(out.shape) or all(a.strides == b.strides for a, b in zip(before, now, strict=True)):
        return out.strides
    rule = _rule(op)
    try:
        return rule(out.shape, now) if rule is not None and rule(out.shape, before) == out.strides else out.strides
    except (ValueError, IndexError):
        return out.strides


def _rule(op: Op) -> Rule | None:
    if op.name in RULES:
        return RULES[op.name]
    if op.name in ("aten::fill_", "aten::zero_"):
        return _like_last
    if op.name == "aten::copy_":
        written = op.within[-2:] in (("aten::reshape", "aten::clone"), ("aten::contiguous", "aten::clone"))
        return None if written else _like_last
    return iterated if family(op.name) == "elementwise" or op.name in ELEMENTWISE else None


def iterated(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Elementwise results: the order of the inputs' strides, the first that tells two dimensions apart deciding."""
    spread = [_spread(shape, t) for t in inputs if t.shape and len(t.strides) == len(t.shape)]
    fast = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(fast)):
        here = i
        for there in range(i - 1, -1, -1):
            order = _compared(fast[there], fast[here], spread, shape)
            if order > 0:
                fast[there], fast[here], here = fast[here], fast[there], there
            elif order < 0:
                break
    return permuted(shape, fast[::-1])


def _spread(shape: Shape, t: Tensor) -> list[int]:
    """Strides as of the whole shape: none where an element is used again."""
    missing = len(shape) - len(t.shape)
    if missing < 0:
        raise ValueError("more dimensions than the result")
    strides = [0 if n == 1 and shape[missing + d] != 1 else t.strides[d] for d, n in enumerate(t.shape)]
    return [0] * missing + strides


def _compared(a: int, b: int, strides: Sequence[Sequence[int]], shape: Shape) -> int:
    for s in strides:
        if s[a] == 0 or s[b] == 0:
            continue
        if s[a] != s[b]:
            return 1 if s[a] > s[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def _like(place: int) -> Rule:
    """As one of the inputs, without its holes; of another shape, channels-last if that is."""

    def rule(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        t = inputs[place]
        if tuple(shape) == t.shape:
            return dense(t)
        return channels_last(shape) if len(shape) == len(t.shape) and is_channels_last(t) else contiguous(shape)

    return rule


def _format_of(place: int) -> Rule:
    """Channels-last if one of the inputs is, else contiguous."""

    def rule(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        last = len(shape) in (4, 5) and is_channels_last(inputs[place])
        return channels_last(shape) if last else contiguous(shape)

    return rule


def _convolved(first: int) -> Rule:
    """Channels-last if the picture or the weight is."""

    def rule(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        last = any(is_channels_last(t) for t in inputs[first : first + 2])
        return channels_last(shape) if last and len(shape) > 3 else contiguous(shape)

    return rule


def _joined(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Channels-last if all pieces are."""
    last = len(shape) == 4 and all(is_channels_last(t) for t in inputs)
    return channels_last(shape) if last else contiguous(shape)


def _result_first(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Elementwise, the forward pass's tensor coming before the gradient."""
    return iterated(shape, inputs[::-1])


def _like_last(shape: Shape, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    return _like(-1)(shape, inputs)


ELEMENTWISE = frozenset(aten("native_dropout _fused_dropout hardtanh_backward"))
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        aten("cudnn_convolution cudnn_convolution_transpose _conv_depthwise2d conv_depthwise3d"), _convolved(0)
    ),
    "aten::convolution_backward": _convolved(1),
    **dict.fromkeys(aten("native_batch_norm cudnn_batch_norm cudnn_batch_norm_backward"), _like(0)),
    "aten::native_batch_norm_backward": _like(1),
    **dict.fromkeys(aten("threshold_backward leaky_relu_backward"), _result_first),
    **dict.fromkeys(
        aten(
            "max_pool2d_with_indices avg_pool2d adaptive_max_pool2d _adaptive_avg_pool2d upsample_nearest2d "
            "upsample_bilinear2d upsample_nearest2d_backward upsample_bilinear2d_backward"
        ),
        _format_of(0),
    ),
    **dict.fromkeys(
        aten("max_pool2d_with_indices_backward avg_pool2d_backward adaptive_max_pool2d_backward "
             "_adaptive_avg_pool2d_backward"),
        _format_of(1),
    ),
    "aten::cat": _joined,
}  # fmt: skip
