"""What the GPU did in a step, from the profiler: time and kernels of each family of ops.

A kernel counts for its leaf op, the innermost operator around its launch. Copies and memsets are kernels here.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from presage.graph.families import family

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS = 2  # that are profiled
NO_OP = "other"  # of kernels whose launch was in no operator


@dataclass(frozen=True, slots=True)
class GpuWork:
    """GPU work of one step."""

    seconds: float  # durations added up
    kernels: float


@dataclass(frozen=True, slots=True)
class Activity:
    """GPU work of one step, in all and by family of ops, the longest first."""

    total: GpuWork
    families: dict[str, GpuWork]


def profiled(torch: Any, step: Callable[[], Any]) -> Activity:
    """Run a step under the profiler and read what it recorded."""
    stop = start_profile(torch)
    for _ in range(STEPS):
        step()
    return stop()


def start_profile(torch: Any) -> Callable[[], Activity]:
    """Starts the profiler; gives what stops it after STEPS steps and reads what it recorded."""
    from torch.profiler import ProfilerActivity, profile

    prof = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    prof.__enter__()  # type: ignore[no-untyped-call]

    def stop() -> Activity:
        torch.cuda.synchronize()
        prof.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return activity(read_events(export_trace(prof)), STEPS)

    return stop


def export_trace(prof: Any) -> str:
    """Write what was profiled to a temporary trace file; returns its path."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    prof.export_chrome_trace(path)
    return path


def read_events(path: str) -> list[dict[str, Any]]:
    """The events of a trace file, which is removed."""
    try:
        with open(path) as f:
            events: list[dict[str, Any]] = json.load(f)["traceEvents"]
    finally:
        os.unlink(path)
    return events


def activity(events: Sequence[dict[str, Any]], steps: int) -> Activity:
    """From the events of a Kineto trace of so many steps."""
    ops = {e["args"]["External id"]: e["name"] for e in events if e.get("cat") == "cpu_op" and _linked(e)}
    found: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.get("cat") in GPU_CATEGORIES:
            op = ops.get(e["args"]["External id"]) if _linked(e) else None
            found[family(op) if op is not None else NO_OP].append(1e-6 * e["dur"])
    works = {name: GpuWork(sum(times) / steps, len(times) / steps) for name, times in found.items()}
    total = GpuWork(sum(w.seconds for w in works.values()), sum(w.kernels for w in works.values()))
    return Activity(total, dict(sorted(works.items(), key=lambda kv: -kv[1].seconds)))


def _linked(event: dict[str, Any]) -> bool:
    return "External id" in event.get("args", {})
