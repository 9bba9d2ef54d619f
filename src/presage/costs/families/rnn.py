"""cuDNN's recurrent nets, both ways.

Law: per step and layer a product of hidden by gates that no other step can overlap, and the products over all steps.
"""

from __future__ import annotations

from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import Family, Law, ln
from presage.costs.rates import Rates

__all__ = ["FAMILY"]

NAMES = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
GATES = {0: 1, 1: 1, 2: 4, 3: 3}
KINDS = {"bfloat16": 0.0, "float16": 1.0, "float32": 2.0}
STEP = 4e-6  # seconds of the shortest step of one layer


class Rnn(NamedTuple):
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    ways: int
    gates: int


def rnn(call: Call) -> Rnn:
    at = 10 if call.name.endswith("backward") else 6
    x = call.tensors[0]
    first, second = x.sizes[:2]
    steps, batch = (second, first) if call.number(at + 4) else (first, second)
    mode, hidden, layers = int(call.number(at)), int(call.number(at + 1)), int(call.number(at + 3))
    return Rnn(steps, batch, x.sizes[-1], hidden, layers, 1 + int(call.number(at + 7)), GATES.get(mode, 4))


def law(call: Call, rates: Rates) -> Law:
    r = rnn(call)
    rate = rates.rate(call.tensors[0].dtype, call.tf32) * 0.4
    flops = 2.0 * r.steps * r.batch * r.gates * r.hidden * r.ways * r.layers * (r.hidden + r.inputs)
    flops *= 2 if call.name.endswith("backward") else 1
    return Law(r.steps * r.layers * r.ways * STEP + flops / rate, flops, 0.0)


def features(call: Call, law: Law) -> list[float]:
    r = rnn(call)
    kind = KINDS.get(call.tensors[0].dtype, 3.0)
    return [
        float(NAMES.index(call.name)), kind, float(call.tf32), ln(r.steps), ln(r.batch), ln(r.inputs), ln(r.hidden),
        float(r.layers), float(r.ways), float(r.gates), ln(law.flops), ln(law.seconds)
    ]  # fmt: skip


FAMILY = Family("rnn", frozenset(NAMES), law, features, rounds=150, leaves=7)
