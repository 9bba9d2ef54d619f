"""Try every reader of presage on spoiled files for a while, each in a process of its own with a bound on its memory.

    python tools/fuzz.py --minutes 5 [--reader NAME]... [--seed 0] [--out docs/hardening.md]
    python tools/fuzz.py --limits [--out docs/hardening.md]      files made to fill the memory (tests/fuzz/bombs.py)

Inputs are made from the seed, so a run finds what the same run found before, and goes further where it is given longer.
An input that breaks the contract (tests/fuzz/attempt.py) is kept under out/fuzz/. With --out the table of a page is
written anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

MEMORY = 4 << 30  # address space a reader may take beyond what its modules take
HANG = 20  # seconds after which a reader is stopped
COMMAND_EVERY = 40  # inputs
LEAST = 300  # inputs of a reader, where its commands are slow
KEPT = ROOT / "out" / "fuzz"


class Hang(Exception):
    """Took too long."""


def child(name: str, seconds: float, seed: int) -> None:
    """Try one reader; tell what was found as a line of JSON."""
    from fuzz.attempt import attempt, inputs, peak_memory
    from fuzz.readers import BY_NAME, with_torch

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    reader = BY_NAME[name] if name in BY_NAME else with_torch()
    found: dict[str, Any] = {"tried": 0, "accepted": 0, "commands": 0, "slowest": 0.0, "crashes": []}
    with tempfile.TemporaryDirectory() as folder:
        start, base = time.monotonic(), 0
        for i, files in inputs(reader, seed):
            command = i % COMMAND_EVERY == 0
            signal.alarm(HANG)
            try:
                outcome = attempt(reader, files, Path(folder) / "in", command)
                crash = outcome.crash
            except Hang:
                outcome, crash = None, f"stopped after {HANG} s"
            signal.alarm(0)
            if crash:
                found["crashes"].append(_keep(name, i, files, crash))
            if i == len(reader.files):  # all modules are there
                base = peak_memory()
                resource.setrlimit(resource.RLIMIT_AS, (_size() + MEMORY, -1))
            found["tried"] += 1
            found["accepted"] += bool(outcome and outcome.accepted)
            found["commands"] += bool(outcome and outcome.accepted and command and reader.command)
            if i >= len(reader.files) and outcome:
                found["slowest"] = max(found["slowest"], outcome.seconds)
            took = time.monotonic() - start
            if (took > seconds and i >= LEAST) or took > 5 * seconds:
                break
    print(json.dumps(found | {"memory": peak_memory(), "more": peak_memory() - base}))


def _size() -> int:
    """Bytes of address space now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _keep(name: str, number: int, files: dict[str, bytes], crash: str) -> str:
    folder = KEPT / re.sub(r"\W+", "_", name) / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    (folder / "crash.txt").write_text(crash)
    return str(folder.relative_to(ROOT))


def tried(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """What a process of its own says of a reader; it dies with a reader that takes it down."""
    args = [sys.executable, __file__, "--child", name, "--minutes", str(seconds / 60), "--seed", str(seed)]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"tried": 0, "accepted": 0, "commands": 0, "slowest": 0.0, "memory": 0, "more": 0, "crashes": [why]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def row(name: str, f: dict[str, Any]) -> list[str]:
    counts = (f["tried"], f["accepted"], f["tried"] - f["accepted"], f["commands"], len(f["crashes"]))
    return [name, *(f"{n:,}" for n in counts), f"{1e3 * f['slowest']:.0f} ms", f"{max(f['more'], 0) / 2**20:.0f} MiB"]


HEAD = ["reader", "inputs", "read", "refused", "commands run", "crashes", "slowest", "memory added"]


def page(rows: list[list[str]], head: list[str]) -> str:
    """As a table of Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def total(rows: list[list[str]]) -> list[str]:
    """Of all readers: counts added up, the largest of the others."""
    columns = [[int(re.sub(r"\D", "", cell)) for cell in column] for column in list(zip(*rows, strict=True))[1:]]
    counts = [f"{sum(column):,}" for column in columns[:-2]]
    return ["**all**", *counts, f"{max(columns[-2])} ms", f"{max(columns[-1])} MiB"]


def before(path: Path, names: set[str]) -> dict[str, list[str]]:
    """The rows of a page's table that are of these readers, by name."""
    lines = [line.strip("| \n").split(" | ") for line in path.read_text(encoding="utf-8").splitlines() if "|" in line]
    return {line[0]: line for line in lines if line[0] in names and len(line) == len(HEAD)}


def limits(out: Path | None) -> None:
    """Files made to fill the memory: what was said, and what it took."""
    from fuzz.bombs import BOMBS, LONG, tried

    rows, bad = [], False
    with tempfile.TemporaryDirectory() as folder:
        for k, bomb in enumerate((*BOMBS, *LONG)):
            found = tried(bomb, Path(folder) / str(k))
            said = re.sub(r"^.*?: ", "", found.said.replace(str(Path(folder) / str(k)), ""), count=1)
            bad = bad or found.said == "read" or found.said.startswith("died")
            rows.append([bomb.reader, bomb.name, said, f"{found.seconds:.2f} s", f"{found.memory / 2**20:.0f} MiB"])
            print(" | ".join(rows[-1]), file=sys.stderr)
    if out:
        write(out, "limits", page(rows, ["reader", "file", "what is said", "time", "memory added"]))
    sys.exit(bad)


def write(path: Path, name: str, table: str) -> None:
    """The table between two lines of the page."""
    from presage.files import write_whole

    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"{path}: no lines {start} and {end} in it: nothing is written")
    write_whole(path, f"{before}{start}\n{table}\n{end}{after}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="in all, shared by the readers")
    parser.add_argument("--reader", action="append", help="only this one (may be given again)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a page whose table is written anew")
    parser.add_argument("--limits", action="store_true", help="only files made to fill the memory")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, 60 * args.minutes, args.seed)
        return
    if args.limits:
        limits(args.out)
    from rich.console import Console
    from rich.table import Table

    from fuzz.readers import BY_NAME

    names = args.reader or [*BY_NAME, "indices, .pt"]
    shown = Table(*HEAD)
    every = []
    for k, name in enumerate(names, 1):
        found = tried(name, 60 * args.minutes / len(names), args.seed)
        every.append((name, found))
        shown.add_row(*row(name, found))
        print(f"{k}/{len(names)} {name}: {found['tried']} inputs, crashes: {found['crashes'] or 0}", file=sys.stderr)
    Console().print(shown)
    if args.out:
        known = before(args.out, {*BY_NAME, "indices, .pt"}) | {n: row(n, f) for n, f in every}
        rows = [known[n] for n in (*BY_NAME, "indices, .pt") if n in known]
        write(args.out, "fuzz", page([*rows, total(rows)], HEAD))
    sys.exit(1 if any(f["crashes"] for _, f in every) else 0)


if __name__ == "__main__":
    main()
