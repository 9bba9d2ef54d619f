"""Random effects from Kineto traces of all ranks of a run: which GPUs are slow, which steps, and what is left.

Kernels are known by name and by their place among those of that name in a step; only those that every rank runs in
every step are compared. For each class of work the logarithm of its seconds in a rank and step is taken apart into
rank, step and rest by sums of squares. With one step the kernels are dealt out into a few parts, which stand for steps:
then nothing is known of steps. Of a collective the seconds from the last arrival on count, waits do not: it has no
rank.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from presage.errors import InputError
from presage.noise.model import CLASSES, COMMUNICATION, Belief, NoiseModel, WorkSpread
from presage_fit.random_effects import EffectEstimate, sd_estimate, two_way

if TYPE_CHECKING:
    from presage.traces.trace import Trace
    from presage.traces.trace_set import TraceSet

Floats = NDArray[np.float64]
Signature = tuple[str, int]
PARTS = 8  # that kernels are dealt into where there is one step
FEWEST = 20  # kernels, or collectives, of a class
NAMES = (
    ("attention", re.compile(r"flash|fmha|attention|attn|mha_|sdpa", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor_apply|adam|adagrad|sgd_|lamb_", re.IGNORECASE)),
    (
        "products",
        re.compile(r"gemm|gemv|cutlass|cublas|xmma|nvjet|Cijk|matmul|triton_mm|conv|wgrad|dgrad", re.IGNORECASE),
    ),
)
KINDS = (
    ("ep", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("sharding", re.compile(r"all_?gather|reduce_?scatter", re.IGNORECASE)),
    ("dp", re.compile(r"all_?reduce|broadcast", re.IGNORECASE)),
    ("send", re.compile(r"send|recv", re.IGNORECASE)),
)


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


def class_of(kernel: str) -> str:
    """The class of work of a kernel that is no collective, by its name."""
    return next((kind for kind, pattern in NAMES if pattern.search(kernel)), "streams")


def fit_traces(run: TraceSet, collectives: str | None = None) -> TraceEffects:
    """From a run of several ranks. `collectives` is the class of all its collectives, where their kind does not say."""
    if len(run) < 2:
        raise InputError(run.traces[0].path, "is of one rank: how ranks differ takes traces of several")
    if collectives is not None and collectives not in COMMUNICATION:
        raise InputError(run.traces[0].path, f"{collectives!r} is not a class: choose from {', '.join(COMMUNICATION)}")
    steps = min(max(len(t.steps), 1) for t in run.traces)
    cells = [[_kernels(t, s) for s in range(steps)] for t in run.traces]
    common = set.intersection(*(set(c) for rank in cells for c in rank))
    total = sum(sum(c.values()) for rank in cells for c in rank)
    shared = sum(c[k] for rank in cells for c in rank for k in common)
    spread = dict(_compute(cells, common)) | dict(_transfers(run, collectives))
    if not spread:
        raise InputError(run.traces[0].path, "ranks have too few kernels in common to compare")
    source = f"traces of {len(run)} ranks, {steps} step{'s' if steps > 1 else ''}"
    order = sorted(spread, key=CLASSES.index)
    return TraceEffects(len(run), steps, {k: spread[k] for k in order}, shared / max(total, 1e-12), source)


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
        by_class[class_of(signature[0])].append(signature)
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
    """Collectives by class: how far the same one is from its usual seconds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for meeting in run.meetings:
        if len(meeting.members) == len(run):
            rank, event = meeting.members[0]
            took = min(_seconds(run.traces[r], e) for r, e in meeting.members)
            meta = run.traces[rank].collectives.get(event)
            size = f"{meta.in_elements} {meta.out_elements} {meta.dtype}" if meta else run.traces[rank].gpu_name(event)
            kind = told or next((k for k, pattern in KINDS if pattern.search(meeting.kind)), "dp")
            found[kind][f"{meeting.kind} {size}"].append(took)
    for kind, groups in found.items():
        logs = [np.log(np.array(g)) for g in groups.values() if len(g) > 1 and min(g) > 0]
        count = sum(map(len, logs))
        if count >= FEWEST and count > len(logs):
            square = sum(float(np.sum((g - g.mean()) ** 2)) for g in logs) / (count - len(logs))
            yield kind, {"own": sd_estimate(square, count - len(logs))}


def _seconds(trace: Trace, event: int) -> float:
    return float(trace.gpu.end[event] - trace.gpu.start[event]) * 1e-9
