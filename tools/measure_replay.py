"""Measure on a GPU what a CUDA graph costs: host time of its one call, and the gap between its kernels.

    python tools/measure_replay.py OUT.json

Needs Python and torch. Graphs of 50 to 3,200 kernels, short ones and long ones; the gap is what a replay takes beyond
the kernels themselves, which a profiler times.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure_edits import active

ROUNDS = 30


def graph_of(kernels, elements):
    x = torch.zeros(elements, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(kernels):
            x.add_(1)
    return graph


def times(graph):
    """Seconds of the host's call, and of a replay on the GPU when replays follow each other."""
    calls, whole = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        graph.replay()
        calls.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(8):
            graph.replay()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - begun) / 8)
    return statistics.median(calls), statistics.median(whole)


def main():
    rows = []
    for elements in (1024, 1 << 20, 1 << 24):
        for kernels in (50, 200, 800, 3200):
            graph = graph_of(kernels, elements)
            call, whole = times(graph)
            busy, _, _ = active(graph.replay)
            rows.append({
                "elements": elements, "kernels": kernels, "call_us": call * 1e6, "replay_us": whole * 1e6,
                "active_us": busy * 1e6, "gap_us": (whole - busy) * 1e6 / kernels,
            })  # fmt: skip
            print(rows[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
