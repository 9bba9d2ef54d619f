"""Runs calls under the profiler and returns, for every leaf op in them, how long its kernels took.

A leaf op is the innermost operator around a launch. Each call is run a few times after warm-up on the same random
data, so small tensors are in cache, as they are in a training step that has just written them; the median counts.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["REPEATS", "leaf_rows", "profiled_batch"]

REPEATS, WARM_UP = 5, 3
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")

Row = dict[str, Any]


def profiled_batch(
    torch: Any, calls: Sequence[tuple[str, Callable[[], Callable[[], Any]]]]
) -> dict[str, list[Row] | str]:
    """For each (name, make): make() gives a call; its leaf ops, or why it could not be run."""
    from torch.profiler import ProfilerActivity, profile, record_function

    failed: dict[str, list[Row] | str] = {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        for name, make in calls:
            try:
                call = make()
                for _ in range(WARM_UP):
                    call()
                for k in range(REPEATS):
                    with record_function(f"#{name}#{k}"):
                        call()
                torch.cuda.synchronize()
            except Exception as e:  # one draw that torch refuses must not cost the others
                failed[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
            call = None  # type: ignore[assignment]
        torch.cuda.synchronize()
    return {name: failed.get(name) or rows for name, rows in _read(prof, [n for n, _ in calls]).items()}


def _read(prof: Any, names: list[str]) -> dict[str, list[Row]]:
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        prof.export_chrome_trace(path)
        with open(path) as f:
            events = json.load(f)["traceEvents"]
    finally:
        os.unlink(path)
    return leaf_rows(events, names)


def leaf_rows(events: list[dict[str, Any]], names: list[str]) -> dict[str, list[Row]]:
    """By call: its leaf ops in order, each with its inputs and the median time of its kernels."""
    named = (e for e in events if e.get("cat") == "cpu_op")
    ops = {e["args"]["External id"]: e for e in named if "External id" in e.get("args", {})}
    windows = sorted(
        (e["ts"], e["ts"] + e["dur"], *e["name"][1:].split("#"))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("#")
    )
    kernels: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e.get("cat") in GPU_CATEGORIES and e["args"].get("External id") in ops:
            kernels[e["args"]["External id"]].append(e)
    seen: dict[str, list[list[tuple[dict[str, Any], list[dict[str, Any]]]]]] = {n: [] for n in names}
    leaves = sorted(((ops[i]["ts"], ops[i], ks) for i, ks in kernels.items()), key=lambda x: x[0])
    at = 0
    for start, end, name, _ in windows:
        while at < len(leaves) and leaves[at][0] < start:
            at += 1
        found = []
        while at < len(leaves) and leaves[at][0] < end:
            found.append((leaves[at][1], sorted(leaves[at][2], key=lambda k: k["ts"])))
            at += 1
        if name in seen:
            seen[name].append(found)
    return {name: _combined(repeats) for name, repeats in seen.items()}


def _combined(repeats: list[list[tuple[dict[str, Any], list[dict[str, Any]]]]]) -> list[Row]:
    """The repeats side by side; those that ran other ops than the most common sequence are left out."""
    if not repeats:
        return []
    shapes = [tuple(op["name"] for op, _ in r) for r in repeats]
    usual = max(set(shapes), key=shapes.count)
    kept = [r for r, s in zip(repeats, shapes, strict=True) if s == usual]
    out = []
    for position in zip(*kept, strict=True):
        op, ks = position[-1]
        totals = [sum(k["dur"] for k in other) for _, other in position]
        args = op["args"]
        out.append(
            {
                "op": op["name"],
                "dims": args.get("Input Dims", []),
                "types": args.get("Input type", []),
                "strides": args.get("Input Strides", []),
                "concrete": args.get("Concrete Inputs", []),
                "us": round(statistics.median(totals), 3),
                "spread_us": round(max(totals) - min(totals), 3),
                "n": len(totals),
                "kernels": [[k["name"][:96], round(k["dur"], 3)] for k in ks],
            }
        )
    return out
