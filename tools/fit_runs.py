"""Fit the three global efficiencies of jobs on public runs, and what they would be without each source.

    python tools/fit_runs.py ../shared/runs/public_runs.csv ../shared/runs/aws_moe/aws_moe_runs.csv
    python tools/fit_runs.py --only experts ../shared/runs/public_runs.csv ../shared/runs/aws_moe/aws_moe_runs.csv

Logarithms of predicted over measured step times, made small by least squares with Huber's weights; every source counts
once, however many rows it has. Each logarithm of a factor is held towards 0 by a prior: a kernel in training is within
15% of the same kernel by itself, or so; the host's time of experts' layers, counted and not traced, within a factor of
two. Steps that another simulator made have no part. Steps are linearised about the last fit, and again, until nothing
moves.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from presage.configs.job import Job
from presage.errors import PresageError
from presage.prediction.jobs.efficiency import Efficiency
from presage.prediction.jobs.job_step import job_step
from presage_validation.public_table import read_table, run_seconds
from presage_validation.run_jobs import COLUMNS, job_of_run, simulated

OUT = Path(__file__).resolve().parents[1] / "src/presage/data/jobs/efficiency.toml"
NAMES = [f.name for f in fields(Efficiency)]
PRIOR = {"product": 0.15, "backward": 0.15, "experts": 0.7}  # standard deviations of factors' logarithms
WITHIN = 0.14  # and of a source's error: sources differ by so much, whatever is fitted
HUBER = 0.1
NUDGE = 0.02
MOST = 150  # rows of one source that take part, evenly taken
ROUNDS = 4


def main() -> None:
    if sys.argv[1] == "--only":
        fit_one(sys.argv[2], [row for path in sys.argv[3:] for row in read(Path(path))])
        return
    rows = [row for path in sys.argv[1:] for row in read(Path(path))]
    print(f"{len(rows)} rows of {len({s for s, _, _ in rows})} sources")
    x = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        base, slopes = linear(rows, x)
        x = solved(rows, base, slopes, x, without="")
        print({n: round(float(v), 4) for n, v in zip(NAMES, factors(x), strict=True)})
    base, slopes = linear(rows, x)
    sources = sorted({s for s, _, _ in rows})
    parts = {"": solved(rows, base, slopes, x, "")} | {s: solved(rows, base, slopes, x, s) for s in sources}
    write(parts, len(rows))


def fit_one(name: str, rows: list[tuple[str, Job, float]]) -> None:
    """Fit one factor; the others stay as the file has them, so that no other answer changes."""
    file = tomllib.loads(OUT.read_text(encoding="utf-8"))
    x = np.log([file["fitted"].get(n, 1.0) for n in NAMES])
    free = np.array([n == name for n in NAMES])
    for _ in range(ROUNDS):
        base, slopes = linear(rows, x)
        x = np.where(free, solved(rows, base, slopes * free, x, without=""), x)
    base, slopes = linear(rows, x)
    parts = {"": x}
    for source in sorted({s for s, _, _ in rows} | set(file["left_out"])):
        at = solved(rows, base, slopes * free, x, source)
        held = np.log([file["left_out"].get(source, file["fitted"]).get(n, 1.0) for n in NAMES])
        parts[source] = np.where(free, at, held)
    print({n: round(v, 4) for n, v in zip(NAMES, factors(x), strict=True)})
    write(parts, len(rows))


def read(path: Path) -> list[tuple[str, Job, float]]:
    """Source, job and measured seconds of the rows that take part."""
    found = []
    for _, row in read_table(path, COLUMNS):
        try:
            if row["complete"] != "dlrm" and not simulated(row):
                job = job_of_run(row)
                job_step(job)
                found.append((row["source_key"], job, run_seconds(row)))
        except PresageError:
            continue
    of = Counter(s for s, _, _ in found)
    seen: Counter[str] = Counter()
    kept = []
    for one in found:
        every = max(1, -(-of[one[0]] // MOST))
        if seen[one[0]] % every == 0:
            kept.append(one)
        seen[one[0]] += 1
    return kept


def factors(x: np.ndarray) -> list[float]:
    """From their logarithms."""
    return [float(v) for v in np.exp(x)]


def efficiency(x: np.ndarray) -> Efficiency:
    return replace(Efficiency(), **dict(zip(NAMES, factors(x), strict=True)))


def errors(rows: list[tuple[str, Job, float]], x: np.ndarray) -> np.ndarray:
    """Logarithms of predicted over measured."""
    e = efficiency(x)
    return np.array([np.log(job_step(job, e).seconds / seconds) for _, job, seconds in rows])


def linear(rows: list[tuple[str, Job, float]], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors at some factors, and how they move with each."""
    base = errors(rows, x)
    slopes = np.zeros((len(rows), len(NAMES)))
    for k in range(len(NAMES)):
        moved = x.copy()
        moved[k] += NUDGE
        slopes[:, k] = (errors(rows, moved) - base) / NUDGE
    return base, slopes


def solved(
    rows: list[tuple[str, Job, float]], base: np.ndarray, slopes: np.ndarray, x: np.ndarray, without: str
) -> np.ndarray:
    """The factors that make the linearised errors small."""
    sources = [s for s, _, _ in rows]
    of = Counter(sources)
    counts = np.array([0.0 if s == without else 1 / of[s] for s in sources])
    held = np.diag([(WITHIN / PRIOR[name]) ** 2 for name in NAMES])
    at = x.copy()
    for _ in range(50):
        left = base + slopes @ (at - x)
        weight = counts * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-9))
        normal = slopes.T @ (weight[:, None] * slopes) + held
        move = np.linalg.solve(normal, slopes.T @ (weight * left) + held @ at)
        at = at - move
        if np.abs(move).max() < 1e-6:
            break
    return at


def write(parts: dict[str, np.ndarray], rows: int) -> None:
    """The file that ships: as fitted, and without each source."""
    lines = [f"# Made by tools/fit_runs.py from {rows} public runs; see docs/runs.md.", ""]
    for source, x in parts.items():
        lines.append(f'[left_out."{source}"]' if source else "[fitted]")
        lines += [f"{n} = {v:.4f}" for n, v in zip(NAMES, factors(x), strict=True)]
        lines.append("")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
