"""A Prediction: how long a step will take, how sure that is, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from presage.costs.host_model import HostModel
from presage.costs.kernel_model import OpTime
from presage.engine import Timeline, simulate
from presage.graph.graph import Graph
from presage.hardware import Gpu
from presage.memory.step_memory import memory_profile
from presage.prediction import breakdown
from presage.prediction.breakdown import BreakdownPart, CostlyOps, Coverage
from presage.prediction.step_draws import NO_SPREAD, StepSpread, draw_durations, step_seconds
from presage.prediction.step_program import STREAM, StepTasks, program, step_tasks

if TYPE_CHECKING:
    from presage.prediction.rank_results import RankResults

__all__ = ["Bound", "Quantiles", "StepProgram", "StepResult", "predict_step", "step_program", "step_result"]

Bound: TypeAlias = Literal["gpu", "host", "communication"]
MS = 1e3
GPU_BOUND = 0.93  # above this share of active time a step is the GPU's
DRAWS, STEPS = 200, 8


@dataclass(frozen=True)
class Quantiles:
    """Seconds: what nine of ten runs lie between, and the middle."""

    mean: float
    p5: float
    p50: float
    p95: float

    @staticmethod
    def of(seconds: NDArray[np.float64]) -> Quantiles:
        return Quantiles(float(seconds.mean()), *map(float, np.quantile(seconds, [0.05, 0.5, 0.95])))


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A step as the engine takes it."""

    graph: Graph
    tasks: StepTasks
    host: HostModel
    host_seconds: NDArray[np.float64]  # by op
    host_total: float
    unknown_host_ops: tuple[str, ...]

    def step_seconds(self, draws: int, steps: int, spread: StepSpread, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds a step in each draw."""
        many = program(self.tasks, steps, self.host.calls, [op.name for op in self.graph.ops])
        step = np.repeat(np.arange(steps, dtype=np.int32), len(self.tasks))
        return step_seconds(many, draw_durations(self.tasks, steps, draws, spread, rng), step, steps)

    def at_pace(self, main: float, autograd: float) -> StepProgram:
        """The same step where the host's threads take so many times as long."""
        factor = np.array([main, autograd, 1.0])[np.minimum(self.tasks.lane, STREAM)]
        return replace(self, tasks=replace(self.tasks, seconds=self.tasks.seconds * factor))

    def usual(self, steps: int) -> float:
        """Seconds a step at the usual pace, with no spread at all."""
        return float(self.step_seconds(1, steps, NO_SPREAD, np.random.default_rng())[0])

    def timeline(self, steps: int) -> Timeline:
        """When each task of the first steps runs, at the usual pace."""
        many = program(self.tasks, steps, self.host.calls, [op.name for op in self.graph.ops])
        return simulate(many, np.tile(self.tasks.seconds, steps))


@dataclass(frozen=True)
class StepResult:
    """What a training step will take on a kind of machine. Times in seconds, memory in bytes."""

    source: str
    arguments: Mapping[str, str]
    gpu: str
    step: Quantiles
    gpu_active: float  # all kernels together
    host: float  # what the host needs by itself, at its usual pace
    peak_memory: int
    memory: int  # what the GPU has
    bound: Bound
    launches: int
    families: tuple[BreakdownPart, ...]
    modules: tuple[BreakdownPart, ...]
    costliest: tuple[CostlyOps, ...]
    coverage: Coverage
    notes: tuple[str, ...]
    draws: int
    steps: int
    many: RankResults | None = None  # where the step is one of several ranks
    drawn: tuple[float, ...] = field(default=(), repr=False, compare=False)  # seconds a step, by draw

    def to_json(self) -> dict[str, Any]:
        """Plain values with the units in their keys."""
        return {
            "kind": "prediction",
            "source": self.source,
            "arguments": dict(self.arguments),
            "gpu": self.gpu,
            "step_ms": {k: v * MS for k, v in asdict(self.step).items()},
            "gpu_active_ms": self.gpu_active * MS,
            "host_ms": self.host * MS,
            "peak_memory_bytes": self.peak_memory,
            "gpu_memory_bytes": self.memory,
            "bound": self.bound,
            "launches": self.launches,
            "breakdown": {p.name: _part(p) for p in self.families},
            "modules": {p.name: _part(p) for p in self.modules},
            "costliest": [_costly(c) for c in self.costliest],
            "coverage": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.coverage).items()},
            "notes": list(self.notes),
            "draws": self.draws,
            "steps": self.steps,
            **(self.many.to_json() if self.many else {}),
        }


def _part(p: BreakdownPart) -> dict[str, Any]:
    return {"ms": p.gpu * MS, "share": p.share, "host_ms": p.host * MS, "ops": p.ops}


def _costly(c: CostlyOps) -> dict[str, Any]:
    out = asdict(c)
    return {"op": out.pop("name"), "ms": out.pop("seconds") * MS, **out}


def step_program(graph: Graph, times: Sequence[OpTime], host: HostModel) -> StepProgram:
    """A captured step with what its ops cost the GPU and the host."""
    costs = host.costs(graph, [t.launches for t in times])
    return StepProgram(
        graph, step_tasks(graph, times, costs, host.calls), host, costs.seconds, costs.total, costs.unknown
    )


def predict_step(
    graph: Graph,
    times: Sequence[OpTime],
    gpu: Gpu,
    host: HostModel,
    *,
    spread: StepSpread | None = None,
    draws: int = DRAWS,
    steps: int = STEPS,
    seed: int = 0,
) -> StepResult:
    """The prediction for a captured step whose kernel times are given, one for each op of the graph."""
    built = step_program(graph, times, host)
    spread = spread or StepSpread(host.pace)
    drawn = built.step_seconds(draws, steps, spread, np.random.default_rng(seed))
    took = Quantiles.of(drawn)
    active = sum(t.seconds for t in times)
    bound: Bound = "gpu" if active > GPU_BOUND * took.p50 else "host"
    return replace(step_result(built, times, gpu, took, bound, draws, steps), drawn=tuple(drawn.tolist()))


def step_result(
    built: StepProgram, times: Sequence[OpTime], gpu: Gpu, took: Quantiles, bound: Bound, draws: int, steps: int
) -> StepResult:
    """All that is told of a step that takes so long."""
    graph, by_op = built.graph, built.host_seconds.tolist()
    return StepResult(
        source=graph.source,
        arguments=graph.arguments,
        gpu=gpu.name,
        step=took,
        gpu_active=sum(t.seconds for t in times if t.family != "communication"),
        host=built.host_total,
        peak_memory=memory_profile(graph, chip=gpu).peak_allocated,
        memory=gpu.memory,
        bound=bound,
        launches=sum(t.launches for t in times),
        families=breakdown.families(times, by_op),
        modules=breakdown.modules(graph, times, by_op),
        costliest=breakdown.costliest(graph, times, gpu),
        coverage=breakdown.coverage(graph, times, built.unknown_host_ops),
        notes=graph.notes,
        draws=draws,
        steps=steps,
    )
