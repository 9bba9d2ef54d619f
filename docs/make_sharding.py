"""The table of MLPerf's recommendation runs in docs/sharding.md: `python docs/make_sharding.py ../shared`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from presage.files import write_whole
from presage_validation.dlrm import score_dlrm
from presage_validation.score import Row

PAGE = Path(__file__).with_name("sharding.md")
BEGIN, END = "<!-- MLPerf's runs: begin -->", "<!-- MLPerf's runs: end -->"


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


def shown(text: str) -> str:
    """The table that the page has."""
    found = re.search(f"{BEGIN}\n(.*?)\n{END}", text, re.DOTALL)
    return found.group(1) if found else ""


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    rows = score_dlrm(data / "runs" / "public_runs.csv").rows
    text = PAGE.read_text()
    write_whole(PAGE, text.replace(shown(text), table(rows)).encode())


if __name__ == "__main__":
    main()
