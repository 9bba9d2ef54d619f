"""A run's events as bars: as they were measured, or when a timeline of the same run has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from presage.engine import LaneKind, Timeline
from presage.graph.families import family
from presage.report.html.charts.lanes import Bars
from presage.traces.explain import lateness
from presage.traces.ranktasks import NS, RankTasks
from presage.traces.replay import Replay, StepTime, measured_steps
from presage.traces.trace import GpuKind, HostKind, Trace

__all__ = ["Drawn", "measured_bars", "replayed_bars", "shown_ranks", "shown_step", "step_window"]

RANKS = 4  # more ranks than that are not all drawn
SHORTEST = 1e-9  # seconds
WAITS = "waits for the GPU"
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Drawn:
    """Which ranks are drawn, by place, and which of their steps."""

    places: tuple[int, ...]
    step: int
    window: tuple[float, float]


def shown_ranks(replay: Replay, most: int = RANKS) -> tuple[int, ...]:
    """All ranks, or of many the one that others wait for longest, the slowest, the fastest, and the first."""
    n = len(replay.ranks)
    if n <= most:
        return tuple(range(n))
    took = [sum(s.seconds for s in measured_steps(replay, i)) for i in range(n)]
    order = np.argsort(took, kind="stable").tolist()
    late = int(np.argmax([x.made_others_wait for x in lateness(replay)]))
    wanted = dict.fromkeys([late, order[-1], order[0], 0, order[-2], order[1]])
    return tuple(sorted(list(wanted)[:most]))


def shown_step(steps: Sequence[StepTime]) -> int:
    """The step of the middle length; the first is left out where there are others."""
    rest = list(range(1, len(steps))) or list(range(len(steps)))
    order = sorted(rest, key=lambda k: (steps[k].seconds, k))
    return order[(len(order) - 1) // 2] if order else 0


def step_window(all_steps: Sequence[Sequence[StepTime]], step: int) -> tuple[float, float]:
    """Seconds from the first start to the last end of a step, over some ranks."""
    found = [s[step] for s in all_steps if step < len(s)]
    if not found:
        return 0.0, 0.0
    return min(s.done - s.seconds for s in found), max(s.done for s in found)


def measured_bars(replay: Replay, places: Sequence[int], window: tuple[float, float], prefix: str = "") -> Bars:
    """What some ranks did in a window, as the profiler saw it."""
    start, end = np.zeros(len(replay.program)), np.zeros(len(replay.program))
    for place in places:
        r = replay.ranks[place]
        s, gpu = r.stretches, r.trace.gpu
        start[r.stretch_task], end[r.stretch_task] = (s.lo - r.origin) * NS, (s.hi - r.origin) * NS
        start[r.gpu_task], end[r.gpu_task] = (gpu.start - r.origin) * NS, (gpu.end - r.origin) * NS
    return _bars(replay, places, start, end, window, prefix)


def replayed_bars(
    replay: Replay, timeline: Timeline, places: Sequence[int], window: tuple[float, float], prefix: str = ""
) -> Bars:
    """The same in a timeline of the run; waits for other ranks are part of their collectives."""
    start = timeline.ready.copy()
    for place in places:
        r = replay.ranks[place]
        room = (timeline.end - timeline.start)[r.gpu_task]
        start[r.gpu_task] += np.minimum(r.lead * NS, room)
    return _bars(replay, places, start, timeline.end, window, prefix)


def _bars(
    replay: Replay, places: Sequence[int], start: Floats, end: Floats, window: tuple[float, float], prefix: str
) -> Bars:
    program = replay.program
    tasks, groups = _drawn(replay, places)
    known = tuple(dict.fromkeys(groups))
    number = {g: i for i, g in enumerate(known)}
    named = tuple(prefix + _lane(lane.name, len(replay.ranks)) for lane in program.lanes)
    bars = Bars(
        named, known, program.names, program.lane[tasks].astype(np.int64), start[tasks], (end - start)[tasks],
        np.array([number[g] for g in groups], np.int64), program.name[tasks].astype(np.int64),
    )  # fmt: skip
    bars = bars.some(bars.seconds >= SHORTEST).clipped(*window)
    return _grouped(bars.in_lanes(_order(replay, bars)))


def _order(replay: Replay, bars: Bars) -> list[int]:
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


def _grouped(bars: Bars) -> Bars:
    """Groups in the order of the time they take, which is that of the legend."""
    order = np.argsort(-np.bincount(bars.group, bars.seconds, len(bars.groups)), kind="stable")
    place = np.argsort(order)
    return replace(bars, groups=tuple(bars.groups[i] for i in order), group=place[bars.group])


def _drawn(replay: Replay, places: Sequence[int]) -> tuple[Ints, list[str]]:
    """The tasks of some ranks that are events, and the family of ops of each; silences of the host are left out."""
    tasks, groups = [np.empty(0, np.int64)], list[str]()
    for place in places:
        r = replay.ranks[place]
        inner = _innermost(r.trace)
        owner = r.stretches.owner
        mine = np.flatnonzero(owner >= 0)
        mine = mine[r.trace.host.kind[owner[mine]] != HostKind.ANNOTATION]
        tasks += [r.stretch_task[mine], r.gpu_task]
        waits = set(r.issues.tolist())
        groups += [WAITS if i in waits else _of_host(r.trace, int(inner[owner[i]])) for i in mine.tolist()]
        groups += _of_gpu(r, inner)
    return np.concatenate(tasks), groups


def _innermost(trace: Trace) -> NDArray[np.int64]:
    """By host event the innermost operator that it is or is in, or -1."""
    kind, parent = trace.host.kind.tolist(), trace.host.parent.tolist()
    out = [-1] * len(kind)
    for i, up in enumerate(parent):
        out[i] = i if kind[i] == HostKind.OP else (out[up] if up >= 0 else -1)
    return np.array(out, np.int64)


def _of_host(trace: Trace, op: int) -> str:
    return _family(trace.host_name(op)) if op >= 0 else "host"


def _of_gpu(r: RankTasks, inner: NDArray[np.int64]) -> list[str]:
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
    """Of a backward node (AddmmBackward0) the family of its op."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    if "Backward" in name:
        name = "aten::" + _snake(name.partition("Backward")[0])
    return family(name)


def _snake(name: str) -> str:
    """EmbeddingBag as embedding_bag."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
