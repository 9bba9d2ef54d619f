"""Random effects from Kineto traces of all ranks of a run: which GPUs are slow, which steps, and what is left.

Kernels are known by name and by their place among those of that name in a step; ranks that run the same kernels (those
of one pipeline stage) are compared, by the kernels that each of them runs in every step. For each class of work the
logarithm of its seconds in a rank and step is taken apart into rank, step and rest by sums of squares. With one step
the kernels are dealt out into a few parts, which stand for steps: then nothing is known of steps. Of a collective,
whatever group of ranks it is of, the seconds from the last arrival on count, waits do not: it has no rank.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.noise.model import CLASSES, COMMUNICATION, Belief, NoiseModel, WorkSpread
from presage.noise.work_classes import kernel_class, transfer_class
from presage_fit.random_effects import EffectEstimate, sd_estimate, two_way

if TYPE_CHECKING:
    from presage.traces.trace import Trace
    from presage.traces.trace_set import TraceSet

Floats = NDArray[np.float64]
Signature = tuple[str, int]
PARTS = 8  # that kernels are dealt into where there is one step
FEWEST = 20  # kernels, or collectives, of a class
ALIKE = 0.5  # of the kernels of two ranks: they do the same work
FORWARD = 4  # collectives of one kind and size before the backward pass: more than a loss or a flag
BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class TraceEffects:
    """What traces tell, by class of work; `compared` is the share of kernel time that could be compared."""

    ranks: int
    steps: int
    spread: dict[str, dict[str, EffectEstimate]]
    compared: float
    source: str

    def belief(self) -> Belief:
        """The same as a noise model with ranges."""
        spread = {k: WorkSpread(**{n: c.value for n, c in parts.items()}) for k, parts in self.spread.items()}
        each = [(f"spread.{k}.{n}", c) for k, parts in self.spread.items() for n, c in parts.items()]
        intervals = {path: c.interval for path, c in each}
        return Belief(NoiseModel(spread), intervals, {f"spread.{k}": self.source for k in self.spread})


def fit_traces(run: TraceSet, collectives: str | None = None) -> TraceEffects:
    """From a run of several ranks. `collectives` is the class of all its collectives, where their kind does not say."""
    if len(run) < 2:
        raise InputError(run.traces[0].path, "is of one rank: how ranks differ takes traces of several")
    if collectives is not None and collectives not in COMMUNICATION:
        raise InputError(run.traces[0].path, f"{collectives!r} is not a class: choose from {', '.join(COMMUNICATION)}")
    steps = min(max(len(t.steps), 1) for t in run.traces)
    cells = [[_kernels(t, s) for s in range(steps)] for t in run.traces]
    total, shared, parts = sum(sum(c.values()) for rank in cells for c in rank), 0.0, []
    for peers in _peers(cells):
        common = set.intersection(*(set(c) for rank in peers for c in rank))
        shared += sum(c[k] for rank in peers for c in rank for k in common)
        parts.append(dict(_compute(peers, common)))
    spread = _pooled(parts) | dict(_transfers(run, collectives))
    if not spread:
        raise InputError(run.traces[0].path, "ranks have too few kernels in common to compare")
    source = f"traces of {len(run)} ranks, {steps} step{'s' if steps > 1 else ''}"
    order = sorted(spread, key=CLASSES.index)
    return TraceEffects(len(run), steps, {k: spread[k] for k in order}, shared / max(total, 1e-12), source)


def _peers(cells: Sequence[Sequence[dict[Signature, float]]]) -> list[list[Sequence[dict[Signature, float]]]]:
    """Ranks that run the same kernels, such as those of one pipeline stage; a rank like no other is left out."""
    groups: list[list[Sequence[dict[Signature, float]]]] = []
    for rank in cells:
        mine = set(rank[0])
        like = next((g for g in groups if len(mine & set(g[0][0])) >= ALIKE * len(mine | set(g[0][0]))), None)
        like.append(rank) if like is not None else groups.append([rank])
    found = [g for g in groups if len(g) > 1]
    return found or [list(cells)]


def _pooled(parts: Sequence[dict[str, dict[str, EffectEstimate]]]) -> dict[str, dict[str, EffectEstimate]]:
    """Effects of several groups of ranks together: variances by how many values each is from."""
    out: dict[str, dict[str, EffectEstimate]] = {}
    for kind in dict.fromkeys(k for p in parts for k in p):
        mine = [p[kind] for p in parts if kind in p]
        out[kind] = {name: _mean_effect([m[name] for m in mine if name in m]) for name in mine[0]}
    return out


def _mean_effect(each: Sequence[EffectEstimate]) -> EffectEstimate:
    if len(each) == 1:
        return each[0]
    weights = [e.n for e in each]
    value, low, high = (
        float(np.sqrt(np.average([getattr(e, k) ** 2 for e in each], weights=weights)))
        for k in ("value", "low", "high")
    )
    return EffectEstimate(value, low, high, sum(weights))


def _kernels(trace: Trace, step: int) -> dict[Signature, float]:
    """Seconds of the kernels of a step that are no collectives, by name and place."""
    events = np.flatnonzero(~trace.is_collective & (trace.gpu.kind == 0) & _in_step(trace, step))
    seen: Counter[int] = Counter()
    out = {}
    for event in events[np.argsort(trace.gpu.start[events], kind="stable")]:
        name = int(trace.gpu.name[event])
        seen[name] += 1
        took = float(trace.gpu.end[event] - trace.gpu.start[event]) * 1e-9
        if took > 0:
            out[trace.names[name], seen[name]] = took
    return out


def _in_step(trace: Trace, step: int) -> NDArray[np.bool_]:
    """GPU events that the host launched in a step; with no steps marked, all of them."""
    if not trace.steps:
        return np.ones(len(trace.gpu), np.bool_)
    window = trace.steps[step]
    launched = np.where(trace.gpu.launch >= 0, trace.host.start[trace.gpu.launch], -1)
    return np.asarray((launched >= window.start) & (launched < window.end))


def _compute(
    cells: Sequence[Sequence[dict[Signature, float]]], common: set[Signature]
) -> Iterator[tuple[str, dict[str, EffectEstimate]]]:
    by_class: dict[str, list[Signature]] = defaultdict(list)
    for signature in sorted(common):
        by_class[kernel_class(signature[0])].append(signature)
    for kind, found in by_class.items():
        if len(found) >= FEWEST:
            seconds = np.array([[[c[k] for k in found] for c in rank] for rank in cells])
            yield kind, _effects(seconds)


def _effects(seconds: Floats) -> dict[str, EffectEstimate]:
    """Rank, step and residual effects of the logarithm of a class's seconds [rank, step, kernel]."""
    usual = np.median(seconds, axis=(0, 1))
    if seconds.shape[1] > 1:
        return two_way(np.log(seconds.sum(axis=2) / usual.sum()))
    parts = [(seconds[:, 0, i::PARTS].sum(axis=1), usual[i::PARTS].sum()) for i in range(PARTS)]
    found = two_way(np.log(np.stack([s / u for s, u in parts], axis=1)))
    return {"rank": found["rank"], "own": found["own"].scaled(1 / float(np.sqrt(PARTS)))}  # in the sum of the parts


def _transfers(run: TraceSet, told: str | None) -> Iterator[tuple[str, dict[str, EffectEstimate]]]:
    """Collectives by class: how far the same one, in the same group of ranks, is from its usual seconds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    forward = _in_forward(run)
    for meeting in run.meetings:
        rank, event = meeting.members[0]
        meta = run.traces[rank].collectives.get(event)
        whole = meta.group_size if meta and meta.group_size > 0 else 2
        if len(meeting.members) < max(2, min(whole, len(run))):
            continue  # the ranks that are missing may have come last
        took = min(_seconds(run.traces[r], e) for r, e in meeting.members)
        size = f"{meta.in_elements} {meta.out_elements} {meta.dtype}" if meta else run.traces[rank].gpu_name(event)
        ranks = ",".join(str(r) for r, _ in meeting.members)
        kind = told or _class_of(meeting.kind, meta.group if meta else "", (meeting.kind, size) in forward)
        found[kind][f"{meeting.kind} {size} {ranks}"].append(took)
    for kind, groups in found.items():
        logs = [np.log(np.array(g)) for g in groups.values() if len(g) > 1 and min(g) > 0]
        count = sum(map(len, logs))
        if count >= FEWEST and count > len(logs):
            square = sum(float(np.sum((g - g.mean()) ** 2)) for g in logs) / (count - len(logs))
            yield kind, {"own": sd_estimate(square, count - len(logs))}


def _seconds(trace: Trace, event: int) -> float:
    return float(trace.gpu.end[event] - trace.gpu.start[event]) * 1e-9


def _class_of(kind: str, group: str, in_forward: bool) -> str:
    """By the group's name where that says it. Else an all-reduce or reduce-scatter of the forward pass is tensor
    parallel: data-parallel ranks meet over gradients, and sharded parameters are only gathered there."""
    found = transfer_class(kind, group)
    unnamed = found == transfer_class(kind)
    return "tp" if unnamed and in_forward and re.search(r"all_?reduce|reduce_?scatter", kind, re.IGNORECASE) else found


def _in_forward(run: TraceSet) -> set[tuple[str, str]]:
    """Kinds and sizes of collectives that are launched before the backward pass of their step, often enough."""
    seen: Counter[tuple[str, str]] = Counter()
    for meeting in run.meetings:
        rank, event = meeting.members[0]
        trace = run.traces[rank]
        launch = int(trace.gpu.launch[event])
        if launch >= 0 and int(trace.host.start[launch]) < _first_backward(trace, int(trace.host.start[launch])):
            meta = trace.collectives.get(event)
            size = f"{meta.in_elements} {meta.out_elements} {meta.dtype}" if meta else trace.gpu_name(event)
            seen[meeting.kind, size] += 1
    return {key for key, count in seen.items() if count >= FORWARD}


def _first_backward(trace: Trace, at: int) -> int:
    """When the backward pass of the step at a time begins; never where the trace has none."""
    window = next((s for s in trace.steps if s.start <= at < s.end), None)
    starts = trace.host.start[list(_backward_events(trace))]
    inside = starts[(starts >= window.start) & (starts < window.end)] if window else starts
    return int(inside.min()) if len(inside) else np.iinfo(np.int64).max


@cache
def _backward_events(trace: Trace) -> tuple[int, ...]:
    """Host events of the backward pass."""
    named = [i for i, name in enumerate(trace.names) if name.startswith(BACKWARD)]
    return tuple(np.flatnonzero(np.isin(trace.host.name, named)).tolist())
