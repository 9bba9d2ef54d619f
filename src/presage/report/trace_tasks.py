"""A trace's events as tasks of a timeline chart: as measured, or as replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from presage.engine import LaneKind, Timeline
from presage.graph.families import family
from presage.report.html.charts.lanes import LaneTasks
from presage.report.terms import family_name
from presage.traces.explain import Lateness
from presage.traces.replay import NS, RankTasks, Replay, StepTime, measured_steps
from presage.traces.trace import GpuKind, HostKind, Trace

RANKS = 4  # more ranks than that are not all drawn
SHORTEST = 1e-9  # seconds
WAITS = "waiting for the GPU"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def shown_ranks(replay: Replay, late: Sequence[Lateness] = (), most: int = RANKS) -> tuple[int, ...]:
    """All ranks, or of many the one that others wait for longest, the slowest, the fastest, and the first."""
    n = len(replay.ranks)
    if n <= most:
        return tuple(range(n))
    took = [sum(s.seconds for s in measured_steps(replay, i)) for i in range(n)]
    order = np.argsort(took, kind="stable").tolist()
    latest = int(np.argmax([x.made_others_wait for x in late])) if late else order[-1]
    wanted = dict.fromkeys([latest, order[-1], order[0], 0, order[-2], order[1]])
    return tuple(sorted(list(wanted)[:most]))


def shown_step(steps: Sequence[StepTime]) -> int:
    """The number of the step of median length; the first is skipped where there are others."""
    rest = list(range(1, len(steps))) or list(range(len(steps)))
    order = sorted(rest, key=lambda k: (steps[k].seconds, k))
    return order[(len(order) - 1) // 2] if order else 0


def step_window(all_steps: Sequence[Sequence[StepTime]], step: int) -> tuple[float, float]:
    """Seconds from the first start to the last end of a step, over some ranks."""
    found = [s[step] for s in all_steps if step < len(s)]
    if not found:
        return 0.0, 0.0
    return min(s.done - s.seconds for s in found), max(s.done for s in found)


def measured_tasks(replay: Replay, places: Sequence[int], window: tuple[float, float], prefix: str = "") -> LaneTasks:
    """Measured tasks of these ranks within a window."""
    start, end = np.zeros(len(replay.program)), np.zeros(len(replay.program))
    for place in places:
        r = replay.ranks[place]
        s, gpu = r.stretches, r.trace.gpu
        start[r.stretch_task], end[r.stretch_task] = (s.lo - r.origin) * NS, (s.hi - r.origin) * NS
        start[r.gpu_task], end[r.gpu_task] = (gpu.start - r.origin) * NS, (gpu.end - r.origin) * NS
    return _tasks(replay, places, start, end, window, prefix)


def replayed_tasks(
    replay: Replay, timeline: Timeline, places: Sequence[int], window: tuple[float, float], prefix: str = ""
) -> LaneTasks:
    """Replayed tasks of these ranks within a window; waits for other ranks are part of their collectives."""
    start = timeline.ready.copy()
    for place in places:
        r = replay.ranks[place]
        room = (timeline.end - timeline.start)[r.gpu_task]
        start[r.gpu_task] += np.minimum(r.lead * NS, room)
    return _tasks(replay, places, start, timeline.end, window, prefix)


def _tasks(
    replay: Replay, places: Sequence[int], start: Floats, end: Floats, window: tuple[float, float], prefix: str
) -> LaneTasks:
    program = replay.program
    tasks, groups = _events(replay, places)
    known = tuple(dict.fromkeys(groups))
    number = {g: i for i, g in enumerate(known)}
    named = tuple(prefix + _lane(lane.name, len(replay.ranks)) for lane in program.lanes)
    bars = LaneTasks(
        named, known, program.names, program.lane[tasks].astype(np.int64), start[tasks], (end - start)[tasks],
        np.array([number[g] for g in groups], np.int64), program.name[tasks].astype(np.int64),
    )  # fmt: skip
    bars = bars.select(bars.seconds >= SHORTEST).clipped(*window)
    return _grouped(bars.in_lanes(_order(replay, bars)))


def _order(replay: Replay, bars: LaneTasks) -> list[int]:
    """Lanes with anything on them: rank by rank, its threads first, and of these the one that begins first."""
    begins = np.full(len(bars.lanes), np.inf)
    np.minimum.at(begins, bars.lane, bars.start)
    lanes = replay.program.lanes
    host = [lane.kind is LaneKind.HOST for lane in lanes]
    used = np.flatnonzero(np.isfinite(begins)).tolist()
    return sorted(used, key=lambda i: (lanes[i].rank, not host[i], float(begins[i]) if host[i] else 0.0, i))


def _lane(name: str, ranks: int) -> str:
    """A lane of the only rank needs no rank in its name."""
    return name if ranks > 1 else name.partition(" ")[2].partition(" ")[2] or name


def _grouped(bars: LaneTasks) -> LaneTasks:
    """Groups in the order of the time they take, which is that of the legend."""
    order = np.argsort(-np.bincount(bars.group, bars.seconds, len(bars.groups)), kind="stable")
    place = np.argsort(order)
    return replace(bars, groups=tuple(bars.groups[i] for i in order), group=place[bars.group])


def _events(replay: Replay, places: Sequence[int]) -> tuple[Ints, list[str]]:
    """The tasks of some ranks that are events, and the family of ops of each; silences of the host are left out."""
    tasks, groups = [np.empty(0, np.int64)], list[str]()
    for place in places:
        r = replay.ranks[place]
        inner = _innermost(r.trace)
        owner = r.stretches.owner
        own = np.flatnonzero(owner >= 0)
        own = own[r.trace.host.kind[owner[own]] != HostKind.ANNOTATION]
        tasks += [r.stretch_task[own], r.gpu_task]
        waits = set(r.issues.tolist())
        groups += [WAITS if i in waits else _host_family(r.trace, int(inner[owner[i]])) for i in own.tolist()]
        groups += _gpu_families(r, inner)
    return np.concatenate(tasks), groups


def _innermost(trace: Trace) -> NDArray[np.int64]:
    """By host event the innermost operator that it is or is in, or -1."""
    kind, parent = trace.host.kind.tolist(), trace.host.parent.tolist()
    out = [-1] * len(kind)
    for i, up in enumerate(parent):
        out[i] = i if kind[i] == HostKind.OP else (out[up] if up >= 0 else -1)
    return np.array(out, np.int64)


def _host_family(trace: Trace, op: int) -> str:
    return _family(trace.host_name(op)) if op >= 0 else "host"


def _gpu_families(r: RankTasks, inner: NDArray[np.int64]) -> list[str]:
    trace = r.trace
    gpu, out = trace.gpu, list[str]()
    for event, (launch, kind) in enumerate(zip(gpu.launch.tolist(), gpu.kind.tolist(), strict=True)):
        op = int(inner[launch]) if launch >= 0 else -1
        if trace.is_collective[event]:
            out.append("communication")
        elif op >= 0:
            out.append(_family(trace.host_name(op)))
        else:
            out.append("copy and cast" if kind != GpuKind.KERNEL else _family(trace.gpu_name(event)))
    return out


def _family(name: str) -> str:
    """The op family; a backward node (AddmmBackward0) has that of its op."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    if "Backward" in name:
        name = "aten::" + _snake(name.partition("Backward")[0])
    return family_name(family(name))


def _snake(name: str) -> str:
    """EmbeddingBag as embedding_bag."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
