"""The tables of docs/sharding.md: `python docs/make_sharding.py ../shared`.

MLPerf's recommendation runs, the traced jobs, and, where torchrec is installed, TorchRec's planner beside presage's.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from presage.files import write_whole
from presage_validation.dlrm import score_dlrm
from presage_validation.score import Row
from presage_validation.traced_jobs import score_traced_jobs

PAGE = Path(__file__).with_name("sharding.md")
TOOL = PAGE.parents[1] / "tools" / "compare_planners.py"
RUNS, TRACED, PLANNERS = "MLPerf's runs", "traced jobs", "planners"
JOBS = ("dlrm_8xv100", "torchrec_dlrm_4xv100")
TIMES = {
    "device": "kernels of a rank",
    "device_learned": "kernels of a rank, learned from another's trace",
    "step": "step",
    "step_learned": "step, learned from one rank's trace",
    "step_delayed": "step, with the delay",
    "step_allocating": "step, with the delay and the trace's cudaMalloc",
}


def table(rows: Sequence[Row]) -> str:
    """Runs of one size and prediction together."""
    groups: dict[tuple[str, str, float], list[float]] = {}
    for r in rows:
        size, batch = r.name.split(": ", 1)[1].split(", batch ")
        groups.setdefault((size, batch, round(r.predicted * 1e3, 2)), []).append(r.measured * 1e3)
    out = ["| GPUs | batch | runs | measured | predicted | error |", "|---|---|---|---|---|---|"]
    for (size, batch, predicted), measured in sorted(groups.items(), key=lambda g: _order(g[0])):
        span, errors = (
            _span([f"{m:.2f}" for m in measured]),
            _span([f"{predicted / m - 1:+.0%}" for m in measured], " to "),
        )
        count, _, gpu = size.partition(" ")
        out.append(
            f"| {count} x {gpu} | {int(batch):,} | {len(measured)} | {span} ms | {predicted:.2f} ms | {errors} |"
        )
    return "\n".join(out)


def _order(key: tuple[str, str, float]) -> tuple[str, int, int, float]:
    count, _, gpu = key[0].partition(" ")
    return gpu, int(count), int(key[1]), key[2]


def _span(values: Sequence[str], join: str = "-") -> str:
    first, last = min(values, key=_number), max(values, key=_number)
    return first if first == last else f"{first}{join}{last}"


def _number(text: str) -> float:
    return float(text.rstrip("%"))


def traced_table(rows: Sequence[Row]) -> str:
    """Jobs of traced ranks: each time predicted and measured, rows of one job and time together."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r.group, r.metric), []).append(r)
    out = [
        "| traced job | time | rows | predicted | measured | error, mean | at worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for (job, metric), some in groups.items():
        predicted, measured = (_span([f"{x * 1e3:.4g}" for x in xs]) for xs in zip(*_pairs(some), strict=True))
        errors = [abs(r.error) for r in some]
        cells = f"{len(some)} | {predicted} ms | {measured} ms | {sum(errors) / len(errors):.1%} | {max(errors):.1%}"
        out.append(f"| `{job}` | {TIMES[metric]} | {cells} |")
    return "\n".join(out)


def _pairs(rows: Iterable[Row]) -> list[tuple[float, float]]:
    return [(r.predicted, r.measured) for r in rows]


def planners(data: Path) -> str:
    """TorchRec's planner beside presage's."""
    command = [sys.executable, str(TOOL), str(data / "h200" / "tbe_sharding.json")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return printed.partition("\n\n")[0]


def shown(text: str, what: str = RUNS) -> str:
    """The table that the page has."""
    found = re.search(f"<!-- {what}: begin -->\n(.*?)\n<!-- {what}: end -->", text, re.DOTALL)
    return found.group(1) if found else ""


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    found = {
        RUNS: table(score_dlrm(data / "runs" / "public_runs.csv").rows),
        TRACED: traced_table(score_traced_jobs([data / "traces" / job for job in JOBS]).rows),
    }
    if find_spec("torchrec") is not None:
        found[PLANNERS] = planners(data)
    text = PAGE.read_text()
    for what, new in found.items():
        text = text.replace(shown(text, what), new)
    write_whole(PAGE, text.encode())


if __name__ == "__main__":
    main()
