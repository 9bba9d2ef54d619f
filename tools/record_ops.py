"""Record a step's leaf ops on a GPU, as a calibration pack's rows have them: inputs, kernel names and times, and the
workspaces of its convolutions. For finding which op of a step is predicted wrong. Needs torch and numpy only.

    python tools/record_ops.py workloads/field.py OUT.jsonl.gz [--only REGEX] [--minutes 3]

A line a case: {"case": ..., "ops": [...], "workspaces": [[op, input sizes, bytes], ...]}.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "src")]

from record import gpu_alone, load  # noqa: E402

from presage.measure.activity import export_trace, read_events  # noqa: E402
from presage_fit.calibrate.measure import leaf_rows  # noqa: E402

WATCHED = ("convolution", "cudnn_rnn")


class Workspaces(TorchDispatchMode):
    """What each convolution and recurrent net has at most beside its results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not any(word in name for word in WATCHED):
            return func(*args, **(kwargs or {}))
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **(kwargs or {}))
        nbytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        sizes = [list(a.shape) for a in args if isinstance(a, torch.Tensor)]
        rest = [a for a in args if not isinstance(a, torch.Tensor)]
        self.found.append([name, sizes, json.loads(json.dumps(rest, default=str)), nbytes])
        return out


def recorded(path: Path, name: str) -> dict:
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    torch.manual_seed(0)
    module = load(path)
    getattr(module, "prepare", lambda _: None)(name)
    with gpu_alone(Path(tempfile.gettempdir())):
        step = module.build("cuda", name)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
            for k in range(2):
                with record_function(f"#step#warm#{k}"):
                    step()
                    torch.cuda.synchronize()
        watch = Workspaces()
        with watch:
            step()
    rows = leaf_rows(read_events(export_trace(prof)), ["step"])["step"]
    for row in rows:
        row["kernels"] = [[k[:64], us] for k, us in row["kernels"][:4]] + [["of", len(row["kernels"])]]
    return {"case": name, "ops": rows, "workspaces": watch.found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--one", default="")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(recorded(args.workloads, args.one), separators=(",", ":")))
        return
    end, cases = time.monotonic() + 60 * args.minutes, load(args.workloads).CASES
    names = [n for n in cases if re.search(args.only, n)]
    with ThreadPoolExecutor(4) as pool, gzip.open(args.out, "at") as f:
        for name, row in zip(names, pool.map(lambda n: alone(args.workloads, n, end), names), strict=True):
            if row.startswith("{"):
                f.write(row + "\n")
            print(name, row[:20] if row.startswith("{") else row[-300:], flush=True)


def alone(workloads: Path, name: str, end: float) -> str:
    """The line of a case, measured in a process of its own; what went wrong otherwise."""
    if time.monotonic() > end:
        return "out of time"
    call = [sys.executable, __file__, str(workloads), "-", "--one", name]
    said = subprocess.run(call, capture_output=True, text=True)
    return said.stdout.splitlines()[-1] if said.returncode == 0 else f"failed: {said.stderr}"


if __name__ == "__main__":
    main()
