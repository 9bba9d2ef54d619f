"""Softmax and log-softmax both ways, and the losses.

Law: the bytes of the rows read and written over the bandwidth; a loss reads a sector a row. The loss of images gives
each image a block or a few, which go through its places 1024 at a time. Features: rows and columns along the dimension
of the classes and what lies behind it (channels of images go by another kernel), the types.
"""

from __future__ import annotations

from math import ceil, prod

from presage.costs.call import Call, Shape
from presage.costs.families.common import KernelFamily, Law, alignment, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates

CODES = codes(
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss_backward "
    "mse_loss mse_loss_backward huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward "
    "nll_loss2d_forward nll_loss2d_backward binary_cross_entropy binary_cross_entropy_backward"
)
ALIKE = {
    "aten::binary_cross_entropy": "aten::huber_loss",
    "aten::binary_cross_entropy_backward": "aten::huber_loss_backward",
}


PLACES, SHARED, ROUND = 1024, 128, 0.8e-6  # places at a time; times 1024 for another block; seconds of each time


def law(call: Call, rates: Rates) -> Law:
    moved = sum(t.distinct for t in call.tensors)
    if "nll_loss2d" in call.name:
        return _image_loss(call, rates)
    if "nll" in call.name:
        rows = min(t.elements for t in call.tensors if t.sizes) if any(t.sizes for t in call.tensors) else 1
        return moved_law(64.0 * rows, 0.0, rates)
    x = call.tensors[0]
    return moved_law(float(moved), float(x.nbytes), rates)


def _image_loss(call: Call, rates: Rates) -> Law:
    """Bytes, or the places of an image that its few blocks go through one after another."""
    images, classes, *sides = next(t.sizes for t in call.tensors if len(t.sizes) == 4)
    moved = moved_law(float(images * prod(sides) * (8 + 4 * min(8, classes))), 0.0, rates)
    blocks = max(1, prod(sides) // PLACES // SHARED)
    rounds = ceil(prod(sides) / PLACES / blocks) * ceil(images * blocks / rates.sms)
    return Law(max(moved.seconds, rates.floor + rounds * ROUND), 0.0, moved.bytes)


def along(call: Call, x: Shape) -> int:
    """The dimension of the classes."""
    if "nll_loss2d" in call.name:
        return 1
    place = 2 if "backward_data" in call.name else 1
    named = call.number(place, -1.0) if "softmax" in call.name else -1.0
    return int(named) % max(1, len(x.sizes))


def features(call: Call, law: Law) -> list[float]:
    x = max(call.tensors, key=lambda t: t.elements)
    dim = along(call, x)
    columns, behind = (x.sizes[dim], prod(x.sizes[dim + 1 :])) if x.sizes else (1, 1)
    name = ALIKE.get(call.name, call.name)
    rows = x.elements / max(1, columns)
    to_float = float(len(call.inputs) > 2 and call.inputs[2] is True)  # short numbers in, long ones out
    return [
        *plain_features(call, law, CODES[name], 2),
        ln(columns),
        ln(rows),
        to_float,
        rows / REFERENCE_SMS % 1 if rows < 5000 else -1.0,
        ln(behind),
        ln(rows / max(1, behind)),
        float(min(columns, 64)),
        float(alignment(columns, 16)),
    ]


FAMILY = KernelFamily(
    "softmax", frozenset(CODES), law, features, rounds=800, leaves=31, bound=0.5, works=lambda _: True
)
