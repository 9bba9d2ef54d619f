"""Runs calls under the profiler and returns, for every leaf op in them, how long its kernels took.

A leaf op is the innermost operator around a launch. Each call runs on random data, after warm-up, in two states of the
cache: warm (again and again on the same tensors, so what fits into the L2 cache is there) and cold (a large buffer is
written just before, so nothing is). The medians of both count; a training step lies between them.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from presage.measure.activity import GPU_CATEGORIES, export_trace, read_events

REPEATS = 4
LONG_CALL = 4e-3  # seconds; a longer call runs fewer times, so that the clock does not fall under it
TOO_LONG = 1.5  # seconds; a call that takes longer is given up
FLUSH_OP, FLUSH_BYTES = "aten::bitwise_not_", 1 << 27

Row = dict[str, Any]
Parts = Sequence[Callable[[], Any]]
Make = Callable[[], Parts]
Leaf = tuple[dict[str, Any], list[dict[str, Any]]]


class Flush:
    """Writes a buffer larger than any cache."""

    def __init__(self, torch: Any) -> None:
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device="cuda", dtype=torch.int32)

    def __call__(self) -> None:
        self.buffer.bitwise_not_()


Turn = Callable[[bool], AbstractContextManager[Any]]  # whether no other process may use the GPU meanwhile


@contextmanager
def take_turn(file: Path, alone: bool) -> Iterator[None]:
    """Waits for processes that hold the file alone, and where `alone` for all others too, then holds it. Who waits to
    be alone lets nobody else in before."""
    import fcntl

    with file.with_suffix(".next").open("a") as gate, file.open("a") as f:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(f, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


def profile_batch(
    torch: Any,
    calls: Sequence[tuple[str, Make]],
    flush: Flush,
    before: Callable[[str], None] = lambda _: None,
    turn: Turn = nullcontext,
) -> tuple[str, dict[str, str]]:
    """Runs each (name, make): make() gives the parts of a call. A trace file to be read, and what could not be run.

    A first run of each chooses kernels, which takes the host long: processes do that side by side. They time alone: a
    kernel beside another process's takes up to twice as long."""
    from torch.profiler import ProfilerActivity, profile

    failed: dict[str, str] = {}

    def attempt(work: Callable[[str, Make], Any]) -> None:
        for name, make in calls:
            if name in failed:
                continue
            before(name)
            try:
                work(name, make)
            except Exception as e:  # one draw that torch refuses must not cost the others
                failed[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
                if "CUDA error" in failed[name] or "AcceleratorError" in failed[name]:
                    raise  # nothing can be measured in this process any more

    def choose(_: str, make: Make) -> None:
        with turn(False):
            _warm_up(torch, make())

    def time_it(name: str, make: Make) -> None:
        parts = make()
        spent = _warm_up(torch, parts)
        _time(torch, name, parts, flush, REPEATS if spent < LONG_CALL else 2)

    attempt(choose)
    with turn(True), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        attempt(time_it)
        torch.cuda.synchronize()
    return export_trace(prof), failed


def _warm_up(torch: Any, parts: Parts) -> float:
    """Seconds of a run, from start to end."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for part in parts:
        part()
        torch.cuda.synchronize()
        spent = time.perf_counter() - start
        if spent > TOO_LONG:
            raise RuntimeError(f"too slow to repeat: {spent:.2f} s so far")
    return spent


def _time(torch: Any, name: str, parts: Parts, flush: Flush, repeats: int) -> None:
    from torch.profiler import record_function

    for state in ("warm", "cold"):
        for k in range(repeats):
            with record_function(f"#{name}#{state}#{k}"):
                for part in parts:
                    if state == "cold":
                        flush()
                    part()
    torch.cuda.synchronize()


def read_batch(path: str, names: list[str]) -> dict[str, list[Row]]:
    """The rows of a trace file, which is removed."""
    return leaf_rows(read_events(path), names)


def leaf_rows(events: list[dict[str, Any]], names: list[str]) -> dict[str, list[Row]]:
    """By call: its leaf ops in order, each with its inputs and the median times of its kernels."""
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
    seen: dict[str, dict[str, list[list[Leaf]]]] = {n: {"warm": [], "cold": []} for n in names}
    leaves = sorted(((ops[i]["ts"], ops[i], ks) for i, ks in kernels.items()), key=lambda x: x[0])
    at = 0
    for start, end, name, state, _ in windows:
        while at < len(leaves) and leaves[at][0] < start:
            at += 1
        found = []
        while at < len(leaves) and leaves[at][0] < end:
            found.append((leaves[at][1], sorted(leaves[at][2], key=lambda k: k["ts"])))
            at += 1
        if name in seen:
            seen[name][state].append(found)
    return {name: _combined(states["warm"], states["cold"]) for name, states in seen.items()}


def _combined(warm: list[list[Leaf]], cold: list[list[Leaf]]) -> list[Row]:
    """The repeats side by side; those that ran other ops than the most common sequence are left out."""
    if not warm:
        return []
    shapes = [tuple(op["name"] for op, _ in r) for r in warm]
    usual = max(set(shapes), key=shapes.count)
    kept = [r for r, s in zip(warm, shapes, strict=True) if s == usual]
    rows = [_row(position) for position in zip(*kept, strict=True)]
    colder = [c for c in map(_unflushed, cold) if tuple(op["name"] for op, _ in c[0]) == usual]
    if colder:
        for place, row in enumerate(rows):
            if colder[0][1][place]:
                row["cold_us"] = round(statistics.median(_totals([c[0][place] for c in colder])), 3)
    return rows


def _unflushed(leaves: list[Leaf]) -> tuple[list[Leaf], list[bool]]:
    """The leaves of a cold call without the flushes, and which of them came right after one."""
    is_flush = [op["name"] == FLUSH_OP for op, _ in leaves]
    keep = [i for i, flush in enumerate(is_flush) if not flush]
    return [leaves[i] for i in keep], [i > 0 and is_flush[i - 1] for i in keep]


def _totals(position: Sequence[Leaf]) -> list[float]:
    return [sum(k["dur"] for k in kernels) for _, kernels in position]


def _row(position: Sequence[Leaf]) -> Row:
    op, kernels = position[-1]
    totals, args = _totals(position), op["args"]
    return {
        "op": op["name"],
        "dims": args.get("Input Dims", []),
        "types": args.get("Input type", []),
        "strides": args.get("Input Strides", []),
        "concrete": args.get("Concrete Inputs", []),
        "us": round(statistics.median(totals), 3),
        "spread_us": round(max(totals) - min(totals), 3),
        "n": len(totals),
        "kernels": [[k["name"][:80], round(k["dur"], 3)] for k in kernels],
    }


# ---- how long written data stays in the L2 cache: write a tensor, read or write others, read it again

CACHE_SIZES = [s << 20 for s in (1, 4, 12, 24)]
CACHE_DISTANCES = [d << 20 for d in (0, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)]


def cache_reuse(torch: Any) -> list[dict[str, Any]]:
    """For each size and distance: microseconds to read the tensor again into a small result, by what was between."""
    from torch.profiler import ProfilerActivity, profile, record_function

    other = torch.zeros(max(CACHE_DISTANCES) // 4, device="cuda", dtype=torch.int32)
    cases = [(s, d, how) for s in CACHE_SIZES for d in CACHE_DISTANCES for how in ("written", "read")]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as prof:
        for n, (size, between, how) in enumerate(cases):
            x = torch.randn(size // 4, device="cuda")
            y = torch.empty_like(x)
            for k in range(REPEATS + 1):
                x.mul_(1.0)
                if between:
                    part = other[: between // 4]
                    part.bitwise_not_() if how == "written" else part.sum()
                with record_function(f"#{n}#warm#{k}"):
                    torch.neg(x, out=y)
        torch.cuda.synchronize()
    rows = _read_medians(prof, len(cases))
    return [
        {"bytes": s, "between": d, "how": how, "us": rows[str(n)]}
        for n, (s, d, how) in enumerate(cases)
        if rows[str(n)] is not None
    ]


def _read_medians(prof: Any, count: int) -> dict[str, float | None]:
    found = read_batch(export_trace(prof), [str(n) for n in range(count)])
    return {n: statistics.median(r["us"] for r in rows) if rows else None for n, rows in found.items()}
