"""A Machine: what is known of a kind of GPU and its host, and what a step's kernels take on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from presage.costs.host import HostModel, host_model
from presage.costs.kernel_model import OpTime, slowdown, throttled
from presage.costs.kernels import op_times
from presage.costs.models import CALIBRATED, Models, load
from presage.errors import PresageError
from presage.graph.graph import Graph
from presage.prediction.step import STEPS, step_program
from presage.prediction.step_draws import StepSpread

__all__ = ["Machine", "kernel_times", "machine"]

# Standard deviation of a step's GPU time about its prediction: on the GPU that was calibrated, and on another.
CALIBRATED_HERE, TRANSFERRED = 0.04, 0.2


@dataclass(frozen=True)
class Machine:
    """A kind of machine as far as it was measured: the kernels of its GPU, and its host."""

    models: Models
    host: HostModel

    @property
    def spread(self) -> StepSpread:
        """How far runs may lie from the prediction."""
        return StepSpread(self.host.pace, kernels=TRANSFERRED if self.models.transferred else CALIBRATED_HERE)

    @property
    def notes(self) -> tuple[str, ...]:
        other = self.models.transferred
        if not other:
            return ()
        name, tables = self.models.gpu.name, self.models.own_of or "it"
        if not self.models.own:
            return (f"{name} was not calibrated: kernel corrections and host costs are those measured with an {other}",)
        return (
            f"{name} was not calibrated: bf16 products and attention follow tables measured on {tables} (attention's "
            f"way back its way there); other kernels' corrections and host costs are those measured with an {other}",
        )


def machine(gpu: str | Path = "h200") -> Machine:
    """A GPU by its name, or a calibration pack's folder; the host that was measured with it, or else the H200's."""
    models = load(gpu)
    try:
        host = host_model(models.gpu.key)
    except PresageError:
        host = host_model(CALIBRATED)
    return Machine(models, host)


def kernel_times(graph: Graph, where: Machine) -> list[OpTime]:
    """What each op's kernels take. How far the power limit slows them depends on how long the GPU waits for the host,
    which the step at the full clock tells."""
    full, power = op_times(where.models, graph), where.models.power
    if slowdown(power, full) == 1.0:
        return full
    usual = step_program(graph, full, where.host).usual(STEPS)
    return throttled(power, full, max(0.0, usual - sum(t.seconds for t in full)))
