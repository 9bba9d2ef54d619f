"""The part of docs/accuracy.md on distributions: what was predicted to vary, alongside what did.

    python docs/accuracy_sure.py ../shared

writes that part anew; `docs/make_accuracy.py` writes it with the whole page.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from presage_validation.fleet import score_fleets
from presage_validation.steps import score_steps
from presage_validation.stragglers import score_stragglers
from presage_validation.temporal import score_temporal

PAGE = Path(__file__).with_name("accuracy.md")
HEAD = "## Distributions (`presage accuracy steps`, `stragglers`, `temporal`, `fleet`)"
TABLE = "| claim | n | measured | bar | yardstick |\n|---|---|---|---|---|"


def percent(x: float, digits: int = 2) -> str:
    return f"{100 * x:.{digits}f}%"


def tell(name: str) -> None:
    print(f"  {name}", file=sys.stderr)


def steps(data: Path) -> list[str]:
    """Runs of a system, each predicted from the others."""
    found = score_steps([data / "steps" / "mlperf_v5.0.json.gz"], tell).to_json()
    m, iid, family = found["metrics"], found["baselines"]["iid_pool"], found["baselines"]["best_family"]
    runs, n = f"{m['runs']} runs", f"{m['runs']} runs, {m['n']:,} steps"
    inside, covered = "run_interval_90_coverage", "coverage_95"
    within = m["zero_data_within_1.5pt"]
    rows = [
        ("steps below their 95% quantile", n, percent(m[covered], 1), "93-97%", f"iid {percent(iid[covered], 1)}"),
        ("p95, median error", n, percent(m["p95_error"]), "1.5%", f"single family {percent(family['p95_error'])}"),
        ("CRPS over that of a single family", n, f"{m['crps_ratio']:.2f}", "0.75", f"iid {iid['crps_ratio']:.2f}"),
        ("run time in its 90% interval", runs, percent(m[inside], 0), "85%", f"iid {percent(iid[inside], 0)}"),
        ("KS (floor)", n, f"{m['ks']:.2f} ({m['ks_floor']:.2f})", "", f"single family {family['ks']:.2f}"),
        ("no data: p95/p50 within 1.5 points", f"{len(found['zero_data'])} systems", percent(within, 0), "80%", ""),
    ]
    return [line(f"MLPerf v5.0, {r[0]}", *r[1:]) for r in rows]


def stragglers(data: Path) -> list[str]:
    """Odd steps from even ones."""
    found = score_stragglers([data / "traces" / "bytedance_straggler"], tell)
    out = []
    for j in found.jobs:
        f, iid = j.ours, j.iid
        bar = "1%" if j.job == "AR" else ""
        out += [
            line(f"{j.job}, p95 of left-out steps", f"{f.n}", signed(f.p95_error), bar, f"iid {signed(iid.p95_error)}"),
            line(f"{j.job}, W1 / mean", f"{f.n}", percent(f.w1_over_mean), "1%", f"iid {percent(iid.w1_over_mean)}"),
            line(
                f"{j.job}, KS (floor, 5% critical)", f"{f.n}",
                f"{f.ks:.2f} ({f.ks_floor:.2f}, {f.ks_critical_5pct:.2f})", "floor + .05", f"iid {iid.ks:.2f}",
            ),
        ]  # fmt: skip
    return out


def signed(x: float) -> str:
    return f"{100 * x:+.2f}%"


def temporal(data: Path) -> list[str]:
    found = score_temporal(data / "h200" / "temporal.json.gz", tell).to_json()
    m: dict[str, Any] = found["metrics"]
    return [
        line(f"H200 series, {p}/p50 of second halves, median error", str(found["n"]),
             f"{m[f'{p}_over_p50_error_points']:.2f} points", "",
             f"the first half itself: {m[f'{p}_first_half_error_points']:.2f}")
        for p in ("p95", "p99")
    ]  # fmt: skip


def fleets(data: Path) -> list[str]:
    files = sorted((data / "variability").glob("*.csv"))
    found = score_fleets(files, tell)
    out = []
    for metric, what in (("p99", "99th percentile of the others"), ("largest", "expected largest of 256 others")):
        s = found.metrics()[metric]
        plain = {k: v.metrics()[metric].median for k, v in found.baselines.items()}
        beside = ", ".join(f"{k} {percent(v)}" for k, v in plain.items())
        claim = f"PAL, from 50 GPUs: {what}, median error"
        out.append(line(claim, f"{s.n:,} sets", percent(s.median), "1.5%", beside))
    return out


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def sure_part(data: Path) -> list[str]:
    intro = [
        HEAD,
        "",
        "Always fitted on some and scored on others: runs of a system by its other runs (widths shrunk to what",
        "other systems show), odd steps by even ones, second halves by first halves, GPUs by 50 of them (how common",
        "slow ones are: from other sites). `iid` draws steps, or operations, independently from a pool. By system,",
        "job and table: [steps](steps.md), [stragglers](stragglers.md), [noise](noise.md); where presage misses is",
        "said there.",
        "",
        TABLE,
    ]
    return [*intro, *steps(data), *stragglers(data), *temporal(data), *fleets(data), ""]


def main() -> None:
    data = Path(sys.argv[1] if len(sys.argv) > 1 else "../shared")
    if not (data / "steps").is_dir():
        sys.exit(f"no measured data at {data}: name the folder that holds steps/ and variability/")
    before = PAGE.read_text().split(HEAD)[0].rstrip()
    PAGE.write_text("\n".join([before, "", *sure_part(data)]))


if __name__ == "__main__":
    main()
