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
from presage.hardware import Platform, platforms
from presage.hardware import gpu as _gpu
from presage.hardware import platform as _platform
from presage.parallel.strategy import Strategy
from presage.parallel.strategy import strategy as _strategy
from presage.prediction.machine import kernel_times, machine
from presage.prediction.rank_set import RankOverride, RankSet, predict_rank_set, rank_set
from presage.prediction.step import DRAWS, STEPS, StepResult, predict_step
from presage.usercode import check_arguments


def predict(
    step: str | Path | Graph,
    gpu: str | Path = "h200",
    arguments: Mapping[str, Any] | None = None,
    *,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """Predict a training step on one GPU: FILE.py:FUNCTION with its arguments, a saved graph's file, or a Graph."""
    graph = step if isinstance(step, Graph) else step_graph(step, arguments)
    where = machine(gpu)
    times = kernel_times(graph, where)
    result = predict_step(
        graph, times, where.kernels.gpu, where.host, spread=where.spread, draws=draws, steps=steps, seed=seed
    )
    return replace(result, notes=(*result.notes, *where.notes))


def default_platform(gpu: str | None = None) -> Platform:
    """The platform of several ranks where only the GPU is given: a DGX node if there is one, else the largest."""
    wanted = _gpu(gpu or "h200")
    fits = [p for p in platforms() if p.gpu.key == wanted.key]
    if not fits:
        raise PresageError(f"no known platform has {wanted.name}: choose a platform (see `presage platforms`)")
    return max(fits, key=lambda p: (p.key.startswith("dgx"), p.domain))


def predict_ranks(
    step: str | Path | Graph | Sequence[Graph],
    ranks: int,
    strategy: str | Strategy = "ddp",
    platform: str | Platform | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    tensor: int = 1,
    kinds: Mapping[int, RankOverride] | None = None,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """Predict a training step on several ranks. `step` is that of one rank, captured as on a single GPU.

    `tensor`: tensor-parallel size. `kinds`: ranks with their own settings, by number; several graphs are their steps.
    """
    team = rank_set_of(step, ranks, strategy, platform, arguments, options=options, tensor=tensor, kinds=kinds)
    return predict_rank_set(team, machine(team.platform.gpu.key), draws=draws, steps=steps, seed=seed)


def rank_set_of(
    step: str | Path | Graph | Sequence[Graph],
    ranks: int,
    strategy: str | Strategy = "ddp",
    platform: str | Platform | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    tensor: int = 1,
    kinds: Mapping[int, RankOverride] | None = None,
) -> RankSet:
    """The ranks of a job with their tasks, for predictions and timelines."""
    if isinstance(step, str | Path):
        step = step_graph(step, arguments)
    graphs = [step] if isinstance(step, Graph) else list(step)
    place = _platform(platform) if isinstance(platform, str) else platform or default_platform()
    way = _strategy(strategy, options, tensor) if isinstance(strategy, str) else strategy
    return rank_set(graphs, place, way, ranks, machine(place.gpu.key), kinds)


def step_graph(step: str | Path, arguments: Mapping[str, Any] | None = None, *, variant: Variant = AS_WRITTEN) -> Graph:
    """The graph of FILE.py:FUNCTION, captured with these arguments (which needs torch), or of a saved file.

    `variant`: changes made around the code during the capture.
    """
    step = str(step)
    if save.is_saved(step) or step.endswith(save.SUFFIX):
        if arguments:
            raise PresageError(f"{step} is a saved graph, which takes no arguments")
        return save.read(step)
    try:
        from presage.capture import capture, load
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "torch":
            raise
        raise PresageError(
            "capturing a training step needs torch (its CPU build is enough): pip install 'presage[torch]'"
        ) from e
    function, values = load(step), dict(arguments or {})
    check_arguments(function, values)
    return capture(function, values, source=step, variant=variant)
