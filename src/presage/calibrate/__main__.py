"""`python -m presage.calibrate --out DIR`: measure this machine's GPU. Stops when time is up; run again to go on."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from presage.calibrate import host, power
from presage.calibrate.measure import REPEATS, profiled_batch
from presage.calibrate.sweeps import FAMILIES, draw

BATCH = 40


def header(torch: Any) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0)
    return {
        "presage_pack": 1,
        "gpu": gpu.name,
        "sms": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "l2_bytes": getattr(gpu, "L2_cache_size", 0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": REPEATS,
    }


def done(path: Path) -> int:
    """How many draws of a family are in its file."""
    if not path.exists():
        return 0
    with path.open() as f:
        return sum(1 for _ in f)


def sweep(torch: Any, name: str, out: Path, end: float, batch: int = BATCH) -> bool:
    """Measure a family's draws that are not there yet; whether it is complete."""
    path, draws = out / f"{name}.jsonl", draw(name)
    first = done(path)
    start, begun = time.monotonic(), first
    while first < len(draws):
        if time.monotonic() > end:
            return False
        some = draws[first : first + batch]
        calls = [(str(k), partial(FAMILIES[name].build, torch, p)) for k, p in enumerate(some)]
        rows = profiled_batch(torch, calls)
        with path.open("a") as f:
            for k, p in enumerate(some):
                found = rows[str(k)]
                line = {"p": p, "error": found} if isinstance(found, str) else {"p": p, "ops": found}
                f.write(json.dumps(line, separators=(",", ":")) + "\n")
        first += len(some)
        torch.cuda.empty_cache()
        left = (time.monotonic() - start) / (first - begun) * (len(draws) - first)
        print(f"{name}: {first}/{len(draws)}, about {left:.0f} s to go", flush=True)
    return True


def once(out: Path, name: str, measure: Any) -> None:
    """Measure something small that is not there yet."""
    path = out / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps(measure(), separators=(",", ":")))
        print(name, "done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="presage calibrate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the raw measurements; what is there is kept")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop after this time")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only these (default: all)")
    parser.add_argument("--seconds-each", type=float, default=0.0, help="at most this long for a family in one run")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("presage calibrate: torch is not installed here")
    if not torch.cuda.is_available():
        sys.exit("presage calibrate: no CUDA GPU here; run it on the machine whose GPU is to be measured")
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    once(args.out, "header", lambda: header(torch))
    once(args.out, "latencies", lambda: host.latencies(torch))
    once(args.out, "copies", lambda: host.copies(torch))
    once(args.out, "host", lambda: host.host_costs(torch))
    for name in args.family or FAMILIES:
        mine = min(end, time.monotonic() + args.seconds_each) if args.seconds_each else end
        if not sweep(torch, name, args.out, mine) and time.monotonic() > end:
            print("out of time; run the same command again to go on")
            return
    if not args.family and time.monotonic() < end:
        once(args.out, "power", lambda: power.sustained(torch))


if __name__ == "__main__":
    main()
