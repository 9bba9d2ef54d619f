"""Small Kineto traces made by hand, in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


class Tracer:
    """Collects events of one rank; `write` saves them as the profiler would."""

    def __init__(self, rank: int | None = None, world: int | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Test GPU"}]}
        if rank is not None:
            self.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.correlation = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: Any = 1, pid: Any = 100, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def op(self, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        self.add("cpu_op", name, ts, dur, tid, **args)

    def step(self, number: int, ts: float, dur: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", ts, dur)

    def call(self, name: str, ts: float, dur: float, tid: int = 1) -> int:
        self.correlation += 1
        self.add("cuda_runtime", name, ts, dur, tid, correlation=self.correlation)
        return self.correlation

    def kernel(self, name: str, ts: float, dur: float, correlation: int, stream: int = 7, cat: str = "kernel") -> None:
        self.add(cat, name, ts, dur, stream, 0, device=0, stream=stream, correlation=correlation)

    def launch(self, name: str, at: float, start: float, dur: float, stream: int = 7, tid: int = 1) -> None:
        """A launch call of 4 us and its kernel."""
        self.kernel(name, start, dur, self.call("cudaLaunchKernel", at, 4, tid), stream)

    def text(self) -> bytes:
        return json.dumps({**self.head, "traceEvents": self.events}).encode()

    def write(self, path: Path) -> Path:
        data = self.text()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def gpu_bound() -> Tracer:
    """Ten kernels of 100 us, launched every 10 us, 2 us apart on the GPU; then a device sync."""
    t = Tracer()
    t.step(0, 0, 1100)
    for i in range(10):
        t.op(f"op{i}", 10 * i, 9)
        t.launch("gemm", 10 * i + 2, 10 + 102 * i, 100)
    t.call("cudaDeviceSynchronize", 200, 840)
    return t
