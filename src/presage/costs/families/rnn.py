"""cuDNN's recurrent nets, both ways.

Law: a sum of parts with fitted weights, by path. LSTM and GRU of few units in float32 or float16 run in one persistent
kernel a layer: a step is a wait for all thread blocks and a small product. Others launch a product [batch, hidden] x
[hidden, gates x hidden] and an elementwise kernel a step: its latency grows with the depth of the product, its work
with batch and width. Both: the product of the inputs over all steps, and backward weight and bias gradients at the end.

Sweep: 5,450 draws.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from presage.costs.call import Call
from presage.costs.families.common import KernelFamily, Law, alignment, ln
from presage.costs.rates import REFERENCE_SMS, Rates

NAMES = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
GATES = {0: 1, 1: 1, 2: 4, 3: 3}
OVERLAP = 0.85  # of a second layer's work beside the first's
PERSISTENT = 128  # hidden units up to which one kernel goes over all steps

# Weights of the parts below, by least squares of ln(time) over the draws that are not held out.
WEIGHTS: dict[str, tuple[float, ...]] = {
    "forward persistent": (10.0, 0.0, 2.7, 0.0, 0.916, 0.151, 20.2, 0.0),
    "backward persistent": (14.1, 0.483, 0.883, 0.0, 5.12, 0.176, 41.7, 1.29),
    "forward tf32": (7.31, 2.83, 0.827, 7.61, 5.31, 1.43, 7.53, 0.0),
    "backward tf32": (0.0, 7.38, 3.19, 15.5, 8.31, 1.19, 1.9, 0.0),
    "forward 16 bits": (5.67, 3.11, 0.626, 7.03, 4.09, 0.0, 3.81, 0.201),
    "backward 16 bits": (0.0, 3.66, 0.848, 28.3, 3.53, 0.0, 52.1, 0.0),
    "forward fp32": (7.52, 0.12, 0.0345, 0.0, 10.1, 0.234, 0.0, 15.4),
    "backward fp32": (22.7, 2.55, 0.0925, 6.43, 6.07, 0.967, 0.0, 0.0),
}


class Rnn(NamedTuple):
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    ways: int
    gates: int
    width: int


def rnn(call: Call) -> Rnn:
    at = 10 if call.name.endswith("backward") else 6
    x = call.tensors[0]
    first, second = x.sizes[:2]
    steps, batch = (second, first) if call.number(at + 4) else (first, second)
    if len(x.sizes) == 2:
        steps, batch = packed_sequences(call, first, at + 8)
    mode, hidden, layers = int(call.number(at)), int(call.number(at + 1)), int(call.number(at + 3))
    return Rnn(
        steps, batch, x.sizes[-1], hidden, max(1, layers), 1 + int(call.number(at + 7)), GATES.get(mode, 4), x.width
    )


def packed_sequences(call: Call, rows: int, place: int) -> tuple[int, int]:
    """Steps of the longest of packed sequences, and how many sequences a step has on average. A profiler's trace does
    not tell them: there all are taken to be as long, as many as the hidden state has."""
    alive, hidden = call.numbers(place), call.shape(4)
    count = hidden.sizes[1] if hidden is not None and len(hidden.sizes) == 3 else 1
    steps = len(alive) or ceil(rows / max(1, count))
    return steps, max(1, round(rows / steps))


def path(call: Call) -> str:
    r, dtype = rnn(call), call.tensors[0].dtype
    way = "backward" if call.name.endswith("backward") else "forward"
    most = PERSISTENT if r.gates > 1 else 2 * PERSISTENT * (dtype == "float32")
    if r.hidden <= most and dtype in ("float32", "float16"):
        return f"{way} persistent"
    return f"{way} {'16 bits' if dtype != 'float32' else 'tf32' if call.tf32 else 'fp32'}"


def flops(r: Rnn) -> tuple[float, float]:
    """FLOPs of the GEMMs within steps, and of those over all steps."""
    cell = 2.0 * r.steps * r.batch * r.gates * r.hidden * r.ways
    over = cell * r.inputs + (r.layers - 1) * cell * r.hidden * r.ways
    return cell * r.hidden * r.layers, over


def parts(call: Call, rates: Rates) -> list[float]:
    r, rate = rnn(call), rates.rate(call.tensors[0].dtype, call.tf32)
    inside, over = flops(r)
    cells, all_gates = r.steps * r.layers * r.ways, r.gates * r.hidden
    tiles = ceil(r.batch / 64) * ceil(all_gates / 64)
    tile = 2.0 * 64 * 64 * r.hidden * rates.sms / rate
    back = call.name.endswith("backward")
    odd = r.hidden * r.width % 16 != 0  # rows that vectors of 16 bytes do not fit
    return [
        rates.floor * r.layers * r.ways, rates.floor * cells, rates.floor * cells * r.hidden / 512,
        (inside + over) * odd / rate, (over + back * inside) / rate, cells * ceil(tiles / rates.sms) * tile,
        cells * r.batch * all_gates * r.width / rates.bandwidth, rates.floor * cells * ceil(r.batch / 32) / 8,
    ]  # fmt: skip


def lanes(call: Call, launches: float) -> float:
    """How many kernels run side by side: layers and directions have streams of their own, which almost fill where every
    step launches (two layers of an LSTM: 1.85 in a trace); a persistent kernel runs alone."""
    r = rnn(call)
    return 1.0 + OVERLAP * (min(r.layers * r.ways, 2) - 1) if launches > r.steps else 1.0


def law(call: Call, rates: Rates) -> Law:
    seconds = sum(w * part for w, part in zip(WEIGHTS[path(call)], parts(call, rates), strict=True))
    r = rnn(call)
    launches = 8.0 * r.layers if "persistent" in path(call) else 2.0 * r.steps * r.layers * r.ways
    return Law(seconds, sum(flops(r)) * (2 if call.name.endswith("backward") else 1), 0.0, launches)


def features(call: Call, law: Law) -> list[float]:
    r = rnn(call)
    cells, gates = r.steps * r.layers * r.ways, r.gates * r.hidden
    return [
        float(sorted(WEIGHTS).index(path(call))), ln(r.batch), ln(r.hidden), float(r.gates), ln(law.seconds / cells),
        ln(law.flops / law.seconds), float(r.ways), ln(r.inputs), ln(r.steps), float(r.layers), float(r.width),
        float(call.tensors[0].dtype == "float16"), float(alignment(r.hidden)), float(alignment(r.inputs)),
        float(alignment(r.batch)), ln(r.batch * gates), ln(gates * r.hidden * r.width), float(r.hidden),
        ceil(r.batch / 64) * ceil(gates / 64) / REFERENCE_SMS, ln(r.batch * r.hidden), ln(r.steps * r.batch),
        *(ln(p / law.seconds + 1e-6) for p in parts(call, REFERENCE)),
    ]  # fmt: skip


REFERENCE = Rates(4.2e12, {"bf16": 7.9e14, "fp16": 7.9e14, "tf32": 4e14, "fp32": 5.3e13, "fp64": 2.7e13}, REFERENCE_SMS)
FAMILY = KernelFamily(
    "rnn", frozenset(NAMES), law, features, rounds=700, leaves=63, rate=0.08, bound=0.2, computes=True, at_once=lanes
)
