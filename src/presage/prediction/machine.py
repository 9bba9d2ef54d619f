"""Machine: the kernel model of a GPU and the model of its host; `kernel_times` of a step on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from presage.costs.closed_form import ClosedFormKernels
from presage.costs.cudnn import note
from presage.costs.host_factors import PACK_FILE
from presage.costs.host_model import HostModel, host_model
from presage.costs.kernel_files import CALIBRATED, is_pack, load
from presage.costs.kernel_model import KernelModel, OpTime, slowdown, throttled
from presage.costs.learned_files import HOST_FILE, is_learned, pack_gpu, read_learned
from presage.costs.lookups.captured import lookup_seconds
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.hardware import Gpu
from presage.prediction.host_choice import assumed_host, chosen_host, of_pack
from presage.prediction.step import STEPS, step_program
from presage.prediction.step_program import StepSpread

HOST_TOO = " and host costs"  # in a note on kernels of another GPU


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
        """Notes on kernel times taken from another GPU, and on a host that was given."""
        kernels = self.kernels.notes
        if self.host.assumed:
            return kernels
        return (*(note.replace(HOST_TOO, "") for note in kernels), *([self.host.note] if self.host.note else []))

    def engine_notes(self, times: Sequence[OpTime]) -> tuple[str, ...]:
        """How the kernels of convolutions were found, where these take long."""
        total = sum(t.seconds for t in times)
        if isinstance(self.kernels, ClosedFormKernels) or not total:
            return ()
        said = note(sum(t.seconds for t in times if t.family == "convolution") / total, self.kernels.gpu)
        return (said,) if said else ()

    def host_notes(self, bound: str) -> tuple[str, ...]:
        """Which host is assumed, where that decides."""
        return (self.host.note,) if self.host.assumed and bound == "host" else ()


def machine(gpu: str | Path = "h200", host: str | Path | None = None) -> Machine:
    """The machine of a GPU name or a pack's folder, with a host by its name or file; without one that of the pack, else
    the reference."""
    kernels: KernelModel = read_learned(gpu) if is_learned(gpu) else load(gpu)
    try:
        usual = host_model(kernels.gpu.key)
    except PresageError:
        usual = host_model(CALIBRATED)
    if host is not None:
        return Machine(kernels, chosen_host(str(host), usual))
    pack = Path(gpu)
    if is_learned(gpu) and (pack / HOST_FILE).is_file():
        return Machine(kernels, chosen_host(str(pack / HOST_FILE), usual))
    measured = is_pack(gpu) and (pack / PACK_FILE).is_file()
    return Machine(kernels, of_pack(pack, usual) if measured else assumed_host(usual))


def capture_gpu(gpu: str | Path, where: Machine) -> str:
    """The GPU that code sees while it is captured: of a pack, the one it is of."""
    if is_learned(gpu):
        return pack_gpu(Path(gpu))
    return where.kernels.gpu.key if is_pack(gpu) else str(gpu)


def kernel_times(graph: Graph, where: Machine) -> list[OpTime]:
    """Kernel time per op under the power limit. Throttling depends on GPU idle time, taken from a simulation at full
    clock."""
    full, power = _with_lookups(graph, list(where.kernels.op_times(graph)), where.kernels.gpu), where.kernels.power
    if slowdown(power, full) == 1.0:
        return full
    usual = step_program(graph, full, where.host).usual(STEPS)
    return throttled(power, full, max(0.0, usual - sum(t.seconds for t in full)))


def _with_lookups(graph: Graph, times: list[OpTime], gpu: Gpu) -> list[OpTime]:
    """Kernel times with those of table-batched lookups by the embedding model."""
    for place, seconds in lookup_seconds(graph, gpu).items():
        times[place] = replace(times[place], seconds=seconds, source="model")
    return times
