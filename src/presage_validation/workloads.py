"""The claims on whole training steps, captured without a GPU, against what a GPU measured.

Of several runs of a case the median counts. A step is the GPU's where its kernels are active for more than 93% of it,
else the host's. Beside a case's trace the parts can be judged by themselves: the step from measured kernel times, with
no overheads at all (the sum of the kernels), with the host model's, and with those of the trace itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from presage.costs.host_model import HostModel
from presage.costs.kernel_model import OpTime
from presage.errors import InputError, PresageError
from presage.files.decoding import read_checked
from presage.graph.graph import Graph
from presage.memory.step_memory import memory_profile
from presage.pool.pool import SERIAL, Pool
from presage.prediction.machine import Machine, kernel_times, machine
from presage.prediction.step import GPU_BOUND, STEPS, StepResult, predict_step, step_program
from presage.prediction.step_program import StepSpread
from presage.traces import kineto
from presage.traces.trace import Trace
from presage_fit.host import own_terms
from presage_fit.host import rows as host_rows
from presage_validation.capture import measured_times
from presage_validation.score import AccuracyResult, Captured, Row, Skipped, run_cases

MS = 1e-3


@dataclass(frozen=True)
class WorkloadCase:
    """One measured step: what was captured, the runs, and its trace where there is one."""

    name: str
    graph: Graph
    runs: Sequence[Mapping[str, Any]]
    trace: Trace | None = None

    def median(self, key: str) -> float | None:
        """Over the runs that have it."""
        seen = [float(r[key]) for r in self.runs if key in r]
        return float(np.median(seen)) if seen else None

    @property
    def bound(self) -> str | None:
        step, active = self.median("step_ms"), self.median("gpu_active_ms")
        if step is None or active is None:
            return None
        return "step_gpu_bound" if active > GPU_BOUND * step else "step_host_bound"


@dataclass(frozen=True)
class _Scored:
    """What one case tells: its rows, how its interval did, and why its step could not be predicted."""

    rows: tuple[Row, ...]
    hits: tuple[tuple[bool, float], ...]
    skipped: tuple[Skipped, ...]


def score_workloads(
    workloads: str | Path,
    measured: str | Path,
    traces: str | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    gpu: str = "h200",
    pool: Pool = SERIAL,
    host: str | None = None,
) -> AccuracyResult:
    """Capture every measured case of a workloads file and predict its step and its peak memory; `host`: the file or
    name of the host it was measured on."""
    where = _machine(gpu, host)
    build, cases = Captured(str(workloads)), measured_cases(measured)
    build.functions  # noqa: B018 - what cannot be imported is told of at once
    function = partial(_captured, build, None if traces is None else str(traces), gpu, host)
    done, skipped = run_cases(function, cases.items(), tell, lambda case: case[0], pool)
    paths = " ".join(map(str, (workloads, measured, *([traces] if traces else []))))
    return replace(_result(paths, [scored for _, scored in done], skipped), notes=(where.host.note,))


def _captured(
    build: Captured, traces: str | None, gpu: str, host: str | None, case: tuple[str, Sequence[Mapping[str, Any]]]
) -> _Scored:
    name, runs = case
    if name not in build.functions:
        raise PresageError(f"{Path(build.workloads).name} has no such case")
    if not runs:
        raise PresageError("no run of it was measured")
    return _scored(WorkloadCase(name, build.graph(name), runs, _trace(traces, name)), _machine(gpu, host))


@lru_cache(2)
def _machine(gpu: str, host: str | None) -> Machine:
    return machine(gpu, host)


def _trace(folder: str | Path | None, name: str) -> Trace | None:
    path = next((p for p in sorted(Path(folder).glob(f"{name}.json*"))), None) if folder else None
    return kineto.read(path) if path else None


def score_cases(cases: Iterable[WorkloadCase], gpu: str = "h200", host: str | None = None) -> AccuracyResult:
    """All metrics of some cases."""
    where = _machine(gpu, host)
    return _result("", [_scored(case, where) for case in cases], [])


def _scored(case: WorkloadCase, where: Machine) -> _Scored:
    rows, hits, skipped = list(_memory_rows(case)), list[tuple[bool, float]](), list[Skipped]()
    try:
        found = predict_step(case.graph, kernel_times(case.graph, where), where.kernels.gpu, where.host)
    except PresageError as e:
        skipped.append(Skipped(case.name, str(e)))
    else:
        rows += _step_rows(case, found)
        hits += _hit(case, found)
    rows += _rows_by_trace(case, where.host)
    return _Scored(tuple(rows), tuple(hits), tuple(skipped))


def _result(path: str, found: Sequence[_Scored], skipped: Sequence[Skipped]) -> AccuracyResult:
    rows, hits, more = (tuple(x for f in found for x in getattr(f, k)) for k in ("rows", "hits", "skipped"))
    return AccuracyResult("workloads", path, rows, (*skipped, *more), _rates(hits))


def _rates(hits: Sequence[tuple[bool, float]]) -> dict[str, float]:
    if not hits:
        return {}
    hit, width = zip(*hits, strict=True)
    return {"interval_hit_rate": float(np.mean(hit)), "interval_width": float(np.median(width))}


def _memory_rows(case: WorkloadCase) -> Iterator[Row]:
    memory = memory_profile(case.graph)
    for metric, key, value in (
        ("peak_memory", "peak_alloc", memory.peak_allocated),
        ("peak_reserved", "peak_reserved", memory.peak_reserved),
    ):
        seen = case.median(key)
        if seen is not None:
            yield Row(metric, case.name, key, float(value), seen)


def _step_rows(case: WorkloadCase, found: StepResult) -> Iterator[Row]:
    active = case.median("gpu_active_ms")
    if active is not None:
        yield Row("gpu_active", case.name, "gpu_active_ms", found.gpu_active, active * MS)
    yield from _step_row(case, found.step.p50)


def _step_row(case: WorkloadCase, seconds: float, of: str = "") -> Iterator[Row]:
    step = case.median("step_ms")
    if step is not None and case.bound is not None:
        yield Row(f"{case.bound}{of}", case.name, "step_ms", seconds, step * MS)


def _hit(case: WorkloadCase, found: StepResult) -> Iterator[tuple[bool, float]]:
    """For a step of the host's: whether its interval has a run in common with those measured, and how wide it is."""
    if case.bound == "step_host_bound":
        runs = [r["step_ms"] * MS for r in case.runs if "step_ms" in r]
        hit = found.step.p5 <= max(runs) and found.step.p95 >= min(runs)
        yield hit, found.step.p95 / found.step.p5 - 1


def _rows_by_trace(case: WorkloadCase, host: HostModel) -> Iterator[Row]:
    """The step from the kernel times of its trace, with no overheads, the shared ones, and the trace's own."""
    if case.trace is None or not case.trace.steps:
        return
    step = case.trace.steps[-1]
    times = measured_times(case.graph, case.trace, step)
    yield from _step_row(case, sum(t.seconds for t in times), "_kernel_sum")
    yield from _step_row(case, _p50(case.graph, times, host), "_shared_overheads")
    own = own_terms(host_rows(case.graph, case.trace, step), host.us, host.fitted.profiler_us_per_event)
    mine = step_program(case.graph, times, host.with_terms(own.us))
    yield from _step_row(case, mine.at_pace(own.paces.main, own.paces.autograd).usual(STEPS), "_own_overheads")


def _p50(graph: Graph, times: Sequence[OpTime], host: HostModel) -> float:
    took = step_program(graph, times, host).step_seconds(
        200, STEPS, StepSpread(host.pace, kernels=0.0), np.random.default_rng(0)
    )
    return float(np.median(took))


def measured_cases(path: str | Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each case: a file holds one run a case, or several by name."""
    found: dict[str, Any] = read_checked(path, dict[str, Any])
    cases = found.get("cases")
    if not isinstance(cases, dict):
        raise InputError(path, "no such object in the file", "cases")
    out = {}
    for name, case in cases.items():
        if not isinstance(case, dict):
            raise InputError(path, "should be a run, or an object of runs", f"cases.{name}")
        runs = [case] if "step_ms" in case or "error" in case else list(case.values())
        out[name] = [r for r in runs if isinstance(r, dict) and "error" not in r]
    return out
