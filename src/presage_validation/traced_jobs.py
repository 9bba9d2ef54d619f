"""Jobs whose ranks were all traced: device and step times predicted, not replayed, beside the measured ones.

Two kinds of data. A folder with an execution trace and a profiler's trace of every rank: the job is predicted from the
execution traces, once with nothing measured of the machine (`device`, `step`), once with kernels and host learned from
the profiler's trace of one rank (`device_learned`, `step_learned`; every rank teaches once, and the others are
predicted). And TorchRec's golden training on four V100s, whose traces have no shapes: the job is predicted from its
sizes, which the launch grids of its kernels tell.

Steps were measured beside a profiler, so they are predicted beside one: the host model's own cost per event, which was
fitted on an H200. A measured step is that of the ranks begun together. The traces' windows begin up to 7.5 ms apart,
and a rank that begins early waits for the others, once: every duration is the measured one, only the starts are moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from presage.costs.calibrated_kernels import CalibratedKernels
from presage.costs.host_factors import HostFactors
from presage.costs.kernel_model import KernelModel
from presage.costs.learned_kernels import LearnedKernels
from presage.embeddings import Table
from presage.embeddings.dlrm_graph import SPARSE
from presage.embeddings.dlrm_job import DlrmJob
from presage.embeddings.dlrm_ranks import DlrmRanks, dlrm_ranks
from presage.embeddings.dlrm_system import FRAMEWORKS
from presage.embeddings.sharding_plan import ShardingPlan
from presage.engine import simulate
from presage.errors import InputError, PresageError
from presage.graph.graph import Graph
from presage.hardware import gpu
from presage.prediction.api import default_platform
from presage.prediction.machine import Machine, kernel_times, machine
from presage.prediction.rank_program import Member, rank_program
from presage.prediction.rank_set import code_rank_set, predict_rank_set
from presage.prediction.result import model_error
from presage.prediction.step import STEPS
from presage.prediction.step_program import STREAM
from presage.traces.overheads import NO_SHAPES, UNPROFILED
from presage.traces.replay import Replay, measured_steps, replay_of
from presage.traces.trace import GpuKind, Trace
from presage.traces.trace_graph import trace_graphs
from presage.traces.trace_set import read_run
from presage_fit.host import paces
from presage_fit.host import rows as host_rows
from presage_fit.learn import graph_calls, learn, traced_gpu
from presage_validation.score import AccuracyResult, Row, Skipped

Tell = Callable[[str], None]
PROFILED, EXECUTED = "kineto_*.json.gz", "et_*.json.gz"
NCCL = "nccl"


def score_traced_jobs(paths: Sequence[Path], tell: Tell = lambda _: None) -> AccuracyResult:
    """Every job found in some folders."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for folder in (found for path in paths for found in _folders(path)):
        tell(folder.name)
        try:
            rows += _traced_rows(folder) if any(folder.glob(EXECUTED)) else _golden_rows(folder)
        except PresageError as e:
            skipped.append(Skipped(folder.name, str(e)))
    rates = {"steps_in_interval": _inside(rows)} if rows else {}
    return AccuracyResult("jobs", " ".join(map(str, paths)), tuple(rows), tuple(skipped), rates, _NOTES)


def _inside(rows: Sequence[Row]) -> float:
    """The share of steps, with nothing measured, that are within the 90% interval of recommendation jobs."""
    error = model_error("recommendation")
    steps = [r.measured / r.predicted for r in rows if r.metric in ("step", "step_delayed")]
    return mean(error.low <= ratio <= error.high for ratio in steps)


_NOTES = (
    "device, step: nothing measured of the machine; *_learned: kernels and host from the profiler's trace of one rank",
    "steps as a profiler slows them, ranks begun together; step_delayed: with the delay that was put into rank 2",
    "step_allocating: also with the time that the trace's hosts take in cudaMalloc (PyTorch's memory was full)",
)


def _folders(path: Path) -> list[Path]:
    """Folders below a path that hold the traces of a job's ranks."""
    if not path.is_dir():
        raise InputError(path, "is no folder of traces")
    every = (path, *sorted(p for p in path.rglob("*") if p.is_dir()))
    found = [p for p in every if any(p.glob(EXECUTED)) and any(p.glob(PROFILED))]
    found += [p for p in every if p.parent.name == GOLDEN or p.name in RUNS]
    if not found:
        raise InputError(path, "holds no job with an execution trace and a profiler's trace of each rank")
    return found


# ---- a job of execution traces and profiler's traces


@dataclass(frozen=True, eq=False)
class TracedJob:
    """What the traces of a job hold: by rank its step, its step as profiled, and its profiler's trace."""

    name: str
    steps: tuple[Graph, ...]  # from execution traces; ranks that do the same are one
    profiled: tuple[Graph, ...]
    replay: Replay
    base: CalibratedKernels

    @property
    def ranks(self) -> int:
        return len(self.profiled)

    def step_of(self, rank: int) -> Graph:
        return next(g for g in self.steps if rank in g.ranks)


def _traced_rows(folder: Path) -> Iterator[Row]:
    job = _read(folder)
    usual = machine(job.base.gpu.key)
    beside = replace(usual, host=usual.host.profiled())
    measured = together_seconds(job.replay)
    device = [_recorded(g) for g in job.profiled]
    for rank in range(job.ranks):
        yield Row("device", job.name, f"rank {rank}", _device(job.step_of(rank), usual), device[rank])
    yield Row("step", job.name, "all ranks", _step(job, beside), mean(measured))
    for teacher in range(job.ranks):
        taught = _taught(job, teacher, beside)
        for rank in (r for r in range(job.ranks) if r != teacher):
            name = f"rank {rank} from rank {teacher}"
            yield Row("device_learned", job.name, name, _device(job.step_of(rank), taught), device[rank])
        others = mean(s for r, s in enumerate(measured) if r != teacher)
        yield Row("step_learned", job.name, f"other ranks from rank {teacher}", _step(job, taught), others)


def _read(folder: Path) -> TracedJob:
    files = sorted(folder.glob(PROFILED))
    key = gpu(traced_gpu(files[0])).key
    models = machine(key).kernels
    if not isinstance(models, CalibratedKernels):
        raise PresageError(f"{key} has no kernel models to begin from")
    steps = trace_graphs(folder / EXECUTED)
    profiled = tuple(trace_graphs(f)[0] for f in files)
    return TracedJob(folder.name, tuple(steps), profiled, replay_of(read_run(files)), models)


def _recorded(graph: Graph) -> float:
    """Seconds of a step's kernels in its profiler's trace, collectives apart."""
    return sum(op.recorded.seconds for op in graph.ops if op.recorded is not None and not op.group)


def _device(graph: Graph, where: Machine) -> float:
    times = kernel_times(graph, where)
    return sum(t.seconds for op, t in zip(graph.ops, times, strict=True) if not op.group)


def _step(job: TracedJob, where: Machine) -> float:
    team = code_rank_set(job.steps, default_platform(job.base.gpu.key), where)
    return predict_rank_set(team, where, draws=1, steps=STEPS).step.p50


def _taught(job: TracedJob, rank: int, beside: Machine) -> Machine:
    """The machine with kernels, and with the pace of each host thread, as the trace of one rank shows them."""
    calls = graph_calls(job.profiled[rank], job.base, f"rank {rank}", job.base.gpu.name)
    kernels: KernelModel = LearnedKernels(job.base, learn([calls]))
    trace = job.replay.run.traces[rank]
    seen = paces(host_rows(job.step_of(rank), trace, trace.steps[-1]), beside.host.us, 0.0)
    return Machine(kernels, replace(beside.host, factors=HostFactors(seen.main, seen.autograd, seen.main)))


def together_seconds(replay: Replay) -> list[float]:
    """The last step of each rank with its measured durations, all ranks begun at once."""
    release = replay.program.release.copy()
    for place, rank in enumerate(replay.ranks):
        begun = measured_steps(replay, place)[0].start
        tasks = np.concatenate([rank.stretch_task, rank.gpu_task])
        release[tasks] = np.where(release[tasks] > 0, np.maximum(release[tasks] - begun, 0.0), release[tasks])
    timeline = simulate(replace(replay.program, release=release), replay.durations)
    return [replay.steps(timeline, place)[-1].seconds for place in range(len(replay.ranks))]


# ---- TorchRec's golden training (examples/golden_training of its repository, with sizes of its own)

GOLDEN = "torchrec_dlrm_4xv100"
SAMPLES, RANKS, TABLES, WIDTH, ROWS = 4096, 4, 64, 1024, 100_000
LATE = 2  # the rank with a delay in its exchanges


@dataclass(frozen=True)
class GoldenRun:
    """What was changed in one of the runs."""

    train: bool = True
    wire: str = "fp32"  # of pooled rows: what is sent is half as long in the runs with quantised communication
    delay: float = 0.0  # seconds that the host of rank 2 sleeps in each exchange of pooled rows, as its trace shows


RUNS = {
    "long_a2a_optimizer": GoldenRun(train=False, delay=1.0),
    "sleep_pl_dense_after_backward_2": GoldenRun(train=False, delay=1.0),
    "long_a2a_optimizer_2_run2": GoldenRun(delay=0.02),
    "long_a2a_optimizer_5": GoldenRun(delay=0.02),
    "long_a2a_optimizer_5_qcomm_run1": GoldenRun(wire="fp16", delay=0.02),
    "long_a2a_optimizer_qcomm_trace": GoldenRun(wire="fp16", delay=0.02),
}


def golden_job(run: GoldenRun = GoldenRun()) -> DlrmJob:
    """The job that the launch grids tell: 64 tables of 1,024 columns, 16 whole ones on each rank; 4,096 samples a rank,
    one lookup in each table; six dense layers of 2,049 and one of 1,024; 512 and 1 after the interaction; lookups
    before the dense layers. How many rows a table has is not told: 100,000 fit the GPU's memory."""
    tables = tuple(Table(f"t{i}", ROWS, WIDTH, 1.0) for i in range(TABLES))
    system = replace(FRAMEWORKS["torchrec"], bottom_beside_exchange=True)
    return DlrmJob(
        "golden training", tables, SAMPLES * RANKS, RANKS, "4xv100", dense=WIDTH, bottom=(*[2049] * 6, WIDTH),
        top=(512, 1), precision="fp32", wire=run.wire, system=system,
    )  # fmt: skip


def _golden_rows(folder: Path) -> Iterator[Row]:
    run = RUNS.get(folder.name)
    if run is None:
        raise PresageError("its traces have no shapes, and their grids do not tell the dense layers")
    job = golden_job(run)
    plan = ShardingPlan.table_wise(RANKS, [t * RANKS // TABLES for t in range(TABLES)])
    team = dlrm_ranks(job, given=plan, train=run.train, pace=1 / (UNPROFILED * NO_SHAPES))
    graph, times = team.team.steps[0].graph, team.team.times[0]
    device = sum(t.seconds for op, t in zip(graph.ops, times, strict=True) if not op.group and not op.stream)
    measured = [_between_lookups(trace) for trace in read_run(sorted(folder.glob("rank_*.json.gz"))).traces]
    for rank, found in enumerate(measured):
        yield Row("device", folder.name, f"rank {rank}", device, found.kernels)
    step, allocating = mean(m.step for m in measured), [m.allocating for m in measured]
    yield Row("step_delayed", folder.name, "all ranks", _delayed(team, run, [0.0] * RANKS), step)
    if any(allocating):
        yield Row("step_allocating", folder.name, "all ranks", _delayed(team, run, allocating), step)


class GoldenStep(NamedTuple):
    """Seconds of one step of a trace, from one lookup to the next."""

    kernels: float  # collectives apart
    step: float
    allocating: float  # of the host, in cudaMalloc


def _between_lookups(trace: Trace) -> GoldenStep:
    """The shortest of a trace's steps: in the other one PyTorch's allocator gives all its memory back to the driver
    and asks for it anew (17 to 25 calls of cudaFree, 9 to 18 of cudaMalloc), for 200 ms."""
    events = trace.gpu
    names = [trace.names[k] for k in events.name.tolist()]
    first = sorted(int(events.start[i]) for i, n in enumerate(names) if "embedding_codegen_forward" in n)
    work = np.array([NCCL not in n.lower() for n in names]) & (events.kind == GpuKind.KERNEL)
    if len(first) < 2:
        raise PresageError("fewer than two steps look rows up")
    begin, end = min(itertools.pairwise(first), key=lambda step: step[1] - step[0])
    inside = work & (events.start >= begin) & (events.start < end)
    kernels = float((events.end - events.start)[inside].sum()) * 1e-9
    return GoldenStep(kernels, (end - begin) * 1e-9, _allocating(trace, begin, end))


def _allocating(trace: Trace, begin: int, end: int) -> float:
    """Seconds of a span in which a trace's host waits for the driver to allocate memory."""
    host = trace.host
    asked = np.array([trace.names[k] == "cudaMalloc" for k in host.name.tolist()])
    inside = asked & (host.start >= begin) & (host.start < end)
    return float((host.end - host.start)[inside].sum()) * 1e-9


def _delayed(team: DlrmRanks, run: GoldenRun, allocating: Sequence[float]) -> float:
    """A step by itself (the traced hosts wait for their GPU before they look rows up), with the delay in the exchanges
    of the late rank, and with what each rank's host takes to allocate memory before the bottom layers."""
    (usual,) = team.team.ranks.members
    shared = mean(s for rank, s in enumerate(allocating) if rank != LATE)
    late = replace(_later(usual, run.delay, allocating[LATE]), fold=replace(usual.fold, rank=LATE, ranks=1))
    others = replace(_later(usual, 0.0, shared), fold=replace(usual.fold, ranks=RANKS - 1))
    return float(rank_program([others, late], 1).timeline().end.max())


def _later(usual: Member, delay: float, allocating: float) -> Member:
    """A rank whose host is held up in its exchanges of pooled rows, and before the first of the bottom layers."""
    tasks, modules = usual.tasks, np.array([op.module for op in usual.step.graph.ops])
    seconds, host = tasks.seconds.copy(), tasks.lane < STREAM
    for module in (f"{SPARSE}output", f"{SPARSE}gradient"):
        (places,) = np.nonzero(modules == module)
        for place in places:
            seconds[np.flatnonzero(host & (tasks.op == place))[:1]] += delay
    bottom = np.isin(tasks.op, np.flatnonzero(np.char.startswith(modules, "bottom")))
    seconds[np.flatnonzero(host & bottom)[:1]] += allocating
    return usual.with_seconds(seconds)
