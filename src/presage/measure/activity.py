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
from presage.measure.saved_pack import PackRecorder

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


def profiled(torch: Any, step: Callable[[], Any], pack: PackRecorder | None = None) -> Activity:
    """Run a step under the profiler and read what it recorded."""
    stop = start_profile(torch, pack)
    for _ in range(STEPS):
        step()
    return stop()


def start_profile(torch: Any, pack: PackRecorder | None = None) -> Callable[[], Activity]:
    """Starts the profiler; gives what stops it after STEPS steps and reads what it recorded."""
    prof = new_profile(pack)
    prof.__enter__()

    def stop() -> Activity:
        torch.cuda.synchronize()
        prof.__exit__(None, None, None)
        return read_activity(prof, STEPS, pack)

    return stop


def new_profile(pack: PackRecorder | None) -> Any:
    """A profiler of host and GPU; for a pack, with shapes."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=pack is not None)


def read_activity(prof: Any, steps: int, pack: PackRecorder | None = None) -> Activity:
    """What was profiled in so many steps; the trace is left to a pack, where there is one."""
    path = pack.export(prof) if pack is not None else export_trace(prof)
    return activity(read_events(path, keep=pack is not None), steps)


def export_trace(prof: Any) -> str:
    """Write what was profiled to a temporary trace file; returns its path."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    prof.export_chrome_trace(path)
    return path


def read_events(path: str, keep: bool = False) -> list[dict[str, Any]]:
    """The events of a trace file, which is removed unless it is to be kept."""
    try:
        with open(path) as f:
            events: list[dict[str, Any]] = json.load(f)["traceEvents"]
    finally:
        if not keep:
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
