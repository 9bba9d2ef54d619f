"""Host time in NeuSight's tables of element-wise ops, softmax and layer norm: python tools/fit_issue.py ../shared

A table's time lies between two events around a call, and the GPU waits for the call to be issued. What a kernel takes
is proportional to the number of its rows, whatever it does with one: the time of rows of about one width over their
number is a line, and where it begins is the host's. No model of a kernel is used. Train tables are fitted; the test
tables' figures are printed beside them.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

KINDS = ("elementwise", "softmax", "layernorm")
WIDTHS = 6  # widths within a sixth of an octave are one
Timed = tuple[tuple[str, int], float, float]  # op and width, bytes, seconds


def read(path: Path) -> dict[str, list[Timed]]:
    """By GPU."""
    out: dict[str, list[Timed]] = {}
    with gzip.open(path, "rt") as f:
        for row in csv.DictReader(f):
            rows, width = float(row["B"]), float(row["H"])
            one = (row["op"], int(WIDTHS * np.log2(width))), 4 * rows * width, 1e-3 * float(row["latency_ms"])
            out.setdefault(row["device"], []).append(one)
    return out


def beginning(timed: Sequence[Timed]) -> float:
    """Seconds at no rows: least squares of relative errors, a slope for every op and width."""
    kinds = {kind: k for k, kind in enumerate(dict.fromkeys(t[0] for t in timed))}
    x = np.zeros((len(timed), 1 + len(kinds)))
    x[:, 0] = 1.0
    x[np.arange(len(timed)), [1 + kinds[t[0]] for t in timed]] = [t[1] for t in timed]
    seconds = np.array([t[2] for t in timed])
    return float(np.linalg.lstsq(x / seconds[:, None], np.ones(len(timed)), rcond=None)[0][0])


def main(shared: str) -> None:
    for kind in KINDS:
        for split in ("train", "test"):
            found = read(Path(shared) / "kernels" / "neusight" / f"{split}_{kind}.csv.gz")
            each = {gpu: 1e6 * beginning(timed) for gpu, timed in found.items()}
            print(
                f"{kind} ({split}): {median(each.values()):.1f} us; "
                + ", ".join(f"{g} {s:.1f}" for g, s in each.items())
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
