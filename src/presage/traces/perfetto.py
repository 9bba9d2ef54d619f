"""Timelines as Chrome/Perfetto JSON: predicted beside measured, lane by lane. Open them at ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.engine import LaneKind, Program, Timeline
from presage.traces.replay import NS, RankTasks, Replay

Floats = NDArray[np.float64]
_Events = list[dict[str, Any]]
US = 1e6
SHORTEST = 1e-9  # seconds: what is shorter would be drawn as nothing
WAIT = "waiting for other ranks"
COLOUR = {LaneKind.HOST: "host", LaneKind.COMPUTE: "kernel", LaneKind.COMMUNICATION: "collective"}


def chrome_trace(replay: Replay, timeline: Timeline) -> bytes:
    """The JSON text. Each rank is two processes, `measured` and `predicted`, with the same lanes."""
    events: _Events = []
    for place, rank in enumerate(replay.ranks):
        lead = np.zeros(len(replay.program))
        events += _rank(replay, rank, 2 * place, "measured", *_measured(replay, rank), np.zeros(len(lead)))
        lead[rank.gpu_task] = np.minimum(rank.lead * NS, (timeline.end - timeline.start)[rank.gpu_task])
        begun = timeline.start + lead
        events += _rank(replay, rank, 2 * place + 1, "predicted", begun, timeline.end, timeline.wait)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def timeline_trace(timeline: Timeline, processes: Mapping[int, str]) -> bytes:
    """The JSON text of one timeline: a process for each rank, by these names, with a row a lane.

    A wait for other ranks is drawn by itself, before the collective that waits.
    """
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": _timeline(timeline, processes)})


def beside_trace(timelines: Mapping[str, Timeline]) -> bytes:
    """The JSON text of timelines of one rank each, one below the other, each a process by its name."""
    events = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events += [{**e, "pid": pid} for e in _timeline(timeline, {0: name})]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _timeline(timeline: Timeline, processes: Mapping[int, str]) -> _Events:
    program = timeline.program
    events = [e for rank, name in processes.items() for e in _process(rank, name)]
    for i, lane in enumerate(program.lanes):
        place = {"ph": "M", "pid": lane.rank, "tid": i}
        events.append({**place, "name": "thread_name", "args": {"name": lane.name}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": i}})
    for task, wait in enumerate(timeline.wait.tolist()):
        start, end = float(timeline.start[task]), float(timeline.end[task])
        if wait >= SHORTEST:
            events.append({**_slice(program, task, start - wait, start), "name": WAIT, "cat": "wait"})
        if end - start >= SHORTEST:
            events.append(_slice(program, task, start, end))
    return events


def _process(pid: int, name: str) -> _Events:
    """The metadata of a process: its name and its place on the screen."""
    about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": pid}}
    return [{"ph": "M", "name": what, "pid": pid, "args": args} for what, args in about.items()]


def _slice(program: Program, task: int, start: float, end: float) -> dict[str, Any]:
    """A task as a complete event."""
    lane = program.lanes[program.lane[task]]
    place = {"pid": lane.rank, "tid": int(program.lane[task])}
    times = {"ts": round(start * US, 3), "dur": round((end - start) * US, 3)}
    return {"ph": "X", "name": program.label(task), "cat": COLOUR[lane.kind], **place, **times}


def _measured(replay: Replay, rank: RankTasks) -> tuple[Floats, Floats]:
    start, end = np.zeros(len(replay.program)), np.zeros(len(replay.program))
    s, gpu = rank.stretches, rank.trace.gpu
    start[rank.stretch_task], end[rank.stretch_task] = (s.lo - rank.origin) * NS, (s.hi - rank.origin) * NS
    start[rank.gpu_task], end[rank.gpu_task] = (gpu.start - rank.origin) * NS, (gpu.end - rank.origin) * NS
    return start, end


def _rank(replay: Replay, rank: RankTasks, pid: int, what: str, start: Floats, end: Floats, wait: Floats) -> _Events:
    """One rank's lanes. Host silences are left blank; a wait in a collective is drawn as part of it."""
    program = replay.program
    events = _process(pid, f"rank {replay.run.rank(rank.place)} {what}")
    for lane in sorted(set(program.lane[rank.gpu_task].tolist()) | set(program.lane[rank.stretch_task].tolist())):
        name = program.lanes[lane].name
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}})
    working = rank.stretch_task[rank.stretches.owner >= 0]
    for task in [*working.tolist(), *rank.gpu_task.tolist()]:
        waited = float(wait[task])
        if end[task] - start[task] + waited < SHORTEST:
            continue
        event = {**_slice(program, task, float(start[task]) - waited, float(end[task])), "pid": pid}
        if waited > 0:
            event["args"] = {"waited for other ranks (us)": round(waited * US, 3)}
        events.append(event)
    return events
