"""Machine: the kernel model of a GPU and the model of its host; `kernel_times` of a step on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.costs.host_model import HostModel, host_model
from presage.costs.kernel_files import CALIBRATED, load
from presage.costs.kernel_model import KernelModel, OpTime, slowdown, throttled
from presage.costs.learned_files import is_learned, read_learned
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.step import STEPS, step_program
from presage.prediction.step_program import StepSpread


@dataclass(frozen=True)
class Machine:
    """Kernel model of a GPU and model of its host."""

    kernels: KernelModel
    host: HostModel

    def spread(self, graph: Graph) -> StepSpread:
        """Spread of a step's times around the prediction."""
        return StepSpread(self.host.pace, kernels=self.kernels.error(graph))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on kernel times taken from another GPU."""
        return self.kernels.notes


def machine(gpu: str | Path = "h200") -> Machine:
    """The machine of a GPU name or a pack's folder; its host as measured, else that of the H200."""
    kernels: KernelModel = read_learned(gpu) if is_learned(gpu) else load(gpu)
    try:
        host = host_model(kernels.gpu.key)
    except PresageError:
        host = host_model(CALIBRATED)
    return Machine(kernels, host)


def capture_gpu(gpu: str | Path, where: Machine) -> str:
    """The GPU that code sees while it is captured: of a pack, the one it is of."""
    return where.kernels.gpu.key if Path(gpu).is_dir() else str(gpu)


def kernel_times(graph: Graph, where: Machine) -> list[OpTime]:
    """Kernel time per op under the power limit. Throttling depends on GPU idle time, taken from a simulation at full
    clock."""
    full, power = list(where.kernels.op_times(graph)), where.kernels.power
    if slowdown(power, full) == 1.0:
        return full
    usual = step_program(graph, full, where.host).usual(STEPS)
    return throttled(power, full, max(0.0, usual - sum(t.seconds for t in full)))
