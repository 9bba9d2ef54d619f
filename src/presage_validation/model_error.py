"""The 90% intervals of presage's own error by kind of job, from the accuracy of public runs.

python -m presage_validation.model_error ../shared

Every source counts the same, for runs of one source are alike. Predictions of jobs are those with efficiencies fitted
without the run's source; nothing was fitted to the runs that are predicted from code ("ranks"). The coverage is that of
intervals taken from all other sources.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from presage.files import write_whole
from presage.pool import processes
from presage.prediction import result
from presage_validation.ranks import score_ranks
from presage_validation.runs import score_runs
from presage_validation.score import Row

WORKLOADS = Path(__file__).resolve().parents[2] / "workloads" / "public.py"
KINDS = {
    "dense": ("transformer jobs", "step_time_left_out", "dense"),
    "moe": ("mixture-of-experts jobs", "step_time_left_out", "MoE"),
    "recommendation": ("recommendation jobs with HugeCTR", "step_time_recommendation", ""),
    "recommendation_pcie": ("recommendation jobs on GPUs without NVLink", "step_time_recommendation_pcie", ""),
    "ranks": ("captured steps on several GPUs", "step_time", ""),
}
HEAD = """\
# Measured over predicted step time by kind of prediction: 5th and 95th percentile over runs that presage's parameters
# were not fitted to. Written by `python -m presage_validation.model_error ../shared`; docs/how_sure.md has its use.
"""


def interval(rows: Sequence[Row]) -> tuple[float, float]:
    """5th and 95th percentile of measured over predicted, every source weighted the same."""
    ratio = np.array([r.measured / r.predicted for r in rows])
    sources = [r.group for r in rows]
    weight = np.array([1 / sources.count(s) for s in sources])
    order = np.argsort(ratio)
    middle = np.cumsum(weight[order]) - weight[order] / 2
    low, high = np.interp([0.05, 0.95], middle / weight.sum(), ratio[order])
    return float(low), float(high)


def coverage(rows: Sequence[Row]) -> float | None:
    """Share of runs within the interval of all other sources, every source weighted the same."""
    held = []
    for source in sorted({r.group for r in rows}):
        rest = [r for r in rows if r.group != source]
        if not rest:
            return None
        low, high = interval(rest)
        held.append(np.mean([low <= r.measured / r.predicted <= high for r in rows if r.group == source]))
    return float(np.mean(held))


def table(jobs: Iterable[Row], ranks: Iterable[Row]) -> str:
    """The file of intervals, from the rows of jobs and those of captured steps on several ranks."""
    every, from_code, out = list(jobs), list(ranks), [HEAD]
    for kind, (what, metric, group) in KINDS.items():
        rows = from_code if kind == "ranks" else every
        chosen = [r for r in rows if r.metric == metric and (not group or {group, "measured"} <= set(r.also))]
        low, high = interval(chosen)
        lines = [f"[{kind}]", f'what = "{what}"', f"low = {low:.2f}", f"high = {high:.2f}", f"runs = {len(chosen)}"]
        lines.append(f"sources = {len({r.group for r in chosen})}")
        share = coverage(chosen)
        out.append("\n".join([*lines, *([] if share is None else [f"coverage = {share:.2f}"])]) + "\n")
    return "\n".join(out)


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    runs = data / "runs" / "public_runs.csv"
    with processes(2, fresh=True) as pool:
        ranks = score_ranks(WORKLOADS, runs, pool=pool).rows
    text = table(score_runs(runs).rows, ranks)
    write_whole(result.MODEL_ERRORS, text.encode())
    print(text)


if __name__ == "__main__":
    main()
