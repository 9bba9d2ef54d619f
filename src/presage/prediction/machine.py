"""Machine: the kernel model of a GPU and the model of its host; `kernel_times` of a step on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.costs.host_factors import PACK_FILE, REFERENCE
from presage.costs.host_model import HostModel, host_model
from presage.costs.kernel_files import CALIBRATED, is_pack, load
from presage.costs.kernel_model import KernelModel, OpTime, slowdown, throttled
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.host_choice import assumed_host, chosen_host, of_pack
from presage.prediction.step import STEPS, step_program
from presage.prediction.step_program import StepSpread

# Standard deviation of a step's GPU time about its prediction: on the GPU that was calibrated, and on another.
CALIBRATED_HERE, TRANSFERRED = 0.04, 0.2
HOST_TOO = " and host costs"  # in a note on kernels of another GPU


@dataclass(frozen=True)
class Machine:
    """Kernel model of a GPU and model of its host."""

    kernels: KernelModel
    host: HostModel

    @property
    def spread(self) -> StepSpread:
        """Spread of step times around the prediction."""
        return StepSpread(self.host.pace, kernels=TRANSFERRED if self.kernels.transferred else CALIBRATED_HERE)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on kernel times taken from another GPU, and on a host that was given."""
        kernels = self.kernels.notes
        if self.host.assumed:
            return kernels
        return (*(note.replace(HOST_TOO, "") for note in kernels), *([self.host.note] if self.host.note else []))

    def host_notes(self, bound: str) -> tuple[str, ...]:
        """Which host is assumed, where that decides."""
        return (self.host.note,) if self.host.assumed and (bound == "host" or self.host.name != REFERENCE) else ()


def machine(gpu: str | Path = "h200", host: str | Path | None = None) -> Machine:
    """The machine of a GPU name or a calibration pack's folder, with a host by its name or file; without one
    that of the pack, else the reference."""
    kernels = load(gpu)
    try:
        usual = host_model(kernels.gpu.key)
    except PresageError:
        usual = host_model(CALIBRATED)
    if host is not None:
        return Machine(kernels, chosen_host(str(host), usual))
    pack = Path(gpu)
    measured = is_pack(gpu) and (pack / PACK_FILE).is_file()
    return Machine(kernels, of_pack(pack, usual) if measured else assumed_host(usual))


def kernel_times(graph: Graph, where: Machine) -> list[OpTime]:
    """Kernel time per op under the power limit. Throttling depends on GPU idle time, taken from a simulation at full
    clock."""
    full, power = list(where.kernels.op_times(graph)), where.kernels.power
    if slowdown(power, full) == 1.0:
        return full
    usual = step_program(graph, full, where.host).usual(STEPS)
    return throttled(power, full, max(0.0, usual - sum(t.seconds for t in full)))
