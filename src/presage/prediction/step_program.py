"""A step's ops as tasks: two host threads that take turns, and GPU streams that work behind them.

    main, autograd   a task for each launch: the host time since the launch before it. Ops that launch nothing are part
                     of the next task of their thread; what follows a thread's last launch is a task of its own. A CUDA
                     graph is launched by one task
    streams          a task for each launch: an equal part of its op's kernel time, after the gap between two kernels

A kernel starts no sooner than the launch latency after its call began. The host may be `queue_depth` launches ahead of
the first stream. Where an op waits for the GPU, its thread goes on when all that was launched there has ended. A kernel
waits for those of other streams whose results it needs (see `streams`). The step after begins where this one's host
ended, whatever the GPU still has to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from presage.costs.host_constants import LOADER, TAKING
from presage.costs.host_model import US, Calls, HostCosts, Pace
from presage.costs.kernel_model import OpTime
from presage.engine import Durations, Edges, Lane, LaneKind, Program
from presage.engine.timeline import latest_ends
from presage.graph.graph import Graph, Op
from presage.noise.sampling import pace_factors, step_paces
from presage.prediction.stream_dependencies import crossings, stream_names

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAIN, AUTOGRAD, STREAM = 0, 1, 2  # further streams follow
REST = -1  # the op of a task that is the rest of a thread's time


def _no_pairs() -> Ints:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, eq=False)
class StepTasks:
    """The tasks of one step, in the order they are issued: lane, op (or REST), seconds at the usual pace."""

    lane: Ints
    op: Ints
    seconds: Floats
    launch: Ints  # by kernel task (in order) the host task that launches it
    kernel: Ints  # the kernel tasks, in order
    waits: Ints  # host tasks that wait for all kernels of the first stream before them
    turns: tuple[tuple[int, int], ...]  # (host task, host task of the other thread that follows it)
    streams: tuple[str, ...] = ("",)  # names, in the order of their lanes
    crossings: Ints = field(default_factory=_no_pairs)  # (kernel, kernel of another stream that waits for it)
    carried: Ints = field(default_factory=_no_pairs)  # the same, from a step to the one after
    meetings: tuple[tuple[int, str], ...] = ()  # kernels of collectives in order, and their groups
    loading: float = 0.0  # seconds of the last task in which the training process loads data

    def __len__(self) -> int:
        return len(self.lane)

    @property
    def queued(self) -> tuple[Ints, Ints]:
        """The launches and kernels of the first stream; of a CUDA graph's kernels the last."""
        first = self.lane[self.kernel] == STREAM
        launch, kernel = self.launch[first], self.kernel[first]
        last = np.diff(launch, append=-1) != 0
        return launch[last], kernel[last]


@dataclass
class _Issue:
    """Collects tasks as the host goes through the ops."""

    lane: list[int] = field(default_factory=list)
    op: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    launch: list[int] = field(default_factory=list)
    kernel: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    pending: float = 0.0  # host time since the last host task
    on: int = MAIN
    last: int = -1  # the last host task
    waiting: bool = False  # the next host task waits for the GPU
    replayed: str = ""  # the CUDA graph that the last host task started

    def host(self, op: int) -> int:
        """A task of the host time that is pending."""
        task = self._task(self.on, op, self.pending)
        if self.last >= 0 and self.lane[self.last] != self.on:
            self.turns.append((self.last, task))
        if self.waiting:
            self.waits.append(task)
        self.last, self.pending, self.waiting = task, 0.0, False
        return task

    def kernels(self, op: int, seconds: float, lane: int) -> None:
        """A kernel that the last host task launched."""
        self.launch.append(self.last)
        self.kernel.append(self._task(lane, op, seconds))

    def launches(self, i: int, op: Op) -> None:
        """A host task for a kernel of op `i`, unless the last one launched it with the rest of its CUDA graph."""
        if not op.replayed or op.replayed != self.replayed:
            self.host(i)
        self.replayed = op.replayed

    def switch(self, lane: int) -> None:
        """Go on with another thread; what is pending ends this one's turn."""
        if lane != self.on:
            if self.pending or self.waiting or self.last < 0:
                self.host(REST)
            self.on = lane

    def _task(self, lane: int, op: int, seconds: float) -> int:
        self.lane.append(lane)
        self.op.append(op)
        self.seconds.append(seconds)
        return len(self.lane) - 1


def step_tasks(graph: Graph, times: Sequence[OpTime], host: HostCosts, calls: Calls) -> StepTasks:
    """One step's tasks."""
    if len(times) != len(graph.ops):
        raise ValueError(f"{len(graph.ops)} ops, but times of {len(times)}")
    issue, streams = _Issue(), stream_names(graph)
    lane_of = {name: STREAM + k for k, name in enumerate(streams)}
    before, after, between, call = (x.tolist() for x in (host.t1 + host.t2, host.t3, host.t5, host.t4))
    for i, (op, time) in enumerate(zip(graph.ops, times, strict=True)):
        issue.switch(AUTOGRAD if op.thread == "autograd" and not op.replayed else MAIN)
        issue.pending += before[i] + time.host
        n, gap = time.launches, (calls.replay_gap_us if op.replayed else calls.kernel_gap_us) * US
        for k in range(n):
            issue.launches(i, op)
            issue.kernels(i, (time.seconds / n + gap) / time.at_once, lane_of[op.stream])
            issue.pending += call[i] / n + (between[i] / (n - 1) if k < n - 1 else 0.0)
        if op.sync:
            issue.host(i)
            issue.waiting = True
        issue.pending += after[i] if n else after[i] + call[i] + between[i]
    issue.switch(MAIN)
    loading = 0.0 if graph.loading.get("workers") else loading_pace(graph)
    issue.pending += host.end + loading + taking_seconds(graph)
    issue.host(REST)
    return replace(_tasks(issue, graph, streams), loading=loading)


def loading_pace(graph: Graph) -> float:
    """Seconds a step for which its batches are loaded; 0 where it loads none. With workers, those of the slower: all
    workers, or the thread that pins what they loaded. Without, the training process loads between its steps."""
    found = graph.loading
    if not found:
        return 0.0
    seconds, nbytes, workers = found["batch_seconds"], found.get("batch_bytes", 0.0), found["workers"]
    if not workers:
        return found["batches"] * seconds
    pins = LOADER["pin_us"] * US + nbytes / LOADER["pin_bytes_per_s"] if found.get("pinned") else 0.0
    return found["batches"] * max((seconds + nbytes / LOADER["shared_bytes_per_s"]) / workers, pins)


def taking_seconds(graph: Graph) -> float:
    """Seconds a step that batches loaded by workers cost the thread that trains."""
    found = graph.loading
    if not found.get("workers"):
        return 0.0
    mb, ms = found.get("batch_bytes", 0.0) / 1e6, TAKING["pinned_ms" if found.get("pinned") else "ms"]
    sizes = TAKING["mb"]
    beyond = max(0.0, mb - sizes[-1]) * (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2])
    return found["batches"] * float(np.interp(mb, sizes, ms) + beyond) * 1e-3


def _tasks(issue: _Issue, graph: Graph, streams: tuple[str, ...]) -> StepTasks:
    lane, op, launch, kernel, waits = (
        np.array(x, np.int64) for x in (issue.lane, issue.op, issue.launch, issue.kernel, issue.waits)
    )
    simple = StepTasks(lane, op, np.array(issue.seconds), launch, kernel, waits, tuple(issue.turns))
    if len(streams) == 1:
        return simple
    first, last = _kernels_of(op[kernel], kernel)
    found = crossings(graph)
    return replace(
        simple,
        streams=streams,
        crossings=_as_tasks(found.within, first, last),
        carried=_as_tasks(found.carried, first, last),
        meetings=tuple((first[i], graph.ops[i].group) for i in found.collectives if i in first),
    )


def _kernels_of(ops: Ints, kernel: Ints) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last kernel task of each op that has one."""
    pairs = list(zip(ops.tolist(), kernel.tolist(), strict=True))
    return dict(reversed(pairs)), dict(pairs)


def _as_tasks(pairs: Sequence[tuple[int, int]], first: dict[int, int], last: dict[int, int]) -> Ints:
    """Pairs of ops as pairs of kernel tasks; an op that launches nothing holds nobody up."""
    found = [(last[a], first[b]) for a, b in pairs if a in last and b in first]
    return np.array(found, np.int64).reshape(-1, 2)


def lanes(tasks: StepTasks, rank: int = 0) -> list[Lane]:
    """The lanes of one rank: host threads, then streams."""
    met = {group for _, group in tasks.meetings}
    kinds = [LaneKind.COMMUNICATION if name in met else LaneKind.COMPUTE for name in tasks.streams]
    names = [f"stream {name}" if name else "GPU stream" for name in tasks.streams]
    return [
        Lane("main thread", rank, LaneKind.HOST),
        Lane("autograd thread", rank, LaneKind.HOST),
        *(Lane(name, rank, kind) for name, kind in zip(names, kinds, strict=True)),
    ]


def program(tasks: StepTasks, steps: int, calls: Calls, names: Sequence[str]) -> Program:
    """`steps` steps of one rank, one after another. `names` are those of the ops."""
    labels = list(dict.fromkeys([*names, "(host)"]))
    number = {name: k for k, name in enumerate(labels)}
    of_op = np.array([number[n] for n in names] + [number["(host)"]])
    return Program.of(
        lanes(tasks),
        np.tile(tasks.lane, steps),
        edges(tasks, steps, calls),
        name=np.tile(of_op[tasks.op], steps),
        names=labels,
    )


def edges(tasks: StepTasks, steps: int, calls: Calls) -> Edges:
    """What waits for what in `steps` steps of one rank, the tasks of each step after those of the one before."""
    return Edges.joined([*_edges(tasks, np.arange(steps) * len(tasks), calls)])


def _edges(tasks: StepTasks, first: Ints, calls: Calls) -> Iterator[Edges]:
    """Launch to kernel, kernel to the launch that needs its place in the queue, GPU to waiting host, thread to thread,
    stream to stream.

    `first` is each step's first task. A kernel task begins with the gap to the one before: it may start that much
    sooner, and its kernel starts that much later.
    """
    every = first[:, None]
    gap, depth = calls.kernel_gap_us * US, calls.queue_depth
    launch, kernel = (every + tasks.launch).ravel(), (every + tasks.kernel).ravel()
    yield Edges.of(launch, kernel, max(calls.launch_latency_us * US - gap, 0.0))
    launches, queued = tasks.queued
    launch, kernel = (every + launches).ravel(), (every + queued).ravel()
    yield Edges.of(kernel[:-depth], launch[depth:], gap, True)
    behind = np.searchsorted(queued, tasks.waits) - 1
    some = behind >= 0
    yield Edges.of((every + queued[behind[some]]).ravel(), (every + tasks.waits[some]).ravel())
    turns = np.array(tasks.turns, np.int64).reshape(-1, 2)
    for pairs in (turns, tasks.crossings):
        yield Edges.of((every + pairs[:, 0]).ravel(), (every + pairs[:, 1]).ravel())
    late = every[1:]
    yield Edges.of((every[:-1] + tasks.carried[:, 0]).ravel(), (late + tasks.carried[:, 1]).ravel())


# ---- Step times of many draws: the host's pace, the GPU's spread and what the kernel models do not know.

WARM_UP = 2  # steps in which the host gets ahead of the GPU
GPU_SD = 0.0025  # GPU time from run to run, measured: 0.2 to 0.3%
LOADING_SD = 0.4  # of what loading takes: it is measured on another CPU, to a round number; assumed


@dataclass(frozen=True)
class StepSpread:
    """Standard deviations of the logarithm: of host threads, and of all GPU time by one factor."""

    host: Pace
    gpu: float = GPU_SD
    kernels: float = 0.04  # the kernel models' own error, common to a step's kernels

    @property
    def of_gpu(self) -> float:
        return float(np.hypot(self.gpu, self.kernels))


NO_SPREAD = StepSpread(Pace(0.0, 0.0, 0.0), 0.0, 0.0)


def draw_durations(tasks: StepTasks, steps: int, draws: int, spread: StepSpread, rng: np.random.Generator) -> Durations:
    """Seconds of every task in every draw; a single draw without any spread is the usual pace itself."""
    if spread == NO_SPREAD:
        return Durations.of(np.tile(tasks.seconds, steps))
    p = spread.host
    lanes = np.empty((3, steps, draws))
    for lane in (MAIN, AUTOGRAD):
        lanes[lane] = step_paces(rng, p.run_sd, p.step_sd, p.step_correlation, steps, draws)
    lanes[STREAM] = pace_factors(rng, spread.of_gpu, draws)
    lanes[:STREAM] *= pace_factors(rng, p.machine_sd, draws)
    table = lanes[np.minimum(tasks.lane, STREAM)].swapaxes(0, 1) * tasks.seconds[None, :, None]
    if tasks.loading:
        table[:, -1] *= 1 + tasks.loading / tasks.seconds[-1] * (pace_factors(rng, LOADING_SD, draws) - 1)
    return Durations.of(table.reshape(steps * len(tasks), draws))


def with_loading(graph: Graph, drawn: Floats, seed: int) -> Floats:
    """Seconds a step, by draw, where it may have to wait for the workers of its data loader."""
    if not graph.loading.get("workers"):
        return drawn
    factors = pace_factors(np.random.default_rng([seed, 3]), LOADING_SD, len(drawn))
    return np.maximum(drawn, loading_pace(graph) * factors)


def step_seconds(program: Program, took: Durations, step: NDArray[np.int32], steps: int) -> Floats:
    """Seconds a step, by draw: the mean over the steps after the first few. `step` is the one each task is of."""
    done = latest_ends(program, took, step, steps)
    skipped = min(WARM_UP, steps - 1)
    start = done[skipped - 1] if skipped else np.zeros(took.count)
    return np.asarray((done[-1] - start) / (steps - skipped))
