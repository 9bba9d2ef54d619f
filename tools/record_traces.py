"""Record execution traces of the steps of a workloads file on a GPU, with what they took there.

    python tools/record_traces.py workloads/library.py OUT

writes OUT/NAME.et.json.gz for each case, and OUT/measured.json: step and GPU times, peak memory. A case that is in
measured.json already is left out, so that a run that was cut short goes on.
"""

from __future__ import annotations

import gc
import gzip
import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

WARMUP, TIMED, PROFILED = 5, 20, 2
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def record(build: Any, arguments: dict[str, Any], et: Path) -> dict[str, float]:
    """One case: what it took, and its execution trace."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.cuda.reset_peak_memory_stats()
    step = build("cuda", **arguments)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(TIMED):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / TIMED
    peak = torch.cuda.max_memory_allocated()
    active, kernels = profiled(step)
    observer = ExecutionTraceObserver()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "et.json"
        observer.register_callback(str(path))
        observer.start()
        step()
        torch.cuda.synchronize()
        observer.stop()
        observer.unregister_callback()
        et.write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    return {"step_ms": seconds * 1e3, "gpu_active_ms": active, "kernels": kernels, "peak_alloc": peak}


def profiled(step: Any) -> tuple[float, float]:
    """Milliseconds of GPU work and GPU events of a step."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
        p.export_chrome_trace(path)
        events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("cat") in ON_GPU]
    return sum(e["dur"] for e in events) / PROFILED / 1e3, len(events) / PROFILED


def main() -> None:
    cases, out = runpy.run_path(sys.argv[1])["CASES"], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    file = out / "measured.json"
    found = json.loads(file.read_text()) if file.exists() else {"platform": platform(), "cases": {}}
    for name, (build, arguments) in cases.items():
        if name in found["cases"]:
            continue
        try:
            found["cases"][name] = {"a": record(build, arguments, out / f"{name}.et.json.gz")}
        except Exception as e:
            print(name, type(e).__name__, str(e)[:300], flush=True)
            continue
        print(name, found["cases"][name]["a"], flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


def platform() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    main()
