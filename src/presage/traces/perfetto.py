"""Timelines as Chrome/Perfetto JSON: predicted beside measured, lane by lane. Open them at ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from presage.engine import LaneKind, Program, Timeline
from presage.traces.replay import NS, RankTasks, Replay

US = 1e6
SHORTEST = 1e-9  # seconds: what is shorter would be drawn as nothing
WAIT = "waiting for other ranks"
COLOUR = {LaneKind.HOST: "host", LaneKind.COMPUTE: "kernel", LaneKind.COMMUNICATION: "collective"}


def chrome_trace(replay: Replay, timeline: Timeline) -> bytes:
    """The JSON text. Each rank is two processes, `measured` and `predicted`, with the same lanes."""
    events: list[dict[str, Any]] = []
    for place, rank in enumerate(replay.ranks):
        start, end = _measured(replay, rank)
        _rank(events, replay, rank, 2 * place, "measured", start, end, end - start)
        lead = np.zeros(len(replay.program))
        lead[rank.gpu_task] = np.minimum(rank.lead * NS, (timeline.end - timeline.start)[rank.gpu_task])
        begun = timeline.start + lead
        _rank(
            events, replay, rank, 2 * place + 1, "predicted", begun, timeline.end, timeline.end - begun, timeline.wait
        )
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


def _timeline(timeline: Timeline, processes: Mapping[int, str]) -> list[dict[str, Any]]:
    program, events = timeline.program, list[dict[str, Any]]()
    for rank, name in processes.items():
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for i, lane in enumerate(program.lanes):
        place = {"ph": "M", "pid": lane.rank, "tid": i}
        events.append({**place, "name": "thread_name", "args": {"name": lane.name}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": i}})
    for task, wait in enumerate(timeline.wait.tolist()):
        start, end = float(timeline.start[task]), float(timeline.end[task])
        if wait >= SHORTEST:
            events.append(_drawn(program, task, WAIT, "wait", start - wait, start))
        if end - start >= SHORTEST:
            kind = COLOUR[program.lanes[program.lane[task]].kind]
            events.append(_drawn(program, task, program.label(task), kind, start, end))
    return events


def _drawn(program: Program, task: int, name: str, kind: str, start: float, end: float) -> dict[str, Any]:
    lane = int(program.lane[task])
    times = {"ts": round(start * US, 3), "dur": round((end - start) * US, 3)}
    return {"ph": "X", "name": name, "cat": kind, "pid": program.lanes[lane].rank, "tid": lane, **times}


def _measured(replay: Replay, rank: RankTasks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    start, end = np.zeros(len(replay.program)), np.zeros(len(replay.program))
    s, gpu = rank.stretches, rank.trace.gpu
    start[rank.stretch_task], end[rank.stretch_task] = (s.lo - rank.origin) * NS, (s.hi - rank.origin) * NS
    start[rank.gpu_task], end[rank.gpu_task] = (gpu.start - rank.origin) * NS, (gpu.end - rank.origin) * NS
    return start, end


def _rank(
    events: list[dict[str, Any]],
    replay: Replay,
    rank: RankTasks,
    pid: int,
    what: str,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    took: NDArray[np.float64],
    wait: NDArray[np.float64] | None = None,
) -> None:
    """Append one rank's lanes. Host silences are left blank; a wait in a collective is drawn as part of it."""
    program, number = replay.program, replay.run.rank(rank.place)
    events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {number} {what}"}})
    events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for lane in sorted(set(program.lane[rank.gpu_task].tolist()) | set(program.lane[rank.stretch_task].tolist())):
        name = program.lanes[lane].name
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}})
    working = rank.stretch_task[rank.stretches.owner >= 0]
    for task in [*working.tolist(), *rank.gpu_task.tolist()]:
        waited = 0.0 if wait is None else float(wait[task])
        if took[task] + waited < SHORTEST:
            continue
        event = {
            "ph": "X",
            "name": program.label(task),
            "cat": COLOUR[program.lanes[program.lane[task]].kind],
            "pid": pid,
            "tid": int(program.lane[task]),
            "ts": round(float(start[task] - waited) * US, 3),
            "dur": round(float(end[task] - start[task] + waited) * US, 3),
        }
        if waited > 0:
            event["args"] = {"waited for other ranks (us)": round(waited * US, 3)}
        events.append(event)
