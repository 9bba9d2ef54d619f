"""StepResult: time and memory of a training step; `predict_step` computes it from kernel times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from presage.costs.host_model import HostModel, Pace
from presage.costs.kernel_model import OpTime
from presage.engine import Timeline, simulate
from presage.engine.timeline import latest_ends
from presage.graph.graph import Graph
from presage.hardware import Gpu
from presage.memory.step_memory import MemoryProfile, memory_profile
from presage.prediction import breakdown
from presage.prediction.breakdown import (
    BreakdownPart,
    CostlyOps,
    Coverage,
    RecordedPart,
    RooflinePoint,
    roofline_points,
)
from presage.prediction.result import Floats, Quantiles, Result, ResultKind, model_error
from presage.prediction.step_program import (
    GPU_SD,
    NO_SPREAD,
    STREAM,
    StepSpread,
    StepTasks,
    draw_durations,
    loading_pace,
    program,
    step_seconds,
    step_tasks,
    with_loading,
)

if TYPE_CHECKING:
    from presage.prediction.draws.distribution import StepDistribution
    from presage.prediction.rank_results import RankResults

Bound: TypeAlias = Literal["gpu", "host", "loading", "communication"]
MS = 1e3
P95 = 1.6448536  # standard deviations of a normal distribution
GPU_BOUND = 0.93  # above this share of active time a step is the GPU's
DRAWS, STEPS = 200, 8
SIMULATED = 5  # steps of a timeline: the last but one is like all that follow, and the host is at work on the next


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A captured step as tasks on lanes, with its host times."""

    graph: Graph
    tasks: StepTasks
    host: HostModel
    host_seconds: NDArray[np.float64]  # by op
    host_total: float
    unknown_host_ops: tuple[str, ...]

    def step_seconds(self, draws: int, steps: int, spread: StepSpread, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds per step of each draw."""
        many = program(self.tasks, steps, self.host.calls, [op.name for op in self.graph.ops])
        step = np.repeat(np.arange(steps, dtype=np.int32), len(self.tasks))
        return step_seconds(many, draw_durations(self.tasks, steps, draws, spread, rng), step, steps)

    def at_pace(self, main: float, autograd: float) -> StepProgram:
        """The step with the host threads slowed down by these factors."""
        factor = np.array([main, autograd, 1.0])[np.minimum(self.tasks.lane, STREAM)]
        return replace(self, tasks=replace(self.tasks, seconds=self.tasks.seconds * factor))

    def usual(self, steps: int) -> float:
        """Seconds per step at the usual pace, without spread."""
        return float(self.step_seconds(1, steps, NO_SPREAD, np.random.default_rng())[0])

    def variation(self) -> float:
        """How far a slow step (p95) of a run lies above a usual one: what the host runs ahead evens out its pace."""
        count, runs, pace = 28, 10, self.host.pace
        many = program(self.tasks, count, self.host.calls, [op.name for op in self.graph.ops])
        spread = StepSpread(Pace(0.0, pace.step_sd, pace.step_correlation), GPU_SD, 0.0)
        took = draw_durations(self.tasks, count, runs, spread, np.random.default_rng(0))
        step = np.repeat(np.arange(count, dtype=np.int32), len(self.tasks))
        steps = np.diff(latest_ends(many, took, step, count), axis=0)[8:]
        usual, slow = np.quantile(steps, 0.5), np.quantile(steps, 0.95)
        return max(float(slow / usual), math.exp(P95 * GPU_SD)) - 1 if usual > 0 else 0.0

    def timeline(self, steps: int) -> Timeline:
        """Start and end of each task of the first steps, at the usual pace."""
        many = program(self.tasks, steps, self.host.calls, [op.name for op in self.graph.ops])
        return simulate(many, np.tile(self.tasks.seconds, steps))


@dataclass(frozen=True, eq=False)
class StepWindow:
    """A timeline and the seconds of it that are one steady-state step: from the end of the previous step to its own."""

    timeline: Timeline
    window: tuple[float, float]


@dataclass(frozen=True, eq=False)
class StepBasis:
    """What a StepResult was computed from: the step's tasks, its kernel times, its memory and the GPU."""

    program: StepProgram
    times: tuple[OpTime, ...]  # by op
    gpu: Gpu
    memory: MemoryProfile

    @cached_property
    def window(self) -> StepWindow:
        """The first steps, simulated once."""
        timeline = self.program.timeline(SIMULATED)
        ends = timeline.end.reshape(SIMULATED, -1).max(axis=1, initial=0.0)
        return StepWindow(timeline, (float(ends[-3]), float(ends[-2])))

    @cached_property
    def variation(self) -> float:
        return self.program.variation()

    @cached_property
    def roofline(self) -> tuple[RooflinePoint, ...]:
        """Time, work and limits of each kind of op."""
        return roofline_points(self.program.graph, self.times, self.gpu)


@dataclass(frozen=True)
class DataLoading:
    """Loading the batches of a step."""

    seconds: float  # of one process, for all batches of a step
    workers: int  # processes; with none the training process loads between its steps
    pace: float  # seconds a step for which batches arrive: of all workers, pinned where the loader does that
    keeps_up: bool  # the workers load as fast as the step needs it; else the step time is that of loading


@dataclass(frozen=True, repr=False)
class StepResult(Result):
    """Step time and memory of a training step on one GPU, or on several ranks (`many`)."""

    source: str
    arguments: Mapping[str, str]
    gpu: str
    step: Quantiles
    gpu_active: float  # all kernels together
    host: float  # host time of a step at its usual pace, GPU waits excluded
    peak_memory: int
    gpu_memory: int  # capacity
    bound: Bound
    launches: int
    families: tuple[BreakdownPart, ...]
    modules: tuple[BreakdownPart, ...]
    costliest: tuple[CostlyOps, ...]
    coverage: Coverage
    notes: tuple[str, ...]
    draw_count: int
    steps: int
    basis: StepBasis = field(repr=False, compare=False)
    assumptions: tuple[breakdown.StepAssumption, ...] = ()  # values that the code read and that are not known
    many: RankResults | None = None  # with several ranks
    draws: Floats = field(default_factory=lambda: np.empty(0), repr=False, compare=False)  # seconds per step, by draw
    spread: StepDistribution | None = field(default=None, repr=False, compare=False)  # under a noise model

    @property
    def kind(self) -> ResultKind:
        return "step" if self.many is None else "ranks"

    @property
    def title(self) -> str:
        return self.source

    @property
    def hardware(self) -> str:
        return self.gpu if self.many is None else self.many.platform

    @property
    def memory_bytes(self) -> float:
        return self.peak_memory

    @property
    def memory_known(self) -> bool:
        return self.graph.memory_known

    @property
    def jitter(self) -> float:
        """Of steps drawn under a noise model; else the host's pace where it loads batches, or what simulated steps
        vary."""
        if self.spread is not None:
            return self.spread.steps[0.95].value / self.spread.steps[0.5].value - 1
        pace = self.basis.program.host.pace
        return math.exp(P95 * pace.step_sd) - 1 if self.bound == "loading" else self.basis.variation

    @property
    def breakdown(self) -> dict[str, float]:
        """Kernel seconds by family of ops."""
        return {part.name: part.gpu for part in self.families}

    @property
    def graph(self) -> Graph:
        """The captured step; with several ranks that of the first."""
        return self.basis.program.graph

    @property
    def data_loading(self) -> DataLoading | None:
        """What loading its batches takes on the host that captured it, where a script has a data loader."""
        found = self.graph.loading
        if not found:
            return None
        seconds, workers = found["batch_seconds"] * found["batches"], int(found["workers"])
        pace = loading_pace(self.graph)
        return DataLoading(seconds, workers, pace, workers > 0 and self.bound != "loading" and pace <= self.step.p50)

    @property
    def memory(self) -> MemoryProfile:
        """Memory over the step; with several ranks that of the first."""
        return self.basis.memory

    @property
    def timeline(self) -> Timeline:
        return self.basis.window.timeline

    @property
    def timeline_names(self) -> dict[int, str]:
        """The name of each rank of the timeline."""
        if self.many is None:
            return {0: f"predicted: {self.source}"}
        more = {k.rank: f" (and {k.ranks - 1} like it)" if k.ranks > 1 else "" for k in self.many.kinds}
        return {rank: f"rank {rank}{text}" for rank, text in more.items()}

    @property
    def window(self) -> StepWindow:
        """One steady-state step of the timeline."""
        return self.basis.window

    @property
    def recorded(self) -> tuple[RecordedPart, ...]:
        """Kernels of the profiler's trace that the step is from against these, by family."""
        return breakdown.recorded(self.graph, self.basis.times)

    @property
    def roofline(self) -> tuple[RooflinePoint, ...]:
        """How near the GPU's limits each kind of op runs."""
        return self.basis.roofline

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
            "host_machine": _host_machine(self.basis.program.host),
            "peak_memory_bytes": self.peak_memory if self.memory_known else None,
            "gpu_memory_bytes": self.gpu_memory,
            **self.verdict_json(),
            "bound": self.bound,
            "launches": self.launches,
            "breakdown": {p.name: _part(p) for p in self.families},
            "modules": {p.name: _part(p) for p in self.modules},
            "costliest": [_costly(c) for c in self.costliest],
            "coverage": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.coverage).items()},
            "assumptions": [a.to_json() for a in self.assumptions],
            "notes": list(self.notes),
            "draws": self.draw_count,
            "steps": self.steps,
            **({"recorded": list(map(_recorded, found))} if (found := self.recorded) else {}),
            **({} if self.data_loading is None else {"data_loading": asdict(self.data_loading)}),
            **(self.many.to_json() if self.many else {}),
            **({"distribution": self.spread.to_json()} if self.spread else {}),
        }


def _host_machine(host: HostModel) -> dict[str, Any]:
    """Which host the times are for: how many times as long as the reference, and what remains unknown of it."""
    return {
        "name": host.name,
        "assumed": host.assumed,
        "factors": asdict(host.factors),
        "machine_sd": host.pace.machine_sd,
    }


def _part(p: BreakdownPart) -> dict[str, Any]:
    return {"ms": p.gpu * MS, "share": p.share, "host_ms": p.host * MS, "ops": p.ops}


def _recorded(p: RecordedPart) -> dict[str, Any]:
    return {"name": p.name, "ops": p.ops, "recorded_ms": p.recorded * MS, "predicted_ms": p.predicted * MS}


def _costly(c: CostlyOps) -> dict[str, Any]:
    out = asdict(c)
    return {"op": out.pop("name"), "ms": out.pop("seconds") * MS, **out}


def step_program(graph: Graph, times: Sequence[OpTime], host: HostModel) -> StepProgram:
    """A captured step with its GPU and host times."""
    costs = host.costs(graph, [t.launches for t in times])
    copies = np.array([t.host for t in times])
    tasks = step_tasks(graph, times, costs, host.calls)
    return StepProgram(graph, tasks, host, costs.seconds + copies, costs.total + float(copies.sum()), costs.unknown)


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
    """Predict a captured step from its kernel times, one for each op of the graph."""
    built = step_program(graph, times, host)
    spread = spread or StepSpread(host.pace)
    alone = built.step_seconds(draws, steps, spread, np.random.default_rng(seed))
    drawn = with_loading(graph, alone, seed)
    bound = step_bound(graph, times, alone)
    return replace(step_result(built, times, gpu, Quantiles.of(drawn), bound, draws, steps), draws=drawn)


def step_bound(graph: Graph, times: Sequence[OpTime], alone: Floats) -> Bound:
    """What sets the pace of steps that take so long where no loader's workers hold them up."""
    seconds, loading = float(np.median(alone)), loading_pace(graph)
    if loading > (seconds if graph.loading.get("workers") else seconds / 2):
        return "loading"
    return "gpu" if sum(t.seconds for t in times) > GPU_BOUND * seconds else "host"


def step_result(
    built: StepProgram, times: Sequence[OpTime], gpu: Gpu, step: Quantiles, bound: Bound, draws: int, steps: int
) -> StepResult:
    """The result of a step whose time is known."""
    memory = memory_profile(built.graph, chip=gpu, kinds=True)
    return result_of(StepBasis(built, tuple(times), gpu, memory), step, bound, draws, steps)


def result_of(basis: StepBasis, step: Quantiles, bound: Bound, draws: int, steps: int) -> StepResult:
    """The result of a step whose time and memory are known."""
    built, times, gpu = basis.program, basis.times, basis.gpu
    graph, by_op = built.graph, built.host_seconds.tolist()
    return StepResult(
        source=graph.source,
        arguments=graph.arguments,
        gpu=gpu.name,
        step=step,
        gpu_active=sum(t.seconds for t in times if t.family != "communication"),
        host=built.host_total,
        peak_memory=basis.memory.peak_allocated,
        gpu_memory=gpu.memory,
        bound=bound,
        launches=sum(t.launches for t in times),
        families=breakdown.families(times, by_op),
        modules=breakdown.modules(graph, times, by_op),
        costliest=breakdown.costliest(graph, times, gpu),
        coverage=breakdown.coverage(graph, times, built.unknown_host_ops),
        notes=graph.notes,
        assumptions=breakdown.assumptions(graph, times, by_op),
        draw_count=draws,
        steps=steps,
        basis=basis,
    )


def with_model_error(p: StepResult, kind: str) -> StepResult:
    """The step with presage's error on published runs of this kind in its 90% interval."""
    error, q = model_error(kind), p.step
    low, high = error.interval(q.p50, q.p95 / q.p50)
    off = f"published runs took {error.low:g} to {error.high:g} times the time predicted for them"
    return replace(p, step=replace(q, p5=low, p95=high), notes=(f"{error.note}: {off}", *p.notes))
