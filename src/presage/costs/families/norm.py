"""Layer, RMS, batch and group normalisation, and the norms of weights, both ways.

Law: the activations read and written over the bandwidth (two reads forward, four transfers backward). Statistics of a
channel, a group or a weight's row are one block's work, so few of them leave most of the GPU idle: a group of two
million numbers takes a millisecond whatever the GPU's bandwidth. Features: rows and columns of what is normalised, the
work of a block and waves of blocks, the layout, the types.

Held out (11,000 draws): geomean 7.0%, p90 14%.
"""

from __future__ import annotations

from math import ceil, prod

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates
from presage.hardware import Gpu

BLOCK = 2e9  # bytes a second that one block gets through, two to an SM
ROWWISE, THREADS = ("aten::native_layer_norm", "aten::_fused_rms_norm"), 128  # a block of so many threads for a row
# Seconds of a block for a number of its group, alone on an SM, and of a weight's row; backward.
GROUPED, WEIGHED, WEIGHED_BACKWARD = 0.55e-9, 1.6e-9, 2.4e-9
COLUMNS, LINE, LINE_BACKWARD = 16, 8e-9, 11e-9  # of a weight normalised along its last dimension, a block's

CODES = codes(
    "native_layer_norm native_layer_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm "
    "cudnn_batch_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "_weight_norm_interface _weight_norm_interface_backward"
)


def activations(call: Call) -> Shape:
    """The activations (backward: their gradient): what comes first, but for cuDNN's backward."""
    return call.tensors[0]


def law(call: Call, rates: Rates) -> Law:
    """Bytes over bandwidth, or the blocks that find statistics, in waves."""
    x = activations(call)
    backward = call.name.endswith("backward")
    moved = moved_law((3 if backward else 2) * x.nbytes, x.nbytes, rates, 2)
    blocks, each = statistics(call)
    if not blocks:
        return moved
    slots = (2 if "batch" in call.name else 1) * rates.sms
    busy = ceil(blocks / slots) * each
    return Law(moved.seconds + busy if "group" in call.name else max(moved.seconds, busy), 0.0, moved.bytes)


def statistics(call: Call) -> tuple[int, float]:
    """Blocks that find statistics, and seconds of each; none where many blocks share them."""
    x, backward = activations(call), call.name.endswith("backward")
    if call.name == "aten::native_group_norm":
        blocks = x.sizes[0] * max(1, int(call.number(6)))
        return blocks, x.elements / max(1, blocks) * GROUPED
    if "weight" in call.name:
        if call.number(4 if backward else 2):  # along the last dimension: a block has a few columns, all their rows
            lines = x.elements / max(1, x.sizes[-1])
            return ceil(x.sizes[-1] / COLUMNS), lines * (LINE_BACKWARD if backward else LINE)
        rows = x.sizes[0]
        return rows, x.elements / max(1, rows) * (WEIGHED_BACKWARD if backward else WEIGHED)
    if "batch" in call.name and not _channels_last(x):
        return x.sizes[1], x.nbytes / max(1, x.sizes[1]) * (2 if backward else 1) / BLOCK
    return 0, 0.0


def from_memory(call: Call, gpu: Gpu) -> float:
    """A row's second read comes from L2 where the rows in flight, one to a block, fit with what is written of them."""
    if call.name not in ROWWISE:
        return 1.0
    x = activations(call)
    in_flight = 2 * gpu.sms * (gpu.threads_per_sm // THREADS) * _columns(call) * x.width
    return 2 / 3 if in_flight <= gpu.l2 else 1.0


def _columns(call: Call) -> int:
    x, place = activations(call), 1 if not call.name.endswith("backward") else 2
    return prod(int(n) for n in call.numbers(place)) or (x.sizes[-1] if x.sizes else 1)


def _channels_last(x: Shape) -> bool:
    return len(x.strides) > 2 and x.strides[1] == 1 and x.sizes[1] > 1


def features(call: Call, law: Law) -> list[float]:
    x = activations(call)
    channels = x.sizes[1] if len(x.sizes) > 1 else 1
    if "layer" in call.name or "rms" in call.name:
        columns = _columns(call)
        channels = batch = 1
    elif "weight" in call.name:
        along = x.sizes[-1] if call.number(4 if call.name.endswith("backward") else 2) else x.sizes[0]
        channels, columns, batch = along, x.elements // max(1, along), 1
    else:
        columns, batch = max(1, prod(x.sizes[2:])), x.sizes[0]
    rows = x.elements / max(1, columns)
    groups = call.number(8 if call.name.endswith("backward") else 6) if "group" in call.name else 0.0
    widths = [float(t.width) for t in call.tensors[1:3]] + [0.0] * 2
    blocks = channels / REFERENCE_SMS if channels > 1 else rows / REFERENCE_SMS
    many, each = statistics(call)
    return [
        *plain_features(call, law, CODES[call.name], 2), ln(channels), ln(columns), ln(rows), float(_channels_last(x)),
        ln(batch), *widths[:2], ln(ceil(blocks)), blocks / ceil(blocks), ln(x.elements / channels), groups,
        ln(batch * max(1.0, groups)), ln(each), ln(many), many / REFERENCE_SMS / ceil(max(1, many) / REFERENCE_SMS),
        ln(each * ceil(many / REFERENCE_SMS) / law.seconds), float(alignment(columns, 32)), float(columns % 512),
        float(alignment(channels, 32)), ln(x.elements / max(1.0, batch * groups)),
    ]  # fmt: skip


FAMILY = KernelFamily(
    "norm", frozenset(CODES), law, features, rounds=1200, leaves=47, works=lambda _: True, from_memory=from_memory
)
