"""Convolutions, normalisations, attention and recurrent layers: cuDNN's and PyTorch's own CUDA forms of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from presage.capture.backend import GPU
from presage.capture.calls import RecordedCall
from presage.capture.lowering import CallLowering, Rule
from presage.capture.rules_memory import contiguous, copy, fill, zeros_like
from presage.graph.builder import row_major_strides
from presage.graph.graph import Arg, Ref, Tensor

PARTIALS = 1 << 20  # most partial sums of a layer norm's gradients


def _channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    inner = shape[1]
    strides = [0] * len(shape)
    strides[1] = 1
    step = inner
    for d in range(len(shape) - 1, 1, -1):
        strides[d] = step
        step *= shape[d]
    strides[0] = step
    return tuple(strides)


def _is_channels_last(t: Tensor) -> bool:
    """PyTorch's test: strides in the order of channels-last, sizes of 1 notwithstanding."""
    if len(t.shape) not in (4, 5) or t.strides[1] == 0:
        return False
    least = 0
    order = [1, *range(len(t.shape) - 1, 1, -1), 0]
    for d in order:
        if t.shape[d] == 0 or t.strides[d] < least:
            return False
        if d == 0 and least == t.strides[1]:
            return False
        least = t.strides[d] * (t.shape[d] if t.shape[d] > 1 else 1)
    return True


def _layout(t: Tensor, weight: Tensor) -> tuple[int, ...]:
    """The strides cuDNN wants of `t`: channels-last if the input or the weight is."""
    return _channels_last(t.shape) if _is_channels_last(t) or _is_channels_last(weight) else row_major_strides(t.shape)


def _flat(b: CallLowering, ref: Arg) -> Arg:
    """A 1-D convolution runs as a 2-D one of height 1."""
    if not isinstance(ref, Ref) or len(b.get(ref).shape) != 3:
        return ref
    t = b.get(ref)
    with b.inside("aten::unsqueeze"):
        b.host("aten::as_strided", ref)
    return b.reshaped(ref, (*t.shape[:2], 1, t.shape[2]), (*t.strides[:2], t.strides[2] * t.shape[2], t.strides[2]))


def _is_depthwise(x: Tensor, w: Tensor, groups: int, transposed: bool) -> bool:
    channels = x.shape[1]
    return not transposed and channels == groups and groups > 1 and w.shape[0] % channels == 0


def _convolution(b: CallLowering, call: RecordedCall) -> None:
    x, w, bias, stride, padding, dilation, transposed, out_padding, groups = call.inputs[:9]
    assert isinstance(groups, int)
    with b.inside("aten::convolution", "aten::_convolution"):
        if len(b.get(x).shape) == 3:
            x = contiguous(b, x)  # so that a permuted one is not taken for channels-last
        x, w = _flat(b, x), _flat(b, w)
        xt, wt = b.get(x), b.get(w)
        wants = _layout(xt, wt)
        depthwise = _is_depthwise(xt, wt, groups, bool(transposed)) and wants == row_major_strides(xt.shape)
        x = contiguous(b, x, wants)
        if depthwise:
            name = "aten::_conv_depthwise2d" if len(xt.shape) == 4 else "aten::conv_depthwise3d"
            b.op(name, [x, w, list(wt.shape[2:]), bias, stride, padding, dilation], call.outputs)
            return
        out = _flat_output(b)
        if transposed:
            b.op(
                "aten::cudnn_convolution_transpose",
                [x, w, padding, out_padding, stride, dilation, groups, False, False, True],
                [out],
            )
        else:
            b.op("aten::cudnn_convolution", [x, w, padding, stride, dilation, groups, False, False, True], [out])
        if isinstance(bias, Ref):
            shape = (1, b.get(bias).shape[0], *[1] * (len(xt.shape) - 2))
            with b.inside("aten::reshape"):
                b.host("aten::view", bias)
            b.op("aten::add_", [out, b.reshaped(bias, shape), 1], [out], writes=[out], overload="Tensor")


def _flat_output(b: CallLowering) -> Ref:
    t = b.get(b.out())
    return b.reshaped(b.out(), (*t.shape[:2], 1, t.shape[2])) if len(t.shape) == 3 else b.out()


def _convolution_backward(b: CallLowering, call: RecordedCall) -> None:
    grad, x, w = call.inputs[:3]
    transposed, groups, mask = call.inputs[7], call.inputs[9], call.inputs[10]
    assert isinstance(groups, int) and isinstance(mask, list)
    b.same()
    with b.inside(call.name):
        if len(b.get(x).shape) == 3:
            x = contiguous(b, x)
        grad, x, w = _flat(b, grad), _flat(b, x), _flat(b, w)
        xt, wt, gt = b.get(x), b.get(w), b.get(grad)
        wants = _layout(xt, wt)
        channels_last = wants != row_major_strides(xt.shape)
        if _is_depthwise(xt, wt, groups, bool(transposed)) and not channels_last:
            contiguous(b, grad)
            contiguous(b, x)
        else:
            if not channels_last:
                grad = contiguous(b, grad)
            if mask[1]:
                contiguous(b, x, wants)
            if channels_last:
                _to_channels_last(b, grad)
        if mask[2]:
            out = b.call.outputs[-1] if b.call else 0
            dims: list[Arg] = [0, *range(2, len(gt.shape))]
            b.op("aten::sum", [grad, dims, False, None], [out], overload="dim_IntList")  # type: ignore[list-item]


def _to_channels_last(b: CallLowering, ref: Arg) -> None:
    t, wants = b.get(ref), _channels_last(b.get(ref).shape)
    if any(n > 1 and s != w for n, s, w in zip(t.shape, t.strides, wants, strict=True)):
        with b.inside("aten::to", "aten::_to_copy"):
            b.host("aten::empty")
            copy(b, b.new(t.shape, t.dtype, wants), ref)


def _last_power_of_2(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _reduction_grid(rows: int, channels: int) -> tuple[int, int]:
    """Blocks of the channels-last batch norm's reductions over channels and rows."""
    threads, per_thread, tile, most_rows = 512, 16, 32, 128
    x = min(_last_power_of_2(channels), tile)
    y = min(_last_power_of_2(ceil(rows / per_thread)), threads // x)
    if x * y != threads:
        x = min(_last_power_of_2(channels), threads // y)
    blocks = min(ceil(rows / (y * per_thread)), most_rows)
    return ceil(channels / x), 1 if blocks < 8 else blocks


def _batch_norm(b: CallLowering, call: RecordedCall) -> None:
    """Where several blocks share a channel they meet at semaphores, which are cleared first."""
    b.same()
    x = b.get(call.inputs[0] if call.name == "aten::native_batch_norm" else call.inputs[1])
    training = call.inputs[5] if call.name == "aten::native_batch_norm" else call.inputs[7]
    channels = x.shape[1]
    by_channel = _is_channels_last(x) or (x.is_contiguous and x.strides[1] == 1)
    if not by_channel or not training or not x.elements:
        return
    across, down = _reduction_grid(x.elements // channels, channels)
    if down > 1:
        with b.inside(call.name):
            values = 4 if call.name == "aten::native_batch_norm" else 2
            b.empty((values * channels * down,), "float32")
            with b.inside("aten::zeros"):
                fill(b, b.empty((across,), "int32"))


def _layer_norm(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    with b.inside(call.name):
        contiguous(b, call.inputs[0])


def _layer_norm_backward(b: CallLowering, call: RecordedCall) -> None:
    """Also an RMS norm's. Of many short rows the weights' gradients are summed in two steps."""
    b.same()
    grad, x, shape, wanted = call.inputs[0], call.inputs[1], call.inputs[2], call.inputs[-1]
    assert isinstance(shape, list) and isinstance(wanted, list)
    columns = prod(n for n in shape if isinstance(n, int))
    with b.inside(call.name):
        contiguous(b, grad)
        contiguous(b, x)
        rows = b.get(x).elements // max(columns, 1)
        if rows > 64 * 1024 and columns // 32 < GPU.sms // 2:
            sums = call.outputs[1 if wanted[0] else 0 :]
            size = (min(ceil(rows / 32), PARTIALS // columns), columns)
            parts = [b.new(size, b.get(out).dtype) for out in sums]
            for part, out in zip(parts, sums, strict=True):
                b.op("aten::sum", [part, [0], False, None], [out], overload="dim_IntList")


def _cudnn_attention(b: CallLowering, call: RecordedCall) -> None:
    q, k, v, bias, lse, dropout, causal, debug, scale = call.inputs[:9]
    lengths = b.get(q).shape[2], b.get(k).shape[2]
    with b.inside(call.name):
        b.op(
            "aten::_cudnn_attention_forward",
            [q, k, v, bias, None, None, *lengths, lse, dropout, causal, debug, scale],
            call.outputs,
        )


def _cudnn_attention_backward(b: CallLowering, call: RecordedCall) -> None:
    with b.inside(call.name):
        b.op("aten::_cudnn_attention_backward", call.inputs, call.outputs)


def _flash_attention(b: CallLowering, call: RecordedCall) -> None:
    q, k, v, dropout, causal, debug = call.inputs[:6]
    lengths = b.get(q).shape[2], b.get(k).shape[2]
    with b.inside(call.name):
        parts = [_swapped(b, t) for t in (q, k, v)]
        b.op(
            "aten::_flash_attention_forward",
            [*parts, None, None, *lengths, dropout, causal, debug, call.inputs[6], None, None, None, None],
            call.outputs,
        )


def _flash_attention_backward(b: CallLowering, call: RecordedCall) -> None:
    grad, q, k, v, out, lse, *rest = call.inputs
    with b.inside(call.name):
        parts = [_swapped(b, t) for t in (grad, q, k, v, out)]
        b.op("aten::_flash_attention_backward", [*parts, lse, *rest], call.outputs)


def _swapped(b: CallLowering, ref: Arg) -> Arg:
    """Heads and positions change places."""
    if not isinstance(ref, Ref):
        return ref
    t = b.get(ref)
    with b.inside("aten::transpose"):
        b.host("aten::as_strided", ref)
    order = (0, 2, 1, 3)
    return b.reshaped(ref, [t.shape[i] for i in order], [t.strides[i] for i in order])


def _efficient_attention(b: CallLowering, call: RecordedCall) -> None:
    q, k, v, bias, lse, dropout, causal, scale = call.inputs[:8]
    with b.inside(call.name):
        swapped = [_swapped(b, t) for t in (q, k, v)]
        b.op(
            "aten::_efficient_attention_forward",
            [*swapped, bias, None, None, None, None, dropout, 1 if causal else 0, lse, scale, None, None],
            call.outputs,
        )


def _efficient_attention_backward(b: CallLowering, call: RecordedCall) -> None:
    grad, q, k, v, bias, out, lse, seed, offset, dropout, _, causal, scale = call.inputs[:13]
    with b.inside(call.name):
        grad, q, k, v, out = (_swapped(b, t) for t in (grad, q, k, v, out))
        b.op(
            "aten::_efficient_attention_backward",
            [grad, q, k, v, bias, out, None, None, 0, 0, lse, dropout, seed, offset, 1 if causal else 0, False, scale,
             None, None, False],
            call.outputs,
        )  # fmt: skip
        with b.inside("aten::_efficient_attention_backward"):
            _efficient_backward_parts(b, grad, q, k, out)


def _efficient_backward_parts(b: CallLowering, grad: Arg, q: Arg, k: Arg, out: Arg) -> None:
    contiguous(b, grad)
    g, query = b.get(grad), b.get(q)
    batch, length, heads, depth = query.shape
    wide = "float32"
    if query.dtype != wide:  # kernels of half precision sum the rows themselves
        b.empty((batch, heads, length), wide)
        return
    product, rows = b.new(g.shape, wide), b.new(g.shape[:3], wide)
    b.op("aten::mul", [grad, out], [product], overload="Tensor")
    b.op("aten::sum", [product, [-1], False, None], [rows], overload="dim_IntList")
    turned = b.reshaped(rows, (batch, heads, length), (heads * length, 1, heads))
    contiguous(b, turned)
    b.drop(product)
    b.drop(rows)
    if b.get(k).shape[1] > 64:
        # partial sums of the queries' gradient, 64 rows and a 16-byte head each
        blocks = ceil(length / 64) * ceil(depth / 64)
        fill(b, b.empty((batch * heads * blocks * (64 * 64 * 4 + 16),), "uint8"))


def _recurrent(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    if call.inputs[10]:
        x = b.get(call.inputs[0])
        with b.inside(call.name):
            with b.inside("aten::transpose"):
                b.host("aten::as_strided", call.inputs[0])
            shape, strides = (x.shape[1], x.shape[0], x.shape[2]), (x.strides[1], x.strides[0], x.strides[2])
            contiguous(b, b.reshaped(call.inputs[0], shape, strides))


def _positions_first(b: CallLowering, ref: Arg) -> Arg:
    t = b.get(ref)
    with b.inside("aten::transpose"):
        b.host("aten::as_strided", ref)
    return b.reshaped(ref, (t.shape[1], t.shape[0], t.shape[2]), (t.strides[1], t.strides[0], t.strides[2]))


def _recurrent_backward(b: CallLowering, call: RecordedCall) -> None:
    b.same()
    x, buffer, hx, cx, grad, grad_h, grad_c = (call.inputs[i] for i in (0, 3, 4, 5, 7, 8, 9))
    with b.inside(call.name):
        for state, given in ((hx, grad_h), (cx, grad_c)):
            if isinstance(state, Ref) and not isinstance(given, Ref):
                zeros_like(b, state)
        batch_first = bool(call.inputs[14])
        for ref in (x, grad, x):
            if isinstance(ref, Ref):
                contiguous(b, _positions_first(b, ref) if batch_first else ref)
        weights = b.new(b.get(buffer).shape, b.get(buffer).dtype)
        with b.inside("aten::zeros"):
            b.host("aten::empty")
            fill(b, weights)


def _grouped(b: CallLowering, call: RecordedCall) -> None:
    """Low precision has its own kernel; the rest reads the group sizes back and multiplies group by group."""
    one, two, offsets = call.inputs[:3]
    x, y = b.get(one), b.get(two)
    if x.dtype == "bfloat16" or not isinstance(offsets, Ref):
        b.same()
        return
    groups = b.get(offsets).shape[0]
    with b.inside(call.name):
        with b.inside("aten::to", "aten::_to_copy"):
            copy(b, None, offsets, sync=True)
        for g in range(groups):
            a_shape, b_shape = _group_shapes(x.shape, y.shape, groups)
            left, right = b.reshaped(one, a_shape), b.reshaped(two, b_shape)
            out = b.reshaped(b.out(), (a_shape[0], b_shape[1]))
            b.op("aten::mm", [left, right, out], [out], writes=[out], overload="out")
            del g


def _group_shapes(x: Sequence[int], y: Sequence[int], groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One group's factors, the rows shared out evenly."""
    if len(x) == 2 and len(y) == 2:
        share = x[1] // groups
        return (x[0], share), (share, y[1])
    if len(x) == 2:
        return (x[0] // groups, x[1]), (y[1], y[2])
    return (x[1], x[2]), (y[0], y[1] // groups)


RULES: dict[str, Rule] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_fused_rms_norm": _layer_norm,
    "aten::_fused_rms_norm_backward": _layer_norm_backward,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "aten::_scaled_dot_product_flash_attention": _flash_attention,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
    "aten::_grouped_mm": _grouped,
}
