"""Layer, RMS, batch and group normalisation, both ways.

Law: the activations read and written over the bandwidth (two reads forward, four transfers backward). Features: rows
and columns of what is normalised, the layout, the types.
"""

from __future__ import annotations

from math import ceil, prod

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates

BLOCK = 2e9  # bytes a second that one block gets through, two to an SM

CODES = codes(
    "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm "
    "cudnn_batch_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward"
)


def activations(call: Call) -> Shape:
    """The activations (backward: their gradient): what comes first, but for cuDNN's backward."""
    return call.tensors[0]


def law(call: Call, rates: Rates) -> Law:
    """Statistics of a channel are one block's work where channels come first: few channels leave the GPU idle."""
    x = activations(call)
    backward = call.name.endswith("backward")
    moved = moved_law((3 if backward else 2) * x.nbytes, x.nbytes, rates, 2)
    if "batch" not in call.name or _channels_last(x):
        return moved
    waves = ceil(x.sizes[1] / (2 * rates.sms))
    one = x.nbytes / x.sizes[1] * (2 if backward else 1) / BLOCK
    return Law(max(moved.seconds, waves * one), 0.0, moved.bytes)


def _channels_last(x: Shape) -> bool:
    return len(x.strides) > 2 and x.strides[1] == 1 and x.sizes[1] > 1


def features(call: Call, law: Law) -> list[float]:
    x = activations(call)
    channels = x.sizes[1] if len(x.sizes) > 1 else 1
    if "layer" in call.name or "rms" in call.name:
        place = 1 if not call.name.endswith("backward") else 2
        columns = prod(int(n) for n in call.numbers(place)) or (x.sizes[-1] if x.sizes else 1)
        channels = batch = 1
    else:
        columns, batch = max(1, prod(x.sizes[2:])), x.sizes[0]
    rows = x.elements / max(1, columns)
    groups = call.number(8 if call.name.endswith("backward") else 6) if "group" in call.name else 0.0
    widths = [float(t.width) for t in call.tensors[1:3]] + [0.0] * 2
    blocks = channels / REFERENCE_SMS if channels > 1 else rows / REFERENCE_SMS
    return [
        *plain_features(call, law, CODES[call.name], 2), ln(channels), ln(columns), ln(rows), float(_channels_last(x)),
        ln(batch), *widths[:2], ln(ceil(blocks)), blocks / ceil(blocks), ln(x.elements / channels), groups,
        ln(batch * max(1.0, groups)),
    ]  # fmt: skip


FAMILY = KernelFamily("norm", frozenset(CODES), law, features, rounds=1000, leaves=31, works=lambda _: True)
