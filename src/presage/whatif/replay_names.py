"""What-ifs of a replay by name, as `presage replay --apply` takes them: the names of `presage whatif`, where only a
trace exists. Each is a function Replay -> Replay of `edits`; some take waits away, so the program changes too.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from presage.costs.host_constants import CUDA_GRAPH_US
from presage.engine import Edges, Program
from presage.errors import PresageError, compile_pattern, near
from presage.traces.replay import NS, RankTasks, Replay
from presage.traces.waits import Blocked, launch_times
from presage.whatif.edits.edit import EditKind, parse_factor, pieces, plain
from presage.whatif.replay_edits import MOST_FACTOR, ReplayEdit, scale

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

REPLAY_CALL, REPLAY_GAP = CUDA_GRAPH_US["call_us"] * 1e-6, CUDA_GRAPH_US["gap_us"] * 1e-6
FACTOR = "a factor above 0"
# Host work that no graph takes over: batches still have to come from somewhere.
LOADING = re.compile(r"data_?loader", re.IGNORECASE)


def parse(text: str) -> list[ReplayEdit]:
    """The edits that a text names: 'cuda_graph,faster=gemm:2'."""
    out = []
    for name, value in pieces(text, lambda name: name in EDITS):
        if name not in EDITS:
            known = near(name, EDITS)
            raise PresageError(f"--apply {name}: unknown edit{known or ': see `presage replay --list`'}")
        out.append(EDITS[name].make(value))
    return out


# ---- CUDA graphs


def cuda_graph(r: Replay) -> Replay:
    """Host time between waits for the GPU becomes one call; kernels follow each other with a graph's gap."""
    durations = r.durations.astype(np.float64)
    found = [_graphed(rank, durations) for rank in r.ranks]
    if not any(found):
        raise PresageError("cuda_graph: no step of the trace launches two kernels without waiting between them")
    return replace(r, durations=durations)


def _graphed(rank: RankTasks, durations: NDArray[np.float64]) -> bool:
    """One rank; whether it launches anything."""
    s, gpu = rank.stretches, rank.trace.gpu
    launched = np.flatnonzero(gpu.launch >= 0)
    if rank.trace.cpu_only or len(launched) < 2:
        return False
    calls = s.first[gpu.launch[launched]].astype(np.int64)
    waits = [b.stretch for b in rank.blocked if not b.from_start]
    goes = np.isin(s.thread, np.unique(s.thread[calls])) & _in_steps(rank) & ~_loading(rank)
    goes[waits] = False
    durations[rank.stretch_task[goes]] = 0.0
    durations[rank.stretch_task[_starts(rank, calls, waits)]] = REPLAY_CALL
    closer = max(0.0, rank.latencies.gap * NS - REPLAY_GAP)
    tasks = rank.gpu_task[launched]
    durations[tasks] = np.maximum(durations[tasks] - closer, 0.0)
    return True


def _in_steps(rank: RankTasks) -> Mask:
    """Stretches within the steps of the trace; all where it marks none."""
    s, steps = rank.stretches, rank.trace.steps
    if not steps:
        return np.ones(len(s), np.bool_)
    return np.asarray((s.lo >= steps[0].start) & (s.hi <= steps[-1].end))


def _loading(rank: RankTasks) -> Mask:
    """Stretches inside something that loads data."""
    named = np.array([LOADING.search(n) is not None for n in rank.trace.names], np.bool_)
    inside = rank.trace.host.outermost(named[rank.trace.host.name]) >= 0
    owner = rank.stretches.owner
    return np.asarray((owner >= 0) & inside[owner])


def _starts(rank: RankTasks, calls: Ints, waits: list[int]) -> Ints:
    """The launch with which each graph begins: the first of a step, and the first after each wait."""
    s, steps = rank.stretches, rank.trace.steps
    borders = [*(x.start for x in steps), *(int(s.hi[w]) for w in waits)] or [0]
    launches = calls[np.argsort(s.lo[calls], kind="stable")]
    first = np.searchsorted(s.lo[launches], np.array(sorted(borders)))
    return np.unique(launches[first[first < len(launches)]])


# ---- waits


def no_sync(pattern: str = "") -> ReplayEdit:
    """Calls that wait for the GPU return at once: those whose name, or that of something around, matches."""
    regex = compile_pattern(pattern or ".")

    def edit(r: Replay) -> Replay:
        drop = np.zeros(len(r.program.edges), np.bool_)
        for rank in (x for x in r.ranks if not x.trace.cpu_only):
            waiting = rank.stretch_task[[b.stretch for b in _syncs(rank, regex)]]
            drop |= _between(r, rank.gpu_task, waiting)
        if not drop.any():
            raise PresageError(f"no_sync: no call{f' that matches {pattern!r}' if pattern else ''} waits for the GPU")
        return _without(r, drop)

    return edit


def _syncs(rank: RankTasks, regex: re.Pattern[str]) -> list[Blocked]:
    """Waits for the GPU's ends after which something is launched: the last of a trace is the profiler's own."""
    named = np.array([regex.search(n) is not None for n in rank.trace.names], np.bool_)
    inside, s = rank.trace.host.outermost(named[rank.trace.host.name]) >= 0, rank.stretches
    last = int(launch_times(rank.trace.host, rank.trace.gpu).max(initial=0))
    return [
        b for b in rank.blocked
        if not b.from_start and s.hi[b.stretch] < last and (s.owner[b.stretch] < 0 or inside[s.owner[b.stretch]])
    ]  # fmt: skip


def overlap(r: Replay) -> Replay:
    """Kernels no longer wait for collectives of other streams: the most that overlap could bring."""
    drop = np.zeros(len(r.program.edges), np.bool_)
    for rank in r.ranks:
        sends = rank.trace.is_collective
        drop |= _between(r, rank.gpu_task[sends], rank.gpu_task[~sends])
    if not drop.any():
        raise PresageError("overlap: no kernel of the trace waits for a collective of another stream")
    return _without(r, drop)


def _between(r: Replay, before: Ints, after: Ints) -> Mask:
    e = r.program.edges
    return np.isin(e.before, before) & np.isin(e.after, after)


def _without(r: Replay, drop: Mask) -> Replay:
    """The same tasks with some of the waits gone."""
    p, keep = r.program, ~drop
    e = p.edges
    kept = Edges(e.before[keep], e.after[keep], e.delay[keep], e.from_start[keep])
    made = Program.of(p.lanes, p.lane, kept, group=p.group, release=p.release, name=p.name, names=p.names)
    return replace(r, program=made)


# ---- other speeds


def faster(text: str) -> ReplayEdit:
    """'gemm:2': kernels that match take half as long."""
    pattern, _, factor = text.rpartition(":")
    if not pattern:
        raise PresageError(f"faster={text}: write faster=REGEX:F, such as faster=gemm:2")
    return scale("kernel", pattern, 1 / parse_factor("faster", factor, FACTOR, MOST_FACTOR))


def host(text: str) -> ReplayEdit:
    """'1.5': all host time, waits apart, divided."""
    factor = parse_factor("host", text, FACTOR, MOST_FACTOR)

    def edit(r: Replay) -> Replay:
        durations = r.durations.astype(np.float64)
        for rank in r.ranks:
            works = np.setdiff1d(np.arange(len(rank.stretches)), rank.issues)
            durations[rank.stretch_task[works]] /= factor
        return replace(r, durations=durations)

    return edit


EDITS: dict[str, EditKind[ReplayEdit]] = {
    kind.name: kind
    for kind in (
        plain(
            "cuda_graph",
            "Host time of the threads that launch becomes one call between two waits for the GPU (loading of data "
            "stays), and kernels follow each other with the gap of a CUDA graph.",
            cuda_graph,
        ),
        EditKind(
            "no_sync",
            "Calls that wait for the GPU return at once: all, or those whose name (or that of an op around) matches. "
            "Assumes that nothing needs the value they waited for.",
            no_sync,
            "[REGEX]",
        ),
        EditKind("faster", "Kernels that match are F times as fast.", faster, "REGEX:F"),
        EditKind("host", "The host is F times as fast.", host, "F"),
        plain(
            "overlap",
            "Kernels never wait for collectives of other streams; a step still ends after its collectives. The most "
            "that overlap could bring.",
            overlap,
        ),
    )
}
