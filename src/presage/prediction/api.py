"""`presage.predict("train.py:build", gpu="h200")`: from training code to a prediction, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from presage.costs.host import host_model
from presage.costs.optime import OpTime
from presage.errors import PresageError
from presage.graph import save
from presage.graph.graph import Graph
from presage.hardware import gpu as find_gpu
from presage.prediction.step import DRAWS, STEPS, Prediction, StepProgram, predict_step, step_program

__all__ = ["kernel_times", "predict", "program_of"]

KERNELS = "presage.costs.kernels"


def predict(
    step: str | Path | Graph,
    gpu: str = "h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> Prediction:
    """How long a training step will take: FILE.py:FUNCTION with its arguments, a saved graph's file, or a Graph."""
    graph = step if isinstance(step, Graph) else _graph(str(step), arguments or {})
    facts = find_gpu(gpu)
    host, times = host_model(facts.key), kernel_times(graph, facts.key)
    return predict_step(graph, times, facts, host, draws=draws, steps=steps, seed=seed)


def program_of(graph: Graph, gpu: str = "h200") -> StepProgram:
    """The step as tasks on lanes, for timelines."""
    key = find_gpu(gpu).key
    return step_program(graph, kernel_times(graph, key), host_model(key))


def kernel_times(graph: Graph, gpu: str) -> Sequence[OpTime]:
    """What each op's kernels take on a GPU that was calibrated."""
    models = getattr(import_module(KERNELS), "kernel_times", None) if find_spec(KERNELS) else None
    if models is None:
        raise PresageError("this presage has no kernel models yet: it cannot say how long a step's kernels take")
    found: Sequence[OpTime] = models(graph, gpu)
    return found


def _graph(step: str, arguments: Mapping[str, Any]) -> Graph:
    if save.is_saved(step) or step.endswith(save.SUFFIX):
        if arguments:
            raise PresageError(f"{step} is a saved graph, which takes no arguments")
        return save.read(step)
    from presage.capture import capture, load

    return capture(load(step), dict(arguments), source=step)
