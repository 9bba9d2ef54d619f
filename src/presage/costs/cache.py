"""L2 cache: which inputs of an op are still there when it runs, from the order of ops in the step.

Between two uses of a tensor other ops read and write. The calibration pack says how much of that it takes until a
tensor is gone: what was read counts more than what was written. An op's time then lies between its times with a warm
and with a cold cache, by the share of its input bytes that has to come from memory.

What a GEMM has read is farther away for the next op (`CallTime.at`). An op on lists of tensors goes over them in order,
so between two uses of one of them all others come.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from presage.costs.families import FAMILIES
from presage.graph.graph import Graph, Op

NEVER = -1e18  # bytes of traffic ago


@dataclass(frozen=True)
class Cache:
    """A tensor is all there up to `kept` bytes of other traffic (and half its own), gone from `lost` bytes on."""

    kept: float
    lost: float
    read_weight: float  # a byte read pushes out as much as so many bytes written

    def cold(self, distance: float, size: float) -> float:
        return min(1.0, max(0.0, (distance + size / 2 - self.kept) / (self.lost - self.kept)))


def changed(graph: Graph, op: Op) -> set[int]:
    """Storages of the inputs that an op changes in place."""
    return {graph.tensors[i].storage for i in op.writes}


def input_shares(graph: Graph, cache: Cache) -> npt.NDArray[np.float64]:
    """For each op the shares of its input bytes that are not in the cache, and that are, but a GEMM has read them."""
    traffic, last = 0.0, dict.fromkeys(range(len(graph.storages)), NEVER)
    multiplied: set[int] = set()  # storages that a GEMM read last
    out = np.zeros((len(graph.ops), 2))
    for i, op in enumerate(graph.ops):
        if not op.kernels:
            continue
        inputs = {t.storage: min(t.nbytes, graph.storages[t.storage].nbytes) for t in graph.inputs_of(op)}
        total = sum(inputs.values())
        of_list = op.name in FAMILIES["optimizer"].ops
        missing = {s: n * cache.cold(traffic - last[s], total if of_list else n) for s, n in inputs.items()}
        cold, far = sum(missing.values()), sum(n - missing[s] for s, n in inputs.items() if s in multiplied)
        out[i] = (cold / total, far / total) if total else 0.0
        written = {t.storage: t.nbytes for t in graph.outputs_of(op)} | {s: inputs[s] for s in changed(graph, op)}
        traffic += sum(written.values()) + cache.read_weight * cold
        multiplied = (multiplied | set(inputs) if op.name in FAMILIES["gemm"].ops else multiplied - set(inputs)) - set(
            written
        )
        last |= dict.fromkeys((*inputs, *written), traffic)
    return out
