"""A pipeline's step as a program of the engine, every microbatch of it: for timelines, and for draws."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.engine import Edges, Lane, Program, Timeline, simulate
from presage.parallel.pipeline.durations import Durations, durations
from presage.parallel.pipeline.schedule import Schedule
from presage.parallel.pipeline.structure import EXCHANGE, Structure
from presage.parallel.schedules import WHAT

__all__ = ["program", "timeline"]

Ints = NDArray[np.int64]
SEND = "send"


def timeline(
    schedule: Schedule, forward: ArrayLike, backward: ArrayLike, weight: ArrayLike | None = None,
    send: ArrayLike = 0.0, beside: bool = True, first_extra: ArrayLike | None = None,
) -> Timeline:  # fmt: skip
    """The same as `run`, with every task's start and end: a lane a stage, `F3.1` for microbatch 3 through chunk 1."""
    d = durations(schedule, forward, backward, weight, send, beside, first_extra)
    seconds, _ = d.kinds(schedule.meets)
    made, kind = program(schedule, d)
    return simulate(made, seconds[kind])


def program(schedule: Schedule, d: Durations) -> tuple[Program, Ints]:
    """Tasks, and the kind of each: tasks of a kind take equally long. Messages beside compute are delays of edges."""
    s = schedule.structure(d.beside)
    _, delay = d.kinds(schedule.meets)
    shared = s.what == EXCHANGE  # a task on each of two lanes, in a meeting
    owner = np.repeat(np.arange(len(s.lane)), 1 + shared)
    place = np.cumsum(1 + shared) - 1 - shared
    lane = s.lane[owner] + (np.arange(len(owner)) != place[owner])
    waits = np.flatnonzero(~shared & (s.waits.second < len(shared)))
    edges = Edges.of(place[s.waits.second[waits]], place[waits], delay[s.waits.kind[waits]])
    lanes = [Lane(f"stage {k}", k) for k in range(schedule.stages)]
    meeting = np.where(shared, np.cumsum(shared) - 1, -1)[owner]
    name, names = _names(s)
    made = Program.of(lanes, lane, edges, group=meeting, name=name[owner], names=names)
    return made, np.asarray(s.waits.kind[owner], np.int64)


def _names(s: Structure) -> tuple[Ints, list[str]]:
    """An index for each task, and the names: the chunk is left out where there is but one."""
    count = int(s.microbatch.max()) + 1
    number = (s.what * count + s.microbatch) * s.virtual + s.chunk
    number = np.where(s.what == EXCHANGE, len(WHAT) * count * s.virtual, number)
    chunks = [f".{c}" for c in range(s.virtual)] if s.virtual > 1 else [""]
    names = [f"{what}{m}{chunk}" for what in WHAT for m in range(count) for chunk in chunks]
    return np.asarray(number, np.int64), [*names, SEND]
