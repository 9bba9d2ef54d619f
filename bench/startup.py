"""CPU time of small commands beside that of the import they cannot do without: `python bench/startup.py [RUNS]`.

Medians of alternating runs, user and system time of the whole process.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
JOB = ["-m", "presage", "job", str(ROOT / "examples/jobs/llama3.1-405b.toml"), "-q"]
STEP = ["-m", "presage", "predict", f"{ROOT / 'examples/gpt.py'}:build", "-q"]
# What is measured, what it is measured against, and the ratio that it should stay below.
PAIRS = (("presage job", JOB, "numba", 2.0), ("presage predict", STEP, "torch", 2.5))


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, *arguments], env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def ratio(command: list[str], module: str, runs: int) -> tuple[float, float]:
    """Median CPU seconds of the command and of the import; the first run of each fills caches and does not count."""
    pairs = [(cpu_seconds(command), cpu_seconds(["-c", f"import {module}"])) for _ in range(runs + 1)][1:]
    return median(c for c, _ in pairs), median(m for _, m in pairs)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name, command, module, limit in PAIRS:
        seconds, bare = ratio(command, module, runs)
        print(f"{name}: {seconds:.2f} s CPU, {seconds / bare:.2f} x import {module} ({bare:.2f} s); limit {limit} x")


if __name__ == "__main__":
    main()
