"""What of an op's inputs is still in the L2 cache when it runs, from the order of ops in the step.

Between two uses of a tensor other ops read and write. The calibration pack says how much of that it takes until a
tensor is gone (`cache` table): what was read counts more than what was written. An op's time then lies between its
times with a warm and with a cold cache, by the share of its input bytes that has to come from memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from presage.graph.graph import Graph, Op


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


def cold_shares(graph: Graph, cache: Cache) -> npt.NDArray[np.float64]:
    """For each op the share of its input bytes that is not in the cache."""
    traffic, last = 0.0, dict.fromkeys(range(len(graph.storages)), -1e18)
    out = np.zeros(len(graph.ops))
    for i, op in enumerate(graph.ops):
        if not op.kernels:
            continue
        inputs = {t.storage: min(t.nbytes, graph.storages[t.storage].nbytes) for t in graph.inputs_of(op)}
        total = sum(inputs.values())
        cold = sum(n * cache.cold(traffic - last[s], n) for s, n in inputs.items())
        out[i] = cold / total if total else 0.0
        written = {t.storage: t.nbytes for t in graph.outputs_of(op)} | {s: inputs[s] for s in changed(graph, op)}
        traffic += sum(written.values()) + cache.read_weight * cold
        for storage in (*inputs, *written):
            last[storage] = traffic
    return out
