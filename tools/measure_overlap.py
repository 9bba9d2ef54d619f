"""Measures how much a collective and a kernel slow each other on this GPU, with a stand-in for the collective.

One GPU has nobody to talk to, so a kernel of the same footprint stands in: a block of 640 threads for each channel,
with as many registers and as much shared memory as NCCL's kernels ask for. It either streams through memory like a step
of a ring (two reads and a write for each byte received) at a set pace, or spins and only holds its multiprocessors.
Rows are appended to a file; the same command goes on where it stopped. Needs Python, torch and numpy only.

    python tools/measure_overlap.py --out overlap.jsonl --seconds 240
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from overlap_loads import Load, loads
from overlap_ring import CHUNK, CLOCK_GHZ, SHARED, THREADS, Beside, Ring

from presage.measure.activity import export_trace, read_events
from presage_fit.calibrate.power import GpuSensor
from presage_fit.calibrate.resume import whole_parts

__all__ = ["beside_all", "late", "main", "sustained"]

BURST, REST, SUSTAINED = 6e-3, 8e-3, 0.6
ROUNDS, MOMENTS = 3, 8

SPIN = tuple(Beside(c, False) for c in (1, 2, 4, 8, 12, 16, 20, 24, 32))
MOVE = tuple(
    Beside(c, True, gbps * 1e9)
    for c, gbps in (
        (4, 60), (8, 60), (8, 120), (8, 0), (12, 180), (16, 60), (16, 120), (16, 240), (16, 0), (20, 300),
        (24, 120), (24, 360), (24, 0), (32, 120), (32, 240), (32, 480), (32, 0),
    )
)  # fmt: skip
LONG = (Beside(16, False), Beside(16, True, 240e9), Beside(32, True, 480e9))
LATE = (Beside(8, True, 120e9), Beside(16, True, 240e9), Beside(24, True, 360e9), Beside(32, True, 480e9))


def timed(
    torch: Any, ring: Ring, what: Beside | None, call: Callable[[], Any], calls: int, pause: float
) -> dict[str, Any]:
    """Times of the calls one by one, and what the stand-in received a second meanwhile. `pause`: till all is queued."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    seen = [torch.empty_like(ring.progress) for _ in range(2)]
    ring.reset(ring.low)
    if what:
        ring.start(what, ring.low, most=0.1 + 4 * SUSTAINED)
    torch.cuda._sleep(int(pause * CLOCK_GHZ * 1e9))
    seen[0].copy_(ring.progress)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    seen[1].copy_(ring.progress)
    ring.stop.fill_(1)
    torch.cuda.synchronize()
    each = [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
    chunks = int((seen[1] - seen[0]).sum())
    return {"us": each, "bus": chunks * CHUNK / (1e-3 * marks[0].elapsed_time(marks[-1]))}


def _pause_of(torch: Any, call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds a call takes the GPU and the host."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda._sleep(4_000_000)
    start = time.perf_counter()
    marks[0].record()
    for _ in range(4):
        call()
    marks[1].record()
    host = (time.perf_counter() - start) / 4
    torch.cuda.synchronize()
    return max(1e-6, 1e-3 * marks[0].elapsed_time(marks[1]) / 4), host


def _summary(times: list[float]) -> dict[str, float]:
    """The first call, which has the caches cold, does not count."""
    kept = sorted(times[1:]) if len(times) > 3 else sorted(times)
    quarter = len(kept) // 4
    return {
        "us": round(statistics.median(kept), 3),
        "low_us": round(kept[quarter], 3),
        "high_us": round(kept[-1 - quarter], 3),
        "n": len(kept),
    }


def beside_all(torch: Any, ring: Ring, gauge: GpuSensor, load: Load, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """A load alone and beside each stand-in, in short bursts with rests between, so that the clock stays up."""
    call = load.make()
    seconds, host = _pause_of(torch, call)
    calls = max(4, min(40, int(BURST / seconds)))
    pause = 1.5 * calls * (host + 1e-5) + 5e-4
    for turn in range(rounds):
        for what in (None, *SPIN, None, *MOVE, None):
            found = timed(torch, ring, what, call, calls, pause)
            row: dict[str, Any] = {"load": load.name, "turn": turn, **_named(what), **_summary(found["us"])}
            if what and what.moves:
                row["bus_GBps"] = round(found["bus"] / 1e9, 2)
            yield row | {"mhz": gauge.mhz()}
            time.sleep(min(REST, calls * seconds))


def sustained(torch: Any, ring: Ring, gauge: GpuSensor, load: Load) -> Iterator[dict[str, Any]]:
    """The same for long enough that power sets the clock."""
    call = load.make()
    seconds, _ = _pause_of(torch, call)
    calls = int(SUSTAINED / seconds)
    for what in (None, *LONG, None):
        before, start = gauge.joules(), time.perf_counter()
        found = timed(torch, ring, what, call, calls, 1e-3)
        watts = (gauge.joules() - before) / (time.perf_counter() - start)
        row = {"load": load.name, "sustained": True, **_named(what), **_summary(found["us"][calls // 2 :])}
        if what and what.moves:
            row["bus_GBps"] = round(found["bus"] / 1e9, 2)
        yield row | {"mhz": gauge.mhz(), "watts": round(watts, 1)}
        time.sleep(0.2)


def late(torch: Any, ring: Ring, load: Load) -> Iterator[dict[str, Any]]:
    """A collective of set work that begins amid a queue of calls, at several moments of a call: how long it waits for
    its first block, how far apart its blocks begin, and how long it takes."""
    call = load.make()
    seconds, host = _pause_of(torch, call)
    calls = max(4, min(120, int(6e-3 / seconds)))
    pause = 1.5 * calls * (host + 5e-6) + 1e-3
    for what in LATE:
        chunks = max(1, int(1e-3 * what.bus / what.channels / CHUNK))
        for priority in ("none", "alone", "low", "high"):
            stream = ring.high if priority == "high" else ring.low
            rows = [
                _late_once(
                    torch, ring, what, chunks, call, calls, (pause, 5e-4 + k * seconds / MOMENTS), stream, priority
                )
                for k in range(MOMENTS)
            ]
            kept = {k: [round(r[k], 1) for r in rows] for k in rows[0]}
            yield {"load": load.name, "late": priority, **_named(what), **kept, "call_us": round(1e6 * seconds, 2)}


def _late_once(
    torch: Any,
    ring: Ring,
    what: Beside,
    chunks: int,
    call: Any,
    calls: int,
    pauses: tuple[float, float],
    stream: Any,
    priority: str,
) -> dict[str, float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    ring.reset(stream)
    torch.cuda._sleep(int(pauses[0] * CLOCK_GHZ * 1e9))
    if priority != "none":
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(sum(pauses) * CLOCK_GHZ * 1e9))
            marks[0].record()
            ring.start(what, stream, chunks)
            marks[1].record()
    marks[2].record()
    for _ in range(0 if priority == "alone" else calls):
        call()
    marks[3].record()
    torch.cuda.synchronize()
    own = 1e3 * marks[0].elapsed_time(marks[1]) if priority != "none" else 0.0
    times = ring.times[: 2 * what.channels].view(-1, 2).cpu().numpy() / 1e3
    apart = float(times[:, 0].max() - times[:, 0].min()) if priority != "none" else 0.0
    inside = float(times[:, 1].max() - times[:, 0].min()) if priority != "none" else 0.0
    return {"us": own, "inside_us": inside, "start_apart_us": apart, "queue_us": 1e3 * marks[2].elapsed_time(marks[3])}


def _named(what: Beside | None) -> dict[str, Any]:
    if what is None:
        return {"beside": "none"}
    set_to = {"set_GBps": round(what.bus / 1e9, 1)} if what.moves else {}
    return {"beside": "moves" if what.moves else "spins", "channels": what.channels, **set_to}


def rates(torch: Any, ring: Ring) -> Iterator[dict[str, Any]]:
    """What each stand-in receives with nothing beside it."""
    for what in MOVE:
        found = [timed(torch, ring, what, lambda: torch.cuda._sleep(2_000_000), 4, 5e-4)["bus"] for _ in range(3)]
        yield {"load": "nothing", **_named(what), "bus_GBps": round(statistics.median(found) / 1e9, 2)}


def launched(torch: Any, load: Load) -> dict[str, Any]:
    """A load's facts, and the kernels of a call with their grids."""
    from torch.profiler import ProfilerActivity, profile

    call = load.make()
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        call()
        torch.cuda.synchronize()
    kernels = [
        [
            e["name"][:90],
            e["args"]["grid"],
            e["args"]["block"],
            e["args"]["registers per thread"],
            e["args"]["shared memory"],
        ]
        for e in read_events(export_trace(prof))
        if e.get("cat") == "kernel"
    ]
    facts = {k: v for k, v in asdict(load).items() if k not in ("make", "name")}
    return {"fact": load.name, **facts, "kernels": kernels}


Part = tuple[str, Callable[[], Iterator[dict[str, Any]]]]


def parts(torch: Any, ring: Ring, gauge: GpuSensor, rounds: int) -> Iterator[Part]:
    """What there is to measure, each by its name."""
    found = loads(torch)
    yield "rates", lambda: rates(torch, ring)
    for load in found:
        yield f"fact {load.name}", lambda load=load: iter([launched(torch, load)])  # type: ignore[misc]
        yield f"burst {load.name}", lambda load=load: beside_all(torch, ring, gauge, load, rounds)  # type: ignore[misc]
    for load in found[::5]:
        yield f"late {load.name}", lambda load=load: late(torch, ring, load)  # type: ignore[misc]
    for load in found[::5]:
        yield f"sustained {load.name}", lambda load=load: sustained(torch, ring, gauge, load)  # type: ignore[misc]


def header(torch: Any, ring: Ring, gauge: GpuSensor) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0)
    return {
        "part": "header",
        "gpu": gpu.name,
        "sms": gpu.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": gauge.driver(),
        "power_limit_W": gauge.limit_watts(),
        "date": time.strftime("%Y-%m-%d"),
        "threads": THREADS,
        "registers": ring.registers(),
        "shared_bytes": SHARED,
    }


def _tried(measure: Callable[[], Iterator[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows, or what went wrong: one load that torch refuses must not cost the others."""
    try:
        return list(measure())
    except Exception as e:
        if "CUDA error" in str(e) or "AcceleratorError" in type(e).__name__:
            raise  # nothing can be measured in this process any more
        return [{"error": f"{type(e).__name__}: {str(e)[:160]}"}]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of rows; what is there is kept")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after this time (default 300)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"times each pair is measured (default {ROUNDS})")
    parser.add_argument(
        "--only", default="", help="only parts whose name begins so: rates, fact, burst, late, sustained"
    )
    args = parser.parse_args(argv)
    import torch

    end, ring, gauge = time.monotonic() + args.seconds, Ring(torch), GpuSensor()
    done = whole_parts(args.out)
    with args.out.open("a") as f:
        if "header" not in done:
            f.write(json.dumps(header(torch, ring, gauge)) + "\n")
        for name, measure in parts(torch, ring, gauge, args.rounds):
            if name in done or not name.startswith(args.only):
                continue
            if time.monotonic() > end:
                print("out of time; run the same command again to go on")
                return
            f.write("".join(json.dumps({"part": name, **row}, separators=(",", ":")) + "\n" for row in _tried(measure)))
            f.flush()
            torch.cuda.empty_cache()
            print(name, flush=True)


if __name__ == "__main__":
    main()
