"""`presage.predict("train.py:build", gpu="h200")`: from training code to a prediction, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from presage.capture.variants import AS_WRITTEN, Variant
from presage.errors import PresageError
from presage.graph import save
from presage.graph.graph import Graph
from presage.hardware import Platform
from presage.hardware import platform as _platform
from presage.parallel.strategy import Strategy
from presage.parallel.strategy import strategy as _strategy
from presage.prediction.machine import Machine, kernel_times, machine
from presage.prediction.rank_set import RankOverride, RankSet, predict_rank_set, rank_set
from presage.prediction.step import DRAWS, STEPS, StepProgram, StepResult, predict_step, step_program

__all__ = ["Machine", "kernel_times", "machine", "predict", "predict_ranks", "program_of", "rank_set_of", "step_graph"]


def predict(
    step: str | Path | Graph,
    gpu: str | Path = "h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """How long a training step will take: FILE.py:FUNCTION with its arguments, a saved graph's file, or a Graph."""
    graph = step if isinstance(step, Graph) else step_graph(step, arguments)
    where = machine(gpu)
    times = kernel_times(graph, where)
    found = predict_step(
        graph, times, where.kernels.gpu, where.host, spread=where.spread, draws=draws, steps=steps, seed=seed
    )
    return replace(found, notes=(*found.notes, *where.notes))


def program_of(graph: Graph, gpu: str | Path = "h200") -> StepProgram:
    """The step as tasks on lanes, for timelines."""
    where = machine(gpu)
    return step_program(graph, kernel_times(graph, where), where.host)


def predict_ranks(
    step: str | Path | Graph | Sequence[Graph],
    ranks: int,
    strategy: str | Strategy = "ddp",
    platform: str | Platform = "dgx-h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    tensor: int = 1,
    kinds: Mapping[int, RankOverride] | None = None,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """How long a training step will take on many ranks. `step` is one rank's, captured as for one GPU.

    `tensor`: ranks that share each layer. `kinds`: ranks that differ, by number; several graphs are their steps.
    """
    found = rank_set_of(step, ranks, strategy, platform, arguments, options=options, tensor=tensor, kinds=kinds)
    return predict_rank_set(found, machine(found.platform.gpu.key), draws=draws, steps=steps, seed=seed)


def rank_set_of(
    step: str | Path | Graph | Sequence[Graph],
    ranks: int,
    strategy: str | Strategy = "ddp",
    platform: str | Platform = "dgx-h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    tensor: int = 1,
    kinds: Mapping[int, RankOverride] | None = None,
) -> RankSet:
    """The ranks of a job as the engine takes them, for predictions and timelines."""
    if isinstance(step, str | Path):
        step = step_graph(step, arguments)
    graphs = [step] if isinstance(step, Graph) else list(step)
    place = _platform(platform) if isinstance(platform, str) else platform
    way = _strategy(strategy, options, tensor) if isinstance(strategy, str) else strategy
    return rank_set(graphs, place, way, ranks, machine(place.gpu.key), kinds)


def step_graph(step: str | Path, arguments: Mapping[str, Any] | None = None, *, variant: Variant = AS_WRITTEN) -> Graph:
    """The graph of FILE.py:FUNCTION, captured with these arguments (which needs torch), or of a saved file.

    `variant`: changes made around the code while it is captured.
    """
    step = str(step)
    if save.is_saved(step) or step.endswith(save.SUFFIX):
        if arguments:
            raise PresageError(f"{step} is a saved graph, which takes no arguments")
        return save.read(step)
    from presage.capture import capture, load

    return capture(load(step), dict(arguments or {}), source=step, variant=variant)
