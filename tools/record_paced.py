"""Time training steps on a GPU with the pace of their host beside them. Needs torch and the cases' libraries only.

    python tools/record_paced.py OUT.json workloads/field2.py [workloads/field.py] [--minutes 9] [--rounds 2]
        [--only REGEX] [--traced NAME_OF_LIST] [--bound data/h200_field/second.json ...]

A host's pace changes within seconds. So every case runs stretches of half a second of back-to-back steps, and before,
between and after them a fixed probe of some milliseconds: calls that launch nothing, calls that launch kernels, a
backward chain, small training steps. Each part is timed as elapsed and as processor time. At the end come ops on
tensors of the host. Each case runs in a process of its own, forked from one that has the libraries imported and has
not touched the GPU (or started anew, where a fork cannot use it); nothing else runs meanwhile. Rounds go through all
cases again. OUT.json is written after every case, and a run that was cut goes on where it stopped. In the first round
cases of the list `--traced` are profiled after all that; their traces go into archives beside OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU starts nothing, so forks may use it

import torch
import torch.nn.functional as F
from record import back_to_back, load
from torch import nn

WARM_UP, STRETCHES, STRETCH_SECONDS, PASSES = 4, 4, 0.5, 3
CHAIN = 60
LONGEST_SECONDS = 90  # of a case
ARCHIVE_BYTES = 15 << 20


# ---- the probe


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Convolutions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


def small_step(model, x, half: bool):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def probe_parts() -> dict:
    """Calls by name; each is one timed part of a probe."""
    x, y, w, b = (torch.randn(s, device="cuda") for s in ((64, 64), (64, 64), (64, 64), (64,)))
    leaf = torch.randn(64, 64, device="cuda", requires_grad=True)
    with torch.device("cuda"):
        dense = small_step(nn.Sequential(*(Block(64) for _ in range(6))), torch.randn(8, 64), False)
        conv = small_step(nn.Sequential(*(Convolutions(8) for _ in range(8))), torch.randn(2, 8, 8, 8), True)

    def forward_chain():
        h = leaf
        for _ in range(CHAIN):
            h = h * 1.01
        return h.sum()

    def many(count, call):
        def run():
            for _ in range(count):
                call()

        return run

    return {
        "python": many(300, lambda: None),
        "view": many(150, lambda: x.view(-1)),
        "add": many(80, lambda: x + y),
        "linear": many(30, lambda: F.linear(x, w, b)),
        "chain": forward_chain,
        "dense_step": dense,
        "conv_step": conv,
    }


def usage() -> list[int]:
    """So far: switches of the process's threads, those that were not their own, faults; then the machine's jiffies by
    kind (user, nice, system, idle, iowait, irq, softirq, steal)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    jiffies = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return [used.ru_nvcsw, used.ru_nivcsw, used.ru_minflt, *map(int, jiffies)]


def probe(parts: dict) -> dict:
    """Microseconds of every part, by pass: [elapsed, of the calling thread, of the process]; "back" is the backward
    pass of the chain."""
    out: dict = {}

    def timed(name, call):
        torch.cuda.synchronize()
        a, t, p = time.perf_counter(), time.thread_time(), time.process_time()
        found = call()
        a, t, p = time.perf_counter() - a, time.thread_time() - t, time.process_time() - p
        out.setdefault(name, []).append([round(1e6 * v, 1) for v in (a, t, p)])
        return found

    for _ in range(PASSES):
        for name, call in parts.items():
            found = timed(name, call)
            if name == "chain":
                timed("back", found.backward)
    torch.cuda.synchronize()
    return out


def host_ops() -> dict:
    """Microseconds elapsed in ops on tensors of the host, below and above the size that is shared out among threads."""
    out = {"threads": torch.get_num_threads()}
    for n in (30_000, 65_536, 1_048_576):
        x = torch.arange(n)
        ops = {"neg": torch.neg, "log": lambda v: torch.log(v.float() + 1), "where": lambda v: torch.where(v < 9, v, 3)}
        for name, op in ops.items():
            took = []
            for _ in range(6):
                start = time.perf_counter()
                op(x)
                took.append(round(1e6 * (time.perf_counter() - start), 1))
            out[f"{name} of {n}"] = took
    return out


# ---- a case


def stretch(step, count: int) -> dict:
    before, process = usage(), time.process_time()
    found = back_to_back(step, count)
    process = time.process_time() - process
    return {
        **found,
        "process_ms": 1e3 * process / count,
        "usage": [b - a for a, b in zip(before, usage(), strict=True)],
    }


def record(module, name: str, send, traces: Path | None = None) -> None:
    """Measure a case and `send` its row; then trace it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    getattr(module, "prepare", lambda _: None)(name)
    parts = probe_parts()
    for _ in range(2):
        probe(parts)
    step = module.build("cuda", name)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(3, min(60, int(STRETCH_SECONDS / (time.perf_counter() - start))))
    probes, stretches = [probe(parts)], []
    for _ in range(STRETCHES):
        stretches.append(stretch(step, count))
        probes.append(probe(parts))
    row = {
        "at": time.time(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text()[:8],
        "step_ms": sum(s["step_ms"] for s in stretches) / len(stretches),
        "stretches": stretches,
        "probes": probes,
    }
    send(json.dumps(row | {"host_ops": host_ops()}))
    if traces is not None:
        trace(step, name, traces)


def trace(step, name: str, traces: Path) -> None:
    """Two profiled steps into the last archive with room."""
    from record import traced, written

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json.gz"
        written(traced(step), path)
        archives = [traces.with_name(f"{traces.stem}_{k}.tar") for k in range(8)]
        room = next(a for a in archives if not a.exists() or a.stat().st_size + path.stat().st_size < ARCHIVE_BYTES)
        with tarfile.open(room, "a") as archive:
            archive.add(path, path.name)


def forked(module, name: str, traces: Path | None) -> dict:
    """A case in a child process, its row through a pipe."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LONGEST_SECONDS)
        os.close(read)

        def send(text: str) -> None:
            with os.fdopen(write, "w") as f:
                f.write(text)

        try:
            record(module, name, send, traces)
        except BaseException:
            print(said := traceback.format_exc()[-600:], flush=True)
            send(json.dumps({"error": said}))  # fails where the row was sent
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        text = f.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process ended without a row"}


def spawned(path: Path, name: str) -> dict:
    """A case in a process that starts from nothing."""
    call = [sys.executable, __file__, "-", str(path), "--one", name]
    said = subprocess.run(call, capture_output=True, text=True)
    return json.loads(said.stdout.splitlines()[-1]) if said.returncode == 0 else {"error": said.stderr[-600:]}


def about() -> dict:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "processor": next((x.split(":")[1].strip() for x in info if "model name" in x), ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def host_bound(path: Path) -> list[str]:
    """Cases of a recorded list in which the GPU waits for its host."""
    cases = json.loads(path.read_text())["cases"]
    return [n for n, r in cases.items() if "step_ms" in r and r["gpu_active_ms"] < 0.93 * r["step_ms"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("workloads", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name matches")
    parser.add_argument("--bound", type=Path, nargs="*", default=[], help="measured.json: their host-bound cases alone")
    parser.add_argument("--traced", default="", help="the list (field) whose cases are traced in the first round")
    parser.add_argument("--one", default="", help="only this case, its row to standard output")
    args = parser.parse_args()
    sys.path[:0] = [str(path.parent) for path in args.workloads]  # one list may import another
    if args.one:
        record(load(args.workloads[0]), args.one, print)
        return
    end = time.monotonic() + 60 * args.minutes
    found = json.loads(args.out.read_text()) if args.out.exists() else {"platform": about(), "cases": {}}
    for library in ("torchvision", "transformers", "torch_geometric.nn", "torchaudio"):
        try:
            __import__(library)
        except ImportError as e:
            print(f"{library} is not there: {e}")
    names = {name for path in args.bound for name in host_bound(path)}
    modules = {path: load(path) for path in args.workloads}
    every = [(k, path, name) for k in range(args.rounds) for path, module in modules.items() for name in module.CASES]
    forks = True
    for k, path, name in every:
        runs = found["cases"].setdefault(name, {})
        if (names and name not in names) or not re.search(args.only, name) or str(k) in runs:
            continue
        if time.monotonic() > end:
            print("out of time; run again to go on")
            break
        traces = args.out.with_name("traces") if not k and path.stem == args.traced else None
        row = forked(modules[path], name, traces) if forks else {"error": "forked subprocess"}
        if "forked subprocess" in row.get("error", "") or "initialization error" in row.get("error", ""):
            forks, row = False, spawned(path, name)
        runs[str(k)] = row
        args.out.write_text(json.dumps(found))
        print(name, k, row.get("step_ms", row.get("error")), flush=True)


if __name__ == "__main__":
    main()
