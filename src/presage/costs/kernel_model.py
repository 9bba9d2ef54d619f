"""KernelModel: the seam between ops and seconds. Calibrated models and closed-form laws are its two kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np

from presage.costs.power import Power
from presage.graph.graph import Graph
from presage.hardware import Gpu

# How a time was found: a fitted model or law of the op's family, that of a similar op, FLOPs and bytes, no kernels.
Source: TypeAlias = Literal["model", "likeness", "roofline", "none"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """GPU time of one op at the full clock, and what the power limit needs to know of it."""

    seconds: float
    launches: int  # kernels, copies and memsets
    family: str  # presage.graph.families.family(op.name)
    source: Source
    at_once: float = 1.0  # kernels that run concurrently: recurrent layers use several streams
    flops: float = 0.0  # as its law counts them; 0 where no law applies
    nbytes: float = 0.0  # bytes moved, as its law counts them
    watts: float = 0.0  # power demand at the full clock
    tensor_cores: bool = False  # slowed down by the power limit


class KernelModel(Protocol):
    """Kernel times of one GPU."""

    @property
    def gpu(self) -> Gpu: ...

    @property
    def power(self) -> Power: ...

    @property
    def transferred(self) -> str:
        """The GPU its parameters were measured on, where that is another one; else empty."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about where the times are from."""

    def op_times(self, graph: Graph) -> Sequence[OpTime]:
        """The time of every op of a graph, in order, at the full clock."""


def slowdown(power: Power, times: Sequence[OpTime], idle: float = 0.0) -> float:
    """How much longer tensor-core kernels take in a step of these kernels and so many idle seconds."""
    tensor = np.array([t.tensor_cores for t in times], np.bool_)
    if not tensor.any():
        return 1.0
    seconds, demand = np.array([t.seconds for t in times]), np.array([t.watts for t in times])
    factor = 1.0
    for _ in range(30):
        now = seconds * np.where(tensor, factor, 1.0)
        energy = float((demand * seconds).sum()) + power.base * (idle + float((now - seconds).sum()))
        mean = energy / max(float(now.sum()) + idle, 1e-12)
        factor = 0.5 * factor + 0.5 * (1.0 + power.slope * max(0.0, mean - power.limit) / power.limit)
    return factor


def throttled(power: Power, times: Sequence[OpTime], idle: float = 0.0) -> list[OpTime]:
    """The times under the power limit."""
    factor = slowdown(power, times, idle)
    return [replace(t, seconds=t.seconds * factor) if t.tensor_cores else t for t in times]
