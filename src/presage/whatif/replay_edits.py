"""What-if edits of a replay: the same program with other durations. Each edit is a function Replay -> Replay."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from presage.errors import PresageError, compile_pattern
from presage.traces.replay import NS, RankTasks, Replay
from presage.traces.trace import HostKind, Trace
from presage.traces.waits import launch_times

ReplayEdit = Callable[[Replay], Replay]
Mask = NDArray[np.bool_]

TARGETS = {
    "kernel": "GPU kernels, copies and memsets by name",
    "collective": "collectives by kernel name or stated name",
    "op": "operators and regions by name: their host time and the GPU work they launch",
    "host": "operators and regions by name: their host time only",
    "call": "calls into the GPU runtime by name",
}

# A rank is late where it takes this much longer than the other ranks do at the same place.
LATE_FACTOR = 2.0
LATE_SECONDS = 500e-6
MOST_FACTOR = 1e9  # times as long: a second would be 30 years


def parse_scale(text: str) -> ReplayEdit:
    """'kernel=REGEX:0.5': what matches takes half as long."""
    what, sep, factor = text.rpartition(":")
    try:
        number = float(factor)
    except ValueError:
        number = -1.0
    if not sep or not 0 <= number <= MOST_FACTOR:
        raise PresageError(f"--scale {text!r}: write TARGET=REGEX:FACTOR, such as 'kernel=gemm:0.5', FACTOR at least 0")
    target, pattern = _target(what, "--scale")
    return scale(target, pattern, number)


def parse_remove(text: str) -> ReplayEdit:
    """'op=REGEX': what matches is not there."""
    target, pattern = _target(text, "--remove")
    return remove(target, pattern)


def _target(text: str, option: str) -> tuple[str, str]:
    target, sep, pattern = text.partition("=")
    if not sep or target not in TARGETS or not pattern:
        raise PresageError(f"{option} {text!r}: write TARGET=REGEX with TARGET one of {', '.join(TARGETS)}")
    return target, pattern


def scale(target: str, pattern: str, factor: float) -> ReplayEdit:
    """Multiply the time of what matches; the gaps before kernels stay."""

    def edit(r: Replay) -> Replay:
        mask = _matching(r, target, pattern)
        lead = _leads(r)
        return replace(r, durations=np.where(mask, lead + (r.durations - lead) * factor, r.durations))

    return edit


def remove(target: str, pattern: str) -> ReplayEdit:
    """Take out what matches, gaps and all."""

    def edit(r: Replay) -> Replay:
        return replace(r, durations=np.where(_matching(r, target, pattern), 0.0, r.durations))

    return edit


def edited(r: Replay, edits: Iterable[ReplayEdit]) -> Replay:
    """All edits, one after another."""
    for edit in edits:
        r = edit(r)
    return r


def _leads(r: Replay) -> NDArray[np.float64]:
    lead = np.zeros(len(r.durations))
    for rank in r.ranks:
        lead[rank.gpu_task] = rank.lead * NS
    return np.minimum(lead, r.durations)


def _matching(r: Replay, target: str, pattern: str) -> Mask:
    regex = compile_pattern(pattern)
    mask = np.zeros(len(r.durations), np.bool_)
    for rank in r.ranks:
        named = np.array([regex.search(n) is not None for n in rank.trace.names], np.bool_)
        mask |= _rank_mask(rank, target, named, regex, len(mask))
    if not mask.any():
        raise PresageError(f"no {target} matches {pattern!r}; `presage trace` lists what is there")
    return mask


def _rank_mask(rank: RankTasks, target: str, named: Mask, regex: re.Pattern[str], tasks: int) -> Mask:
    trace, mask = rank.trace, np.zeros(tasks, np.bool_)
    gpu_name = named[trace.gpu.name]
    if target == "kernel":
        mask[rank.gpu_task[gpu_name]] = True
    elif target == "collective":
        stated = [e for e, c in trace.collectives.items() if regex.search(c.name)]
        gpu_name[stated] = True
        mask[rank.gpu_task[gpu_name & trace.is_collective]] = True
    else:
        calls = trace.host.kind == HostKind.CALL
        inside = trace.host.outermost(named[trace.host.name] & (calls if target == "call" else ~calls)) >= 0
        owner = rank.stretches.owner
        mask[rank.stretch_task[(owner >= 0) & inside[owner]]] = True
        if target == "op":
            launch = trace.gpu.launch
            mask[rank.gpu_task[(launch >= 0) & inside[launch]]] = True
    return mask


def drop_rank_delay(rank: int) -> ReplayEdit:
    """Where this rank takes far longer than the others do at the same place, give it their median instead."""

    def edit(r: Replay) -> Replay:
        places = {r.run.rank(i): i for i in range(len(r.run))}
        if rank not in places:
            raise PresageError(f"--drop-rank-delay {rank}: the run has ranks {', '.join(map(str, sorted(places)))}")
        if len(places) < 2:
            raise PresageError("--drop-rank-delay compares ranks: give the traces of all ranks")
        lists = [_by_place(x) for x in r.ranks]
        own = lists.pop(places[rank])
        durations = r.durations.astype(np.float64)
        for key, tasks in own.items():
            others = [r.durations[found[key]].astype(np.float64) for found in lists if key in found]
            if others:
                _level(durations, tasks, others)
        return replace(r, durations=durations)

    return edit


def _by_place(rank: RankTasks) -> dict[tuple[str, str], NDArray[np.int64]]:
    """A rank's tasks in time order by what they are: host stretches by owner, kernels (not collectives) by name."""
    out: dict[tuple[str, str], list[int]] = defaultdict(list)
    s, trace = rank.stretches, rank.trace
    for i, task in enumerate(rank.stretch_task):
        out["host", trace.host_name(s.owner[i]) if s.owner[i] >= 0 else ""].append(int(task))
    for event in np.flatnonzero(~trace.is_collective):
        out["gpu", trace.gpu_name(int(event))].append(int(rank.gpu_task[event]))
    return {key: np.array(tasks, np.int64) for key, tasks in out.items()}


def _level(durations: NDArray[np.float64], tasks: NDArray[np.int64], others: list[NDArray[np.float64]]) -> None:
    """Lower the tasks that are late against the same occurrence on other ranks (or against their median)."""
    same = [o for o in others if len(o) == len(tasks)]
    usual = np.median(same, axis=0) if same else np.full(len(tasks), np.median(np.concatenate(others)))
    seconds = durations[tasks]
    late = (seconds > LATE_FACTOR * usual) & (seconds > usual + LATE_SECONDS)
    durations[tasks[late]] = usual[late]


# ---- A what-if with measured numbers: one run's host with another run's kernels, op by op.

LEAST_COVERED = 0.8  # of the other run's kernel time: below it, the two do not run the same operators

Ints = NDArray[np.int64]


def launching_ops(trace: Trace) -> list[tuple[str, Ints]]:
    """The operators that launched something, in the order the host ran them, each with its GPU events."""
    inner = trace.host.innermost(trace.host.kind == HostKind.OP)
    found: dict[int, list[int]] = {}
    for event in np.argsort(launch_times(trace.host, trace.gpu), kind="stable"):
        launch = int(trace.gpu.launch[event])
        if launch >= 0 and inner[launch] >= 0:
            found.setdefault(int(inner[launch]), []).append(int(event))
    order = sorted(found, key=lambda op: int(trace.host.start[op]))
    return [(trace.host_name(op), np.array(found[op], np.int64)) for op in order]


def kernels_of(replay: Replay, other: Replay) -> tuple[Replay, float]:
    """The first replay with the second one's kernel times, and the share of those that found their place."""
    if len(replay.ranks) != len(other.ranks):
        raise PresageError(f"{len(replay.ranks)} ranks cannot take the kernels of {len(other.ranks)}")
    durations = replay.durations.astype(np.float64)
    given = whole = 0.0
    for own, theirs in zip(replay.ranks, other.ranks, strict=True):
        placed, total = _transplant(durations, own, theirs)
        given, whole = given + placed, whole + total
    covered = given / whole if whole else 0.0
    if covered < LEAST_COVERED:
        raise PresageError(
            f"only {covered:.0%} of the other trace's kernel time belongs to operators that this one runs in the same "
            "order: it must be of the same training step"
        )
    return replace(replay, durations=durations), covered


def _transplant(durations: NDArray[np.float64], mine: RankTasks, theirs: RankTasks) -> tuple[float, float]:
    """Change one rank's durations; (placed, total) seconds of the other's kernels."""
    ours, others = launching_ops(mine.trace), launching_ops(theirs.trace)
    seconds = (mine.trace.gpu.end - mine.trace.gpu.start) * NS
    took_there = (theirs.trace.gpu.end - theirs.trace.gpu.start) * NS
    placed = 0.0
    names, other_names = [name for name, _ in ours], [name for name, _ in others]
    for block in SequenceMatcher(None, names, other_names, autojunk=False).get_matching_blocks():
        for k in range(block.size):
            events, there = ours[block.a + k][1], float(took_there[others[block.b + k][1]].sum())
            here = float(seconds[events].sum())
            durations[mine.gpu_task[events]] = mine.lead[events] * NS + seconds[events] * (
                there / here if here else 0.0
            )
            placed += there
    return placed, float(sum(took_there[events].sum() for _, events in others))
