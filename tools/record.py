"""Run training steps on a GPU and record them: step times, memory, one Kineto trace each. Needs torch and numpy only.

    python tools/record.py workloads/varied.py OUT_DIR [--minutes 8] [--only REGEX] [--ahead 2]

Cases already in OUT_DIR/measured.json are left alone, so a run that was cut goes on where it stopped.
Each case runs in a process of its own. With --ahead N the next N start meanwhile and import what they need; one at a
time uses the GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import gzip
import importlib.util
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

# Flow arrows repeat the correlation ids; the rest is of no use to timing or matching.
DROPPED = ("ac2g", "gpu_user_annotation")
DROPPED_ARGUMENTS = (
    "queued", "context", "cbid", "est. achieved occupancy %", "blocks per SM", "warps per SM", "Record function id",
    "Ev Idx", "memory bandwidth (GB/s)", "registers per thread", "shared memory", "Concrete Inputs",
)  # fmt: skip

WARM_UP, TIMED_SECONDS, MOST_STEPS = 5, 1.0, 60


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(step) -> dict:
    """Steps for about a second."""
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(5, min(MOST_STEPS, int(TIMED_SECONDS / (time.perf_counter() - start))))
    return {"iters": count, **back_to_back(step, count)}


def back_to_back(step, count: int) -> dict:
    """Steps one after the other between two synchronisations, and each step's time by events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    start = time.perf_counter()
    marks[0].record()
    for k in range(count):
        step()
        marks[k + 1].record()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    each = [marks[k].elapsed_time(marks[k + 1]) for k in range(count)]
    return {
        "step_ms": 1e3 * total / count,
        "issue_ms": 1e3 * issued / count,
        "per_step_ms": [round(x, 4) for x in each],
    }


def traced(step):
    """Two steps under the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        for k in range(2):
            with record_function(f"ProfilerStep#{k}"):
                step()
        torch.cuda.synchronize()
    return prof


def written(prof, path: Path) -> dict:
    """The trace without what is of no use to timing, as a file; the kernel time of one step."""
    raw = path.with_suffix("")
    prof.export_chrome_trace(str(raw))
    trace = json.loads(raw.read_text())
    raw.unlink()
    trace.pop("traceName", None)
    trace["traceEvents"] = [slim(e) for e in trace["traceEvents"] if e.get("cat") not in DROPPED]
    busy = sum(e["dur"] for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    kernels = sum(e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") for e in trace["traceEvents"])
    path.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), 9))
    return {"gpu_active_ms": busy / 2e3, "kernels": kernels / 2}


def slim(event: dict) -> dict:
    if "args" in event:
        event["args"] = {k: v for k, v in event["args"].items() if k not in DROPPED_ARGUMENTS}
    return event


@contextmanager
def gpu_alone(out: Path):
    """Waits until no other case uses the GPU."""
    with (out / ".gpu").open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


def record(module, name: str, out: Path, trace: bool) -> dict:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    getattr(module, "prepare", lambda _: None)(name)  # imports
    with gpu_alone(out):
        torch.cuda.reset_peak_memory_stats()
        step = module.build("cuda", name)
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        row = timed(step)
        row["peak_alloc"] = torch.cuda.max_memory_allocated()
        row["peak_reserved"] = torch.cuda.max_memory_reserved()
        prof = traced(step) if trace else None
        del step
        gc.collect()
    return row if prof is None else row | written(prof, out / f"{name}.json.gz")


def alone(args, name: str, end: float) -> dict | None:
    """One case in a process of its own, so that nothing of the others (workspaces, random states) is in its memory.
    None after `end`."""
    if time.monotonic() > end:
        return None
    call = [
        sys.executable,
        __file__,
        str(args.workloads),
        str(args.out),
        "--one",
        name,
        *(["--times"] if args.times else []),
    ]
    said = subprocess.run(call, capture_output=True, text=True)
    return json.loads(said.stdout.splitlines()[-1]) if said.returncode == 0 else {"error": said.stderr[-500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--ahead", type=int, default=0, help="cases that start while another is measured")
    parser.add_argument("--times", action="store_true", help="step times and memory only, no trace")
    parser.add_argument("--one", default="", help="only this case, its row to standard output")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(record(load(args.workloads), args.one, args.out, not args.times)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    listing = args.out / "measured.json"
    found = json.loads(listing.read_text()) if listing.exists() else {"platform": platform(), "cases": {}}
    module, end = load(args.workloads), time.monotonic() + 60 * args.minutes
    names = [n for n in module.CASES if n not in found["cases"] and re.search(args.only, n)]
    with ThreadPoolExecutor(1 + args.ahead) as pool:
        runs = {name: pool.submit(alone, args, name, end) for name in names}
        for name, run in runs.items():
            row = run.result()
            if row is None:
                print(name, "out of time; run again to go on")
                continue
            found["cases"][name] = row
            listing.write_text(json.dumps(found, indent=1))
            print(name, {k: v for k, v in row.items() if k != "per_step_ms"}, flush=True)


def platform() -> dict:
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
