"""Score peak memory on the tables of runs and write the tables of docs/memory_jobs.md.

python docs/make_memory.py ../shared
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from presage.memory import SAFETY
from presage_validation.peak_memory import MemoryResult, confusion, score_memory
from presage_validation.score import Score

PAGE = Path(__file__).with_name("memory_jobs.md")
TABLES = ("megatron_goldens/megatron_goldens.csv", "fms_finetune/fms_finetune.csv", "public_runs.csv")
ERRORS, FITS, LEFT_OUT = "errors", "fits", "left out"


def score(data: Path) -> MemoryResult:
    return score_memory([data / "runs" / name for name in TABLES])


def tables(result: MemoryResult) -> dict[str, str]:
    """The tables of the page, by their marks."""
    return {
        ERRORS: "\n".join(_errors(result)), FITS: "\n".join(_fits(result)), LEFT_OUT: "\n".join(_left_out(result)),
    }  # fmt: skip


def _errors(result: MemoryResult) -> Iterator[str]:
    yield "| rows | n | MAPE | median | p90 | worst | bias |"
    yield "|---|---|---|---|---|---|---|"
    found = result.metrics()
    yield _line("**all**", found["peak_memory"])
    for group in ("above 8 GiB", *(g for g in result.groups() if g != "above 8 GiB")):
        if "peak_memory" in result.metrics(group):
            yield _line(group, result.metrics(group)["peak_memory"])
    yield _line("number of GPUs not stated, found from the bytes between steps", found["peak_memory_gpus_found"])
    yield _line("lengths vary, only their mean is stated", found["peak_memory_mean_length"])


def _line(name: str, s: Score) -> str:
    figures = " | ".join(f"{100 * x:.1f}%" for x in (s.mape, s.median, s.p90, s.max))
    return f"| {name} | {s.n} | {figures} | {100 * s.bias:+.1f}% |"


def _fits(result: MemoryResult) -> Iterator[str]:
    yield "| runs | margin | called to fit: ran | ran out | called not to fit: ran out | ran |"
    yield "|---|---|---|---|---|---|"
    rows = [("all, at the margin presage states", SAFETY, confusion(result.verdicts, SAFETY))]
    rows += [(f"half {i + 1}, at the margin that the other half sets", *found) for i, found in enumerate(result.halves)]
    for name, margin, c in rows:
        yield f"| {name} | {margin:.0%} | {c.true_fits} | {c.false_fits} | {c.true_oom} | {c.false_oom} |"


def _left_out(result: MemoryResult) -> Iterator[str]:
    yield "| rows left out | why |"
    yield "|---|---|"
    reasons: dict[str, int] = {}
    for skipped in result.skipped:
        reason = re.sub(r"^.*--", "--", skipped.reason)
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        yield f"| {count:,} | {reason} |"


def placed(text: str, found: dict[str, str]) -> str:
    """The page with these tables."""
    for what, table in found.items():
        before, rest = text.split(f"<!-- {what}: begin -->\n")
        after = rest.partition(f"\n<!-- {what}: end -->")[2]
        text = f"{before}<!-- {what}: begin -->\n{table}\n<!-- {what}: end -->{after}"
    return text


if __name__ == "__main__":
    scored = score(Path(sys.argv[1] if len(sys.argv) > 1 else "../shared"))
    PAGE.write_text(placed(PAGE.read_text(), tables(scored)))
