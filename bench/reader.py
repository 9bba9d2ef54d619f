"""How fast and how lean traces are read, beside `orjson.loads` of the same file in the same run.

    python bench/reader.py [--mb 100] [--large-mb 1000] [TRACE]

A large trace is made by repeating the events of a real one (shifted in time), so its texture is real.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "src" / "presage" / "data" / "dlrm_mlperf_b2048.json.gz"

MEASURE = """
import resource, sys, time
path = sys.argv[2]
if sys.argv[1] == "orjson":
    import orjson
    t = time.perf_counter(); value = orjson.loads(open(path, "rb").read()); t = time.perf_counter() - t
else:
    from presage.traces import kineto
    kineto.read(sys.argv[3])  # compiled and imported
    t = time.perf_counter(); value = kineto.read(path); t = time.perf_counter() - t
print(t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def enlarged(source: Path, target: Path, size: int) -> int:
    """Write a trace of about `size` bytes made of copies of `source`; how many events it has."""
    trace = json.loads(gzip.decompress(source.read_bytes()))
    events = trace.pop("traceEvents")
    span = 1000 + max(e["ts"] + e.get("dur", 0) for e in events if e["ph"] == "X") - min(e["ts"] for e in events)
    count = 0
    with target.open("w") as out:
        out.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n')
        while out.tell() < size:
            for e in events:
                moved = dict(e, ts=e["ts"] + count // len(events) * span)
                out.write((",\n" if count else "") + json.dumps(moved))
                count += 1
        out.write("]}")
    return count


def measured(reader: str, path: Path) -> tuple[float, float]:
    """Seconds and peak resident bytes of one reader in a process of its own."""
    call = [sys.executable, "-c", MEASURE, reader, str(path), str(DEMO)]
    seconds, peak = subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
    return float(seconds), float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--large-mb", type=int, default=1000, help="0 leaves the large file out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        events = enlarged(args.trace, file, args.mb * 10**6)
        runs = [(measured("orjson", file), measured("presage", file)) for _ in range(3)]
        loads, read = (min(r[i][0] for r in runs) for i in (0, 1))
        peaks = [runs[0][i][1] for i in (0, 1)]
        print(
            f"{args.mb} MB, {events} events: orjson.loads {loads:.2f} s, presage {read:.2f} s, "
            f"ratio {read / loads:.2f} (bar 3)"
        )
        print(f"  peak memory: orjson.loads {peaks[0] / 1e9:.2f} GB, presage {peaks[1] / 1e9:.2f} GB")
        if args.large_mb:
            events = enlarged(args.trace, file, args.large_mb * 10**6)
            seconds, peak = measured("presage", file)
            print(
                f"{args.large_mb} MB, {events} events: presage {seconds:.1f} s, "
                f"peak memory {peak / 1e9:.2f} GB (bar 10 GB)"
            )


if __name__ == "__main__":
    main()
