"""Kills presage in the middle of its work, again and again, and looks at what is left.

    python tools/kills.py --kills 200              # at random moments, and between any two steps of a write
    python tools/kills.py --kills 9 --only job,fit

Every command is run once without a kill: the same seed gives the same bytes, so a file is whole if it has those. Then
it is killed with SIGKILL over an older file: at a random moment of its life (a process of its own), or right before or
in the middle of the n-th thing it does to a file (a fork, n = 1, 2, ... until it ends by itself). What it wrote must be
the older file or the new one, byte by byte. A calibration, with a stand-in for the GPU, goes on after every kill until
it is done, and must end with the rows of an uncut one. One more run then ends by itself, and nothing else may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOB = str(ROOT / "examples/jobs/own_model.toml")
STEP = f"{ROOT / 'examples/gpt.py'}:build"
GLOO = str(ROOT / "data/gloo/even")
SMALL = ("--arg", "batch=1")
RUNS = "step,seconds\n" + "".join(f"{i},{1 + (i * i % 17) / 1000}\n" for i in range(400))
MARK = "--calibrate-into"  # this file as the process that is killed
FAMILY, ROWS = "rnn", 120


@dataclass(frozen=True)
class Case:
    """A command that writes files, by their names in its folder."""

    name: str
    arguments: tuple[str, ...]  # OUT stands for the folder
    files: tuple[str, ...]
    forks: bool = True  # whether it can be killed in a fork: torch does not like to be forked


JSON, TRACE = ("--json", "OUT/a.json"), ("--trace", "OUT/t.json")
FEW = ("--draws", "200")

CASES = (
    Case("job --json --trace", ("job", JOB, *JSON, *TRACE), ("a.json", "t.json")),
    Case("plan --out --json", ("plan", JOB, "--gpus", "8", "--limit", "10", "--out", "OUT/best.toml", *JSON),
         ("best.toml", "a.json")),
    Case("run --json", ("run", JOB, "--tokens", "1B", *FEW, *JSON), ("a.json",)),
    Case("fit --out", ("fit", "OUT/steps.csv", "--out", "OUT/noise.toml"), ("noise.toml",)),
    Case("replay --trace", ("replay", "demo", "--trace", "OUT/t.json.gz"), ("t.json.gz",)),
    Case("place --out", ("place", JOB, *FEW, "--randoms", "4", "--out", "OUT/p.csv"), ("p.csv",)),
    Case("predict --json --trace", ("predict", STEP, *SMALL, *JSON, *TRACE), ("a.json", "t.json"), forks=False),
    Case("graph --out", ("graph", STEP, *SMALL, "--out", "OUT/g.presage"), ("g.presage",), forks=False),
    Case("accuracy --out", ("accuracy", "traces", GLOO, "--out", "OUT/rows.csv"), ("rows.csv",)),
)  # fmt: skip


@dataclass
class Score:
    """What was found after the kills of one command."""

    command: str
    kills: int = 0
    old_kept: int = 0
    new_whole: int = 0
    resumed: int = 0
    lost: int = 0
    notes: list[str] = field(default_factory=list)


# ---- the command


def run_here(arguments: list[str]) -> None:
    """In this process, as the command line would."""
    from presage.cli.app import app

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        app(arguments, standalone_mode=False)


def started(arguments: list[str]) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.argv[1:] = {arguments!r}; from presage.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def placed(case: Case, folder: Path) -> list[str]:
    """Its arguments, with its inputs in the folder."""
    (folder / "steps.csv").write_text(RUNS)
    return [a.replace("OUT", str(folder)) for a in case.arguments]


# ---- kills between two steps of a write


def armed(n: int) -> None:
    """This process is killed right before, or in the middle of, the n-th thing it does to a file it writes."""
    left = [n]

    def die_at(half: Callable[[], None] = lambda: None) -> None:
        left[0] -= 1
        if left[0] == 0:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

    def before(name: str) -> None:
        real = getattr(os, name)
        setattr(os, name, lambda *a, **k: (die_at(), real(*a, **k))[1])

    for name in ("fsync", "replace", "chmod", "rename", "truncate"):
        before(name)
    opened, given = os.open, os.fdopen

    def open_(path: Any, flags: int, *more: Any, **named: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR) and os.fspath(path) != os.devnull
        if writes:
            die_at()
        handle = opened(path, flags, *more, **named)
        if writes:
            die_at()
        return handle

    class Torn:
        """A file that is killed in the middle of a write."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            die_at(lambda: (self.file.write(data[: len(data) // 2]), self.file.flush())[1])
            return int(self.file.write(data))

        def __enter__(self) -> Torn:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    os.open, os.fdopen = open_, lambda *a, **k: Torn(given(*a, **k))  # type: ignore[assignment]


def forked(arguments: list[str], n: int) -> bool:
    """Whether it was killed at its n-th step, rather than done before."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            armed(n)
            run_here(arguments)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


# ---- what is left


def judged(case: Case, folder: Path, old: dict[str, bytes], new: dict[str, bytes], score: Score) -> None:
    score.kills += 1
    found = {name: (folder / name).read_bytes() if (folder / name).exists() else b"" for name in case.files}
    for name, data in found.items():
        if data not in (old[name], new[name]):
            score.lost += 1
            score.notes.append(f"{name} has {len(data)} bytes: neither the old file nor the new one")
    if found == old:
        score.old_kept += 1
    elif all(data in (old[n], new[n]) for n, data in found.items()):
        score.new_whole += 1


def leftovers(case: Case, folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in (*case.files, "steps.csv"))


def tried(case: Case, kills: int, rng: random.Random) -> Score:
    score = Score(case.name)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = placed(case, folder)
        begun = time.monotonic()
        started(arguments).wait()
        life = time.monotonic() - begun
        new = {f: (folder / f).read_bytes() for f in case.files}
        old = {f: b"older " + data[: len(data) // 3] for f, data in new.items()}
        for killed in _kills(case, arguments, kills, life, rng):
            if killed is None:
                for f, data in old.items():
                    (folder / f).write_bytes(data)
            else:
                judged(case, folder, old, new, score)
        started(arguments).wait()
        if {f: (folder / f).read_bytes() for f in case.files} != new or leftovers(case, folder):
            score.lost += 1
            score.notes.append(f"after one more run there is {leftovers(case, folder)}")
    return score


def _kills(case: Case, arguments: list[str], kills: int, life: float, rng: random.Random) -> Iterator[bool | None]:
    """None before a kill, True after it. Every step of the writes, then random moments until there are so many."""
    done, n = 0, 1
    if case.forks:
        run_here(arguments)  # what is imported and compiled here is so in every fork
        while True:
            yield None
            if not forked(arguments, n):
                break
            yield True
            done, n = done + 1, n + 1
    while done < kills:
        yield None
        process = started(arguments)
        time.sleep(rng.uniform(0.3, 1.02) * life)
        process.kill()
        process.wait()
        yield True
        done += 1


# ---- calibration


class Now:
    """A pool that does its work at once."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        out: Future[Any] = Future()
        out.set_result(call(*arguments))
        return out


def calibrate(folder: Path, pause: float = 0.002) -> None:
    """The sweep of one family, with a stand-in for the GPU."""
    from presage_fit.calibrate import __main__ as sweep

    class Still:
        def __init__(self, *_: object) -> None: ...
        def mhz(self) -> int:
            return 1980

        def empty_cache(self) -> None: ...

    def profiled(_torch: Any, calls: Any, _flush: Any, under_way: Callable[[str], None]) -> tuple[str, dict[str, str]]:
        for name, _ in calls:
            under_way(name)
            time.sleep(pause)
        return "", {}

    def rows(_: str, names: list[str]) -> dict[str, list[dict[str, Any]]]:
        return {n: [{"op": "aten::mm", "us": 1.0 + int(n), "kernels": [["k" * 40, 1.0]] * 40}] for n in names}

    torch = type("Torch", (), {"cuda": Still()})
    sweep.draw, of = (lambda name, seed: of(name, seed, ROWS)), sweep.draw
    sweep.profile_batch, sweep.read_batch, sweep.Flush, sweep.GpuSensor = profiled, rows, Still, Still  # type: ignore
    sweep.measure_once(folder, "latencies", lambda: {"launch_us": [2.5] * 2000})
    sweep.sweep(torch, FAMILY, folder, time.monotonic() + 60, 0, Now())  # type: ignore[arg-type]


def calibrated(kills: int, rng: random.Random) -> Score:
    """Pack after pack, each with a few kills on its way."""
    score = Score("calibrate")
    with tempfile.TemporaryDirectory() as name:
        whole, cut = Path(name) / "whole", Path(name) / "cut"
        whole.mkdir()
        begun = time.monotonic()
        _sweep(whole).wait()
        life, uncut = time.monotonic() - begun, (whole / f"{FAMILY}.jsonl").read_bytes()
        while score.kills < kills:
            shutil.rmtree(cut, ignore_errors=True)
            cut.mkdir()
            for _ in range(min(rng.randint(1, 4), kills - score.kills)):
                process = _sweep(cut)
                time.sleep(rng.uniform(0.1, 1.05) * life)
                process.kill()
                process.wait()
                score.kills += 1
            _sweep(cut).wait()
            _judge_pack(cut, uncut, score)
    return score


def _sweep(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, MARK, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _judge_pack(folder: Path, uncut: bytes, score: Score) -> None:
    """A draw that was under way in two kills is left out on purpose, and said to be."""
    rows = [json.loads(line) for line in (folder / f"{FAMILY}.jsonl").read_bytes().splitlines()]
    want = [json.loads(line) for line in uncut.splitlines()]
    same = [a["p"] for a in rows] == [b["p"] for b in want]
    left_out = sum("error" in row for row in rows)
    extra = sorted(p.name for p in folder.iterdir() if p.suffix not in (".jsonl", ".json", ".stuck"))
    if same and not extra and all(a == b or "error" in a for a, b in zip(rows, want, strict=True)):
        score.resumed += 1
    else:
        score.lost += 1
        score.notes.append(f"{len(rows)} rows for {len(want)}, and {extra}")
    if left_out:
        score.notes.append(f"{left_out} draw tried twice and killed twice, left out by its error")


# ---- the page


HEAD = (
    "| command | kills | old file kept | new file whole | resumed and complete | data lost |\n|---|---|---|---|---|---|"
)


def page(scores: list[Score]) -> str:
    total = Score(
        "all", *(sum(getattr(s, n) for s in scores) for n in ("kills", "old_kept", "new_whole", "resumed", "lost"))
    )
    return "\n".join([HEAD, *(_row(s) for s in (*scores, total))])


def _row(s: Score) -> str:
    packs = f"{s.resumed} packs" if s.resumed else ""
    kept = (s.old_kept, s.new_whole) if s.old_kept + s.new_whole else ("", "")
    return f"| `{s.command}` | {s.kills} | {kept[0]} | {kept[1]} | {packs} | {s.lost} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of all commands together, at least (default 50)")
    parser.add_argument("--only", default="", help="commands whose names begin so, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")
    parser.add_argument("--out", type=Path, help="a page whose table is written anew")
    parser.add_argument(MARK, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.calibrate_into:
        calibrate(args.calibrate_into)
        return
    rng, only, scores = random.Random(args.seed), tuple(args.only.split(",")), []
    names = [n for n in (*(case.name for case in CASES), "calibrate") if n.startswith(only)]
    each = -(-args.kills // max(1, len(names)))
    for name in names:
        case = next((c for c in CASES if c.name == name), None)
        scores.append(tried(case, each, rng) if case else calibrated(each, rng))
        print(scores[-1], file=sys.stderr, flush=True)
    print(json.dumps([asdict(s) for s in scores]) if args.json else page(scores))
    if args.out:
        _put(args.out, page(scores))
    if any(s.lost for s in scores):
        sys.exit(1)


def _put(path: Path, table: str) -> None:
    """The table between its marks."""
    start, end = "<!-- kills: start -->\n", "<!-- kills: end -->"
    before, _, rest = path.read_text().partition(start)
    path.write_text(before + start + table + "\n" + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
