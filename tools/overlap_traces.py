"""How much longer kernels take in traces while a collective runs beside them, by family and trace.

    python tools/overlap_traces.py TRACE.json.gz... [--json FILE]

A kernel is compared with itself: same name, grid and block, same op around its launch, same input dimensions where the
trace has them. Beside: a collective covers at least 90% of its time; alone: none touches it. Left out are kernels under
10 us, and those whose times alone differ by more than a tenth between the quartiles: they are not one and the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from presage.graph.families import family
from presage.traces import kineto
from presage.traces.trace import GpuKind, HostKind, Trace

SHORTEST_NS, COVERED = 10_000, 0.9
LEAST, ALIKE = 3, 0.1  # of each kind, for a kernel to be compared; and how far its times alone may lie apart


class Pair(NamedTuple):
    family: str
    kernel: str
    alone_us: float
    ratio: float
    alone: int
    beside: int


def covered(trace: Trace) -> np.ndarray:
    """For each GPU event, the share of its time in which a collective runs on another stream."""
    gpu, found = trace.gpu, np.zeros(len(trace.gpu))
    for c in np.flatnonzero(trace.is_collective):
        shared = np.minimum(gpu.end, gpu.end[c]) - np.maximum(gpu.start, gpu.start[c])
        found += np.where(gpu.stream != gpu.stream[c], np.maximum(shared, 0), 0)
    return np.minimum(found / np.maximum(gpu.end - gpu.start, 1), 1.0)


def op_of(trace: Trace, event: int) -> tuple[str, int]:
    """The innermost op around a kernel's launch, and its input dimensions."""
    at = int(trace.gpu.launch[event])
    while at >= 0 and trace.host.kind[at] != HostKind.OP:
        at = int(trace.host.parent[at])
    return (trace.host_name(at), int(trace.host.dims[at])) if at >= 0 else ("", -1)


def grids(path: Path) -> dict[int, str]:
    """By correlation: grid and block of a kernel, which the reader does not keep."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as f:
        events = json.load(f)["traceEvents"]
    args = [e["args"] for e in events if str(e.get("cat", "")).lower() == "kernel"]
    return {a["correlation"]: f"{a.get('grid')} {a.get('block')}" for a in args if "correlation" in a}


def pairs(trace: Trace, grid_of: dict[int, str]) -> list[Pair]:
    """Every kernel that ran both ways often enough."""
    share, gpu = covered(trace), trace.gpu
    lasted = gpu.end - gpu.start
    times: dict[tuple[str, str, int, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    kept = (gpu.kind == GpuKind.KERNEL) & ~trace.is_collective & (lasted >= SHORTEST_NS)
    for event in np.flatnonzero(kept & ((share == 0) | (share >= COVERED))):
        op, dims = op_of(trace, int(event))
        grid = grid_of.get(int(gpu.correlation[event]), "")
        times[trace.gpu_name(int(event)), op, dims, grid][int(share[event] > 0)].append(int(lasted[event]))
    out = []
    for (name, op, *_), (alone, beside) in times.items():
        usual = statistics.median(alone or [1])
        if min(len(alone), len(beside)) >= LEAST and np.subtract(*np.quantile(alone, (0.75, 0.25))) < ALIKE * usual:
            out.append(
                Pair(kind(name, op), name, usual / 1e3, statistics.median(beside) / usual, len(alone), len(beside))
            )
    return out


def kind(kernel: str, op: str) -> str:
    """Family by the op; where the trace has no op, by the kernel's name."""
    found = family(op) if op else "other"
    if found in ("other", "elementwise") and any(k in kernel for k in ("gemm", "Gemm", "nvjet", "cutlass")):
        return "matrix multiply"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for path in args.traces:
        trace = kineto.read(path)
        by_family: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs(trace, grids(path)):
            by_family[pair.family].append(pair)
        for name, found in sorted(by_family.items()):
            ratios = sorted(p.ratio for p in found)
            weighted = sum(p.ratio * p.alone_us * p.beside for p in found) / sum(p.alone_us * p.beside for p in found)
            row = {
                "trace": str(path), "gpu": trace.gpus[0] if trace.gpus else "", "family": name, "kernels": len(found),
                "beside": sum(p.beside for p in found), "alone": sum(p.alone for p in found),
                "median": round(statistics.median(ratios), 3), "by_time": round(weighted, 3),
                "low": round(ratios[len(ratios) // 10], 3), "high": round(ratios[-1 - len(ratios) // 10], 3),
            }  # fmt: skip
            rows.append(row)
            print(*row.values(), sep="\t")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
