"""The same work by one process, by two, and by a Ray cluster: seconds, and whether the answers are the same bytes.

ray start --head --num-cpus 2 && python bench/scale.py ../shared auto && ray stop
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples" / "jobs" / "llama3.1-405b.toml"
TIMES = 2  # of which the quicker counts
Command = tuple[str | Path, ...]


def commands(data: Path) -> dict[str, Command]:
    """Monte Carlo of steps and of whole runs, a search, and sweeps."""
    return {
        "`job --draws 100000`": ("job", JOB, "--draws", "100000"),
        "`sensitivity`": ("sensitivity", JOB),
        "`run --draws 50000`": ("run", JOB, "--steps", "100000", "--draws", "50000"),
        "`plan --gpus 16384`": ("plan", JOB, "--gpus", "16384"),
        "`accuracy runs`": ("accuracy", "runs", data / "runs" / "public_runs.csv"),
        "`accuracy traces`": ("accuracy", "traces", data / "h200" / "traces"),
    }


def timed(command: Command, more: Command) -> tuple[float, str]:
    """Seconds of the whole command, and a sum of its answer."""
    begun = time.perf_counter()
    asked = [Path(sys.executable).with_name("presage"), *command, *more, "--json", "-"]
    done = subprocess.run(asked, check=True, capture_output=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if b'"search_seconds"' not in line]
    return time.perf_counter() - begun, hashlib.sha256(b"\n".join(lines)).hexdigest()


def main(data: Path, address: str) -> None:
    ways: dict[str, Command] = {"one": (), "two": ("--workers", "2"), "ray": ("--ray", address)}
    print("| work | one process | `--workers 2` | `--ray`, 2 CPUs | same bytes |\n|---|---|---|---|---|")
    for name, command in commands(data).items():
        found: dict[str, list[tuple[float, str]]] = {way: [] for way in ways}
        for _ in range(TIMES):  # one after the other, so that all meet the same machine
            for way, more in ways.items():
                found[way].append(timed(command, more))
        one, two, ray = (min(seconds for seconds, _ in runs) for runs in found.values())
        same = len({told for runs in found.values() for _, told in runs}) == 1
        cells = f"{two:.1f} s ({one / two:.2f}x) | {ray:.1f} s ({one / ray:.2f}x)"
        print(f"| {name} | {one:.1f} s | {cells} | {'yes' if same else 'no'} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto")
