"""Claims on measured pipeline schedules: every iteration's time, with delays fitted on other iterations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.engine import Edges, Lane, Program, finish_times
from presage.errors import InputError
from presage.files.decoding import read_checked
from presage.parallel.pipeline import Schedule, StageOrder
from presage_validation.score import AccuracyResult, Row, Skipped

WARM_UP = 1  # iterations at the start of a run that are not like the others


def score_pipeline(folder: str | Path) -> AccuracyResult:
    """Iteration times from the measured forwards and backwards, beside the measured ones.

    `replay`: each half of the iterations (every other one) with the delays fitted on the other half. `replay_same`:
    with delays fitted on the same half. `replay_plain`: with no delays at all.
    """
    run = read(folder)
    skipped = tuple(Skipped(f"iteration {i}", "warm-up") for i in run.iterations[:WARM_UP])
    kept = range(WARM_UP, len(run.iterations))
    halves = (list(kept[::2]), list(kept[1::2]))
    if not halves[1]:
        few = Skipped("all iterations", "fitting on some and scoring on others needs two after the warm-up")
        return AccuracyResult("pipeline", str(folder), (), (*skipped, few))
    fits = [fit_delays(run, half) for half in halves]
    rows = [
        *(r for half, fit in zip(halves, fits[::-1], strict=True) for r in _rows(run, "replay", half, fit)),
        *(r for half, fit in zip(halves, fits, strict=True) for r in _rows(run, "replay_same", half, fit)),
        *_rows(run, "replay_plain", list(kept), Delays()),
    ]
    return AccuracyResult("pipeline", str(folder), tuple(rows), skipped)


def _rows(run: PipelineRun, metric: str, at: list[int], delays: Delays) -> Iterable[Row]:
    predicted, measured = iteration_times(run, delays), run.measured
    group = Path(run.path).name
    return [Row(metric, group, str(run.iterations[k]), float(predicted[k]), float(measured[k])) for k in np.sort(at)]


# Measured pipeline schedules: a folder with config.json and, per stage, pp_rank_N.json(.gz).
#
# A stage's file holds {iteration: {total, memory, fwd_start, fwd_end, bwd_start, bwd_end}}: milliseconds from the
# iteration's start (memory in GB), one entry per microbatch (and model chunk) in the order they ran.
#
# Measured, and so input: how long each forward and backward took. Fitted, a few numbers for a whole run: what a message
# adds between two stages, what a stage takes from one operation to the next, head and tail. Emergent: every start and
# end, every wait, the iteration's time.

Floats = NDArray[np.float64]
T = TypeVar("T")

SCHEDULES = ("1f1b", "gpipe", "interleaved")
# A stage waits for a message when it arrives this much later than the stage was free.
WAITING = 2e-3
FIELDS = ("fwd_start", "fwd_end", "bwd_start", "bwd_end")


@dataclass(frozen=True)
class MeasuredOp:
    """A forward or backward of one microbatch through one model chunk. `turn` counts them, each way for itself."""

    way: str  # "F" or "B"
    turn: int
    microbatch: int
    chunk: int = 0


def orders(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[MeasuredOp]]:
    """What each stage runs, in order."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
    if schedule != "interleaved" and chunks != 1:
        raise ValueError(f"{schedule} has one model chunk a stage, not {chunks}")
    if schedule == "interleaved" and microbatches % stages:
        raise ValueError(f"interleaved needs microbatches ({microbatches}) in multiples of the stages ({stages})")
    return [_numbered(order) for order in Schedule.of(schedule, stages, microbatches, chunks).order]


def _numbered(order: StageOrder) -> list[MeasuredOp]:
    turn = {"F": count(), "B": count()}
    ops = [("FB"[w], int(m), int(c)) for w, m, c in zip(order.what, order.microbatch, order.chunk, strict=True)]
    return [MeasuredOp(way, next(turn[way]), microbatch, chunk) for way, microbatch, chunk in ops]


@dataclass(frozen=True)
class Delays:
    """Seconds: a message on its way, a stage between operations, before the first and after the last of them.

    `turn` is by (first/middle/last stage, operation before, operation after), as ("last", "F", "B").
    """

    forward: float = 0.0
    backward: float = 0.0
    turn: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    head: float = 0.0
    tail: tuple[float, ...] = ()

    def between(self, stage: int, stages: int, before: str, after: str) -> float:
        return self.turn.get((_role(stage, stages), before, after), 0.0)


def _role(stage: int, stages: int) -> str:
    return "first" if stage == 0 else "last" if stage == stages - 1 else "middle"


def pipeline(order: Sequence[Sequence[MeasuredOp]], chunks: int = 1, delays: Delays | None = None) -> Program:
    """The program of a schedule: a lane a stage, its operations in order, and the messages between them."""
    delays = delays or Delays()
    stages = len(order)
    task = _tasks(order)
    edges: list[tuple[int, int, float]] = []
    for (stage, way, chunk, microbatch), t in task.items():
        source = _source(stage, way, chunk, stages, chunks)
        if source is not None:
            edges.append((task[source[0], way, source[1], microbatch], t, _message(delays, way)))
    first = 0
    for stage, ops in enumerate(order):
        for k, (a, b) in enumerate(pairwise(ops), first):
            edges.append((k, k + 1, delays.between(stage, stages, a.way, b.way)))
        first += len(ops)
    lane = np.repeat(np.arange(stages), [len(ops) for ops in order])
    before, after, delay = zip(*edges, strict=True) if edges else ((), (), ())
    names = [f"{op.way}{op.microbatch}" for ops in order for op in ops]
    return Program.of(
        [Lane(f"stage {k}", k) for k in range(stages)],
        lane,
        Edges.of(np.array(before, np.int64), np.array(after, np.int64), np.array(delay, np.float64)),
        release=np.where(lane == 0, delays.head, 0.0),
        name=np.arange(len(names)),
        names=names or [""],
    )


def _message(delays: Delays, way: str) -> float:
    return delays.forward if way == "F" else delays.backward


def _tasks(order: Sequence[Sequence[MeasuredOp]]) -> dict[tuple[int, str, int, int], int]:
    ops = [(stage, op) for stage, on in enumerate(order) for op in on]
    return {(stage, op.way, op.chunk, op.microbatch): t for t, (stage, op) in enumerate(ops)}


def _source(stage: int, way: str, chunk: int, stages: int, chunks: int) -> tuple[int, int] | None:
    """The (stage, chunk) whose output this one needs."""
    place = chunk * stages + stage + (-1 if way == "F" else 1)
    if not 0 <= place < stages * chunks:
        return None
    return place % stages, place // stages


@dataclass(frozen=True, eq=False)
class PipelineRun:
    """Seconds from an iteration's start, as (stage, turn, iteration); totals and memory as (stage, iteration)."""

    path: str
    stages: int
    microbatches: int
    chunks: int
    schedule: str
    iterations: tuple[int, ...]
    start: Mapping[str, Floats]  # by "F" and "B"
    end: Mapping[str, Floats]
    total: Floats
    memory_gb: Floats

    @cached_property
    def order(self) -> list[list[MeasuredOp]]:
        return orders(self.schedule, self.stages, self.microbatches, self.chunks)

    @property
    def measured(self) -> Floats:
        """Seconds per iteration: until the last stage to finish has finished."""
        return np.asarray(self.total.max(axis=0))

    def durations(self) -> Floats:
        """Seconds per (task, iteration)."""
        took = {way: self.end[way] - self.start[way] for way in ("F", "B")}
        return np.stack([took[op.way][stage, op.turn] for stage, ops in enumerate(self.order) for op in ops])


def iteration_times(run: PipelineRun, delays: Delays | None = None) -> Floats:
    """Seconds per iteration from the measured forwards and backwards, with or without fitted delays."""
    delays = delays or Delays()
    program = pipeline(run.order, run.chunks, delays)
    last = np.cumsum([len(ops) for ops in run.order]) - 1
    ends = finish_times(program, run.durations(), last)
    tail = np.array(delays.tail) if delays.tail else np.zeros(run.stages)
    return np.asarray((ends + tail[:, None]).max(axis=0))


def fit_delays(run: PipelineRun, iterations: Iterable[int] | None = None) -> Delays:
    """Medians over some iterations (by place in the run), one number for each kind of delay.

    A message's time is seen where its receiver was waiting, a stage's time between operations where it was not.
    """
    at = np.arange(len(run.iterations)) if iterations is None else np.array(list(iterations))
    message: dict[str, list[Floats]] = {"F": [], "B": []}
    turn: dict[tuple[str, str, str], list[Floats]] = {}
    for stage, before, op in _lane_steps(run):
        start = run.start[op.way][stage, op.turn, at]
        came = _arrival(run, stage, op)[at]
        free = np.zeros(len(at)) if before is None else run.end[before.way][stage, before.turn, at]
        message[op.way].append((start - came)[came > free + WAITING])
        if before is not None:
            key = (_role(stage, run.stages), before.way, op.way)
            turn.setdefault(key, []).append((start - free)[came < free - WAITING])
    return Delays(
        forward=_median(message["F"]),
        backward=_median(message["B"]),
        turn={k: _median(v) for k, v in turn.items()},
        head=_median([run.start["F"][0, 0, at]]),
        tail=tuple(_median([x]) for x in (run.total - _last_end(run))[:, at]),
    )


def _lane_steps(run: PipelineRun) -> Iterable[tuple[int, MeasuredOp | None, MeasuredOp]]:
    """Every operation with its stage and the operation before it there."""
    for stage, ops in enumerate(run.order):
        for before, op in zip([None, *ops], ops, strict=False):
            yield stage, before, op


def _arrival(run: PipelineRun, stage: int, op: MeasuredOp) -> Floats:
    """When the sender had what an operation needs, per iteration; long ago if it needs nothing."""
    source = _source(stage, op.way, op.chunk, run.stages, run.chunks)
    if source is None:
        return np.full(len(run.iterations), -np.inf)
    sender, chunk = source
    sent = next(x for x in run.order[sender] if (x.way, x.chunk, x.microbatch) == (op.way, chunk, op.microbatch))
    return np.asarray(run.end[op.way][sender, sent.turn])


def _last_end(run: PipelineRun) -> Floats:
    return np.asarray(np.maximum(run.end["F"].max(axis=1), run.end["B"].max(axis=1)))


def _median(pieces: Sequence[Floats]) -> float:
    values = np.concatenate([np.empty(0), *pieces])
    return max(float(np.median(values)), 0.0) if len(values) else 0.0


class _Config(msgspec.Struct):
    pp_size: int
    num_mbs: int
    vp_size: int = 1


class _Iteration(msgspec.Struct):
    total: float
    fwd_start: list[float]
    fwd_end: list[float]
    bwd_start: list[float]
    bwd_end: list[float]
    memory: float = float("nan")


def read(folder: str | Path) -> PipelineRun:
    """Read and check a run; its schedule is the one whose order the measured starts follow."""
    folder = Path(folder)
    config = read_checked(_file(folder, "config"), _Config)
    for name in ("pp_size", "num_mbs", "vp_size"):
        if getattr(config, name) < 1:
            raise InputError(folder / "config.json", f"{getattr(config, name)} is not a count", name)
    stages = [_stage(_file(folder, f"pp_rank_{k}"), config) for k in range(config.pp_size)]
    iterations = sorted(stages[0])
    for k, stage in enumerate(stages):
        if sorted(stage) != iterations:
            raise InputError(_file(folder, f"pp_rank_{k}"), "other iterations than the first stage's", "iteration")
    data = {name: _seconds(stages, iterations, name) for name in FIELDS}
    start, end = {"F": data["fwd_start"], "B": data["bwd_start"]}, {"F": data["fwd_end"], "B": data["bwd_end"]}
    total = np.array([[stage[i].total for i in iterations] for stage in stages]) / 1e3
    memory = np.array([[stage[i].memory for i in iterations] for stage in stages])
    schedule = _schedule(folder, config, start)
    sizes = (config.pp_size, config.num_mbs, config.vp_size)
    return PipelineRun(str(folder), *sizes, schedule, tuple(iterations), start, end, total, memory)


def _file(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise InputError(folder, "not a folder: a pipeline run is a folder with config.json and pp_rank_N.json files")
    for file in (folder / f"{name}.json", folder / f"{name}.json.gz"):
        if file.is_file():
            return file
    raise InputError(folder, "no such file in the folder", f"{name}.json")


def _stage(file: Path, config: _Config) -> dict[int, _Iteration]:
    stage = read_checked(file, dict[int, _Iteration])
    if not stage:
        raise InputError(file, "no iterations")
    for i, iteration in stage.items():
        for name in FIELDS:
            _check(file, f"iteration {i}, {name}", getattr(iteration, name), config.num_mbs * config.vp_size)
        for way in ("fwd", "bwd"):
            took = np.subtract(getattr(iteration, f"{way}_end"), getattr(iteration, f"{way}_start"))
            if (took < 0).any():
                raise InputError(file, f"entry {int(took.argmin())} ends before it starts", f"iteration {i}, {way}_end")
        if iteration.total <= 0:
            raise InputError(file, f"{iteration.total} is not a time", f"iteration {i}, total")
    return stage


def _check(file: Path, name: str, values: list[float], count: int) -> None:
    if len(values) != count:
        raise InputError(file, f"{len(values)} entries, but config.json has {count} microbatches per stage", name)
    if min(values) < 0:
        raise InputError(file, f"negative time {min(values)}", name)


def _seconds(stages: Sequence[Mapping[int, _Iteration]], iterations: Sequence[int], name: str) -> Floats:
    values = [[getattr(stage[i], name) for i in iterations] for stage in stages]
    return np.ascontiguousarray(np.array(values).transpose(0, 2, 1)) / 1e3


def _schedule(folder: Path, config: _Config, start: Mapping[str, Floats]) -> str:
    """The schedule whose order the median starts of every stage follow."""
    median = {way: np.median(times, axis=2) for way, times in start.items()}
    for schedule in SCHEDULES:
        try:
            order = orders(schedule, config.pp_size, config.num_mbs, config.vp_size)
        except ValueError:
            continue
        begun = [[median[op.way][stage, op.turn] for op in ops] for stage, ops in enumerate(order)]
        if all((np.diff(times) >= 0).all() for times in begun):
            return schedule
    raise InputError(folder, f"the measured order is none of {', '.join(SCHEDULES)}", "fwd_start, bwd_start")
