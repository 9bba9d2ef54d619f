"""Contention: kernels and collectives that overlap slow each other down.

The slow-downs are those of `costs.overlap`. When kernels run depends on how long they take, so the timeline is made
again with the new times, twice: what moves then is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from presage.costs.collectives import RankGroup, volume
from presage.costs.kernel_model import OpTime
from presage.costs.overlap import Contention, channels, contention, kind_of, waves
from presage.engine.timeline import union
from presage.graph.graph import Graph
from presage.graph.work import bytes_moved, collective, collective_bytes
from presage.hardware import Platform
from presage.prediction.rank_program import RankProgram
from presage.prediction.step_program import STREAM

Floats = NDArray[np.float64]
Way: TypeAlias = Literal["ring", "nvls", "pairs"]
PASSES: dict[Way, float] = {"ring": 3.0, "nvls": 2.0, "pairs": 3.0}  # bytes through memory for each received
ROUNDS = 2


@dataclass(frozen=True, eq=False)
class OverlapSlowdown:
    """Slowdown of each op that overlaps a collective, and mean slowdown of collectives that overlap compute."""

    compute: Floats
    collective: float


@dataclass(frozen=True)
class _Traffic:
    """Mean bandwidth and channels that a step's collectives take while they run."""

    bytes_per_second: float
    channels: int
    traffic: float


def overlap_slowdown(
    graph: Graph, times: Sequence[OpTime], platform: Platform, groups: dict[str, RankGroup]
) -> OverlapSlowdown:
    """Slow-downs of a step's ops next to its collectives."""
    found = _traffic(graph, times, platform, groups)
    compute = np.ones(len(graph.ops))
    if found is None:
        return OverlapSlowdown(compute, 1.0)
    lost = spent = 0.0
    for i, (op, time) in enumerate(zip(graph.ops, times, strict=True)):
        if time.launches and collective(op) is None and time.seconds > 0:
            one = _contention(graph, i, time, platform, found)
            compute[i] = one.compute
            lost, spent = lost + one.collective * time.seconds, spent + time.seconds
    return OverlapSlowdown(compute, lost / spent if spent else 1.0)


def _contention(graph: Graph, place: int, time: OpTime, platform: Platform, found: _Traffic) -> Contention:
    op, gpu, kind = graph.ops[place], platform.gpu, kind_of(time.family)
    moved = bytes_moved(graph, op)
    results = sum(t.elements for t in graph.outputs_of(op))
    return contention(
        gpu,
        bytes_per_second=found.bytes_per_second,
        channels=found.channels,
        computes=kind == "products",
        memory_share=(moved.read + moved.written) / time.seconds / gpu.memory_bandwidth,
        waves=waves(gpu, results) if kind == "products" and results else math.inf,
        kind=kind,
        traffic=found.traffic,
    )


def _traffic(
    graph: Graph, times: Sequence[OpTime], platform: Platform, groups: dict[str, RankGroup]
) -> _Traffic | None:
    """Mean traffic of all collectives, weighted by their durations."""
    seconds = moved = used = through = 0.0
    for op, time in zip(graph.ops, times, strict=True):
        kind = collective(op)
        if kind is None or op.group not in groups or time.seconds <= 0:
            continue
        way = _way(kind, platform, groups[op.group])
        seconds += time.seconds
        moved += volume(kind, groups[op.group].ranks) * collective_bytes(graph, op)
        used += channels(platform.gpu, way) * time.seconds
        through += PASSES[way] * time.seconds
    if not seconds:
        return None
    return _Traffic(moved / seconds, max(1, round(used / seconds)), through / seconds)


def _way(kind: str, platform: Platform, group: RankGroup) -> Way:
    """The algorithm NCCL uses for a large collective."""
    if kind in ("all_to_all", "send_recv"):
        return "pairs"
    return "nvls" if kind == "all_reduce" and platform.links[0].in_network and group.ranks > 2 else "ring"


def apply_contention(ranks: RankProgram, slow: Sequence[OverlapSlowdown]) -> RankProgram:
    """The ranks with overlapping kernels and collectives slowed down; `slow` by member."""
    plain = ranks.members
    for _ in range(ROUNDS):
        timeline = ranks.timeline()
        changed = []
        for k, (m, by) in enumerate(zip(plain, slow, strict=True)):
            mine = (ranks.member == k) & (ranks.step == ranks.steps - 1)
            factor = _factors(
                timeline.start[mine], timeline.end[mine], m.tasks.lane, m.tasks.op, _met(m.tasks.meetings), by
            )
            changed.append(m.with_seconds(m.tasks.seconds * factor))
        ranks = ranks.with_members(changed)
    return ranks


def _met(meetings: Sequence[tuple[int, str]]) -> NDArray[np.int64]:
    return np.array([task for task, _ in meetings], np.int64)


def _factors(
    start: Floats,
    end: Floats,
    lane: NDArray[np.int64],
    op: NDArray[np.int64],
    met: NDArray[np.int64],
    by: OverlapSlowdown,
) -> Floats:
    """Slowdown of each task of a rank's step, by the share of it that overlaps the other kind."""
    sends = np.zeros(len(lane), np.bool_)
    sends[met] = True
    works = (lane >= STREAM) & ~sends
    factor = np.ones(len(lane))
    share = _covered(start[works], end[works], start[sends], end[sends])
    factor[works] = 1 + (by.compute[op[works]] - 1) * share
    factor[sends] = 1 + (by.collective - 1) * _covered(start[sends], end[sends], start[works], end[works])
    return factor


def _covered(start: Floats, end: Floats, others_start: Floats, others_end: Floats) -> Floats:
    """The share of each span in which any of the others runs."""
    spans = union(others_start, others_end)
    if not len(spans) or not len(start):
        return np.zeros(len(start))
    edges = spans.ravel()
    sums = np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])])
    totals = np.column_stack([sums[:-1], sums[1:]]).ravel()
    until = np.interp(np.concatenate([start, end]), edges, totals)
    length = np.maximum(end - start, 1e-15)
    return np.asarray(np.clip((until[len(start) :] - until[: len(start)]) / length, 0.0, 1.0))
