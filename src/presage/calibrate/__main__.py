"""Measures this machine's GPU into a pack: a folder of raw measurements. Needs Python, torch and numpy only.

Stops when its time is up; the same command goes on where it stopped. A full sweep of an H200 takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from presage.calibrate import cache, host, power
from presage.calibrate.measure import REPEATS, Flush, profiled_batch, read_batch
from presage.calibrate.nvml import Gauge
from presage.calibrate.stuck import Stuck
from presage.calibrate.sweeps import FAMILIES, draw

BATCH = 100
NEVER_BACK = "did not come back when it was last tried"
VERSION = 2


def header(torch: Any) -> dict[str, Any]:
    gpu, gauge = torch.cuda.get_device_properties(0), Gauge()
    return {
        "presage_pack": VERSION,
        "gpu": gpu.name,
        "sms": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "l2_bytes": getattr(gpu, "L2_cache_size", 0),
        "power_limit_W": gauge.limit_watts(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": gauge.driver(),
        "host": _processor(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": REPEATS,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def done(path: Path) -> int:
    """How many draws of a family are in its file."""
    if not path.exists():
        return 0
    with path.open() as f:
        return sum(1 for _ in f)


def sweep(torch: Any, name: str, out: Path, end: float, seed: int, pool: ProcessPoolExecutor) -> bool:
    """Measure a family's draws that are not there yet; whether it is complete. Traces are read in other processes."""
    path, draws, flush, gauge = out / f"{name}.jsonl", draw(name, seed), Flush(torch), Gauge()
    if path.with_suffix(".jsonl.gz").exists():
        print(f"{name}: packed already; give another folder to add to it and merge them with presage pack", flush=True)
        return True
    at = begun = done(path)
    start, stuck = time.monotonic(), Stuck(out, name)
    waiting: list[tuple[list[dict[str, Any]], dict[str, str], int, Future[Any]]] = []
    size = BATCH if FAMILIES[name].draws > 1000 else BATCH // 4
    with path.open("a") as f:
        while at < len(draws) and time.monotonic() < end:
            some = draws[at : at + size]
            failed = {str(k): NEVER_BACK for k in range(len(some)) if at + k in stuck.draws}
            calls = [
                (str(k), partial(FAMILIES[name].build, torch, p)) for k, p in enumerate(some) if str(k) not in failed
            ]
            trace, refused = profiled_batch(torch, calls, flush, partial(_under_way, stuck, at))
            stuck.done()
            waiting.append((some, failed | refused, gauge.mhz(), pool.submit(read_batch, trace, [n for n, _ in calls])))
            at += len(some)
            torch.cuda.empty_cache()
            _write(f, waiting, keep=3)
            left = (time.monotonic() - start) / (at - begun) * (len(draws) - at)
            print(f"{name}: {at}/{len(draws)}, about {left:.0f} s to go", flush=True)
        _write(f, waiting, keep=0)
    return at >= len(draws)


def _under_way(stuck: Stuck, first: int, name: str) -> None:
    stuck.at(first + int(name))


def _write(f: Any, waiting: list[Any], keep: int) -> None:
    """Append what has been read, in order; at most `keep` batches stay in flight."""
    while len(waiting) > keep:
        some, failed, mhz, job = waiting.pop(0)
        rows = job.result()
        for k, p in enumerate(some):
            found = {"error": failed[str(k)]} if str(k) in failed else {"mhz": mhz, "ops": rows[str(k)]}
            f.write(json.dumps({"p": p, **found}, separators=(",", ":")) + "\n")
        f.flush()


def once(out: Path, name: str, measure: Any) -> None:
    """Measure something small that is not there yet."""
    path = out / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps(measure(), separators=(",", ":")))
        print(name, "done", flush=True)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="presage calibrate", description=__doc__)
    out.add_argument("--out", type=Path, required=True, help="folder of the raw measurements; what is there is kept")
    out.add_argument("--minutes", type=float, default=20.0, help="stop after this time (default 20)")
    out.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only these (default: all)")
    out.add_argument("--seconds-each", type=float, default=0.0, help="at most this long for a family in one run")
    out.add_argument("--seed", type=int, default=0, help="another seed draws other shapes of the same design")
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        import torch
    except ImportError:
        sys.exit("presage calibrate: torch is not installed here; pip install torch")
    if not torch.cuda.is_available():
        sys.exit("presage calibrate: no CUDA GPU here; run it on the machine whose GPU is to be measured")
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    for name, measure in (
        ("header", partial(header, torch)),
        ("latencies", partial(host.latencies, torch)),
        ("copies", partial(host.copies, torch)),
        ("host", partial(host.host_costs, torch)),
        ("cache", partial(cache.reuse, torch)),
        ("power", partial(power.sustained, torch)),
    ):
        once(args.out, name, measure)
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        for name in args.family or FAMILIES:
            mine = min(end, time.monotonic() + args.seconds_each) if args.seconds_each else end
            if not sweep(torch, name, args.out, mine, args.seed, pool) and time.monotonic() > end:
                print("out of time; run the same command again to go on")
                return


if __name__ == "__main__":
    main()
