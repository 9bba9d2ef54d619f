"""A Machine: what is known of a kind of GPU and its host, and what a step's kernels take on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.costs.host_model import HostModel, host_model
from presage.costs.kernel_files import CALIBRATED, load
from presage.costs.kernel_model import KernelModel, OpTime, slowdown, throttled
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.step import STEPS, step_program
from presage.prediction.step_program import StepSpread

__all__ = ["Machine", "kernel_times", "machine"]

# Standard deviation of a step's GPU time about its prediction: on the GPU that was calibrated, and on another.
CALIBRATED_HERE, TRANSFERRED = 0.04, 0.2


@dataclass(frozen=True)
class Machine:
    """A kind of machine as far as it was measured: the kernels of its GPU, and its host."""

    kernels: KernelModel
    host: HostModel

    @property
    def spread(self) -> StepSpread:
        """How far runs may lie from the prediction."""
        return StepSpread(self.host.pace, kernels=TRANSFERRED if self.kernels.transferred else CALIBRATED_HERE)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where its times are from, if from another GPU."""
        return self.kernels.notes


def machine(gpu: str | Path = "h200") -> Machine:
    """A GPU by its name, or a calibration pack's folder; the host that was measured with it, or else the H200's."""
    kernels = load(gpu)
    try:
        host = host_model(kernels.gpu.key)
    except PresageError:
        host = host_model(CALIBRATED)
    return Machine(kernels, host)


def kernel_times(graph: Graph, where: Machine) -> list[OpTime]:
    """Kernel time per op under the power limit. Throttling depends on GPU idle time, taken from a simulation at full
    clock."""
    full, power = list(where.kernels.op_times(graph)), where.kernels.power
    if slowdown(power, full) == 1.0:
        return full
    usual = step_program(graph, full, where.host).usual(STEPS)
    return throttled(power, full, max(0.0, usual - sum(t.seconds for t in full)))
