"""Softmax and log-softmax both ways, and the losses.

Law: the bytes of the rows read and written over the bandwidth. Features: rows and columns, the types.
"""

from __future__ import annotations

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, codes, ln, moved_law, plain_features
from presage.costs.rates import REFERENCE_SMS, Rates

CODES = codes(
    "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss_backward "
    "mse_loss mse_loss_backward huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward "
    "nll_loss2d_forward nll_loss2d_backward binary_cross_entropy binary_cross_entropy_backward"
)
ALIKE = {
    "aten::nll_loss2d_forward": "aten::nll_loss_forward",
    "aten::nll_loss2d_backward": "aten::nll_loss_backward",
    "aten::binary_cross_entropy": "aten::huber_loss",
    "aten::binary_cross_entropy_backward": "aten::huber_loss_backward",
}


def law(call: Call, rates: Rates) -> Law:
    moved = sum(t.distinct for t in call.tensors)
    if "nll" in call.name:
        rows = min(t.elements for t in call.tensors if t.sizes) if any(t.sizes for t in call.tensors) else 1
        return moved_law(64.0 * rows, 0.0, rates)
    x = call.tensors[0]
    return moved_law(float(moved), float(x.nbytes), rates)


def features(call: Call, law: Law) -> list[float]:
    x = max(call.tensors, key=lambda t: t.elements)
    columns = x.sizes[-1] if x.sizes else 1
    name = ALIKE.get(call.name, call.name)
    rows = x.elements / max(1, columns)
    to_float = float(len(call.inputs) > 2 and call.inputs[2] is True)  # short numbers in, long ones out
    return [
        *plain_features(call, law, CODES[name], 2),
        ln(columns),
        ln(rows),
        to_float,
        rows / REFERENCE_SMS % 1 if rows < 5000 else -1.0,
    ]


FAMILY = KernelFamily("softmax", frozenset(CODES), law, features, rounds=600, leaves=31, works=lambda _: True)
