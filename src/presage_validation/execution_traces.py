"""The claim on execution traces: a step predicted from its trace, beside the same from its code and beside a GPU.

A trace does not hold whether float32 work may use TF32: the case's code is asked, as a user would say with --assume.
Metrics with `by_default` are without that. Index values are in neither the trace nor what is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from presage.errors import InputError, PresageError
from presage.graph.graph import Graph
from presage.memory.step_memory import memory_profile
from presage.pool.pool import SERIAL, Pool
from presage.prediction.machine import kernel_times, machine
from presage.prediction.step import StepResult, predict_step
from presage.traces.trace_graph import SETTINGS, trace_graphs
from presage_validation.score import AccuracyResult, Captured, Row, run_cases
from presage_validation.workloads import WorkloadCase, measured_cases

MS = 1e-3


def score_execution_traces(
    workloads: str | Path,
    folder: str | Path,
    measured: str | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    gpu: str = "h200",
    pool: Pool = SERIAL,
) -> AccuracyResult:
    """Predict every case that has a trace in the folder from it and from code; `measured` adds what a GPU took."""
    build = Captured(str(workloads))
    known = build.functions  # what cannot be imported is told of at once
    cases = measured_cases(measured) if measured is not None else dict.fromkeys(known, ())
    traced = {name: runs for name, runs in cases.items() if _file(folder, name) is not None}
    if not traced:
        raise InputError(folder, f"has no execution trace of a case of {Path(measured or workloads).name}")
    function = partial(_case, build, str(folder), gpu)
    done, skipped = run_cases(function, traced.items(), tell, lambda case: case[0], pool)
    rows = tuple(row for _, found in done for row in found)
    return AccuracyResult("et", f"{workloads} {folder} {measured or ''}".strip(), rows, tuple(skipped))


def _file(folder: str | Path, name: str) -> Path | None:
    return next((p for p in sorted(Path(folder).glob(f"{name}.*"))), None)


def _case(build: Captured, folder: str, gpu: str, case: tuple[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    name, runs = case
    path = _file(folder, name)
    if name not in build.functions or path is None:
        raise PresageError(f"{Path(build.workloads).name} has no such case")
    code = build.graph(name)
    told = {key: str(code.flags.get(key, False)).lower() for key in SETTINGS}
    graph = trace_graphs(path, told)[0]
    return list(_rows(WorkloadCase(name, code, runs), graph, trace_graphs(path)[0], gpu))


def _rows(case: WorkloadCase, graph: Graph, by_default: Graph, gpu: str) -> Iterator[Row]:
    mine, code, default = (_predicted(g, gpu) for g in (graph, case.graph, by_default))
    memory, from_code = (memory_profile(g).peak_allocated for g in (graph, case.graph))
    yield Row("gpu_active_from_code", case.name, "s", mine.gpu_active, code.gpu_active)
    yield Row("gpu_active_from_code_by_default", case.name, "s", default.gpu_active, code.gpu_active)
    yield Row("step_from_code", case.name, "s", mine.step.p50, code.step.p50)
    yield Row("peak_memory_from_code", case.name, "bytes", memory, from_code)
    active, peak = case.median("gpu_active_ms"), case.median("peak_alloc")
    if active is not None:
        yield Row("gpu_active", case.name, "s", mine.gpu_active, active * MS)
    if peak is not None:
        yield Row("peak_memory", case.name, "bytes", memory, peak)


def _predicted(graph: Graph, gpu: str) -> StepResult:
    where = machine(gpu)
    return predict_step(graph, kernel_times(graph, where), where.kernels.gpu, where.host)
