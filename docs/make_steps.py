"""What MLPerf's step logs say, where presage keeps it (the systems behind `prior_steps`, the priors of `series`), and
the tables of docs/steps.md.

python docs/make_steps.py ../shared
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from presage.noise.priors import EVENTS, STALL, SYSTEMS, architecture_of, known_systems, machine_of
from presage_fit.series import SeriesFit, fit, learn
from presage_fit.series.prior import BLOCKS, STEPS, STRIDE, STRIDED, SeriesPrior, prior_table
from presage_fit.series.prior import DATA as PRIORS
from presage_fit.step_logs import Logs, StepLog, read_logs
from presage_validation.steps import StepsResult, ZeroData, score_logs, score_steps, summary
from presage_validation.tables import STEP_FIGURES
from presage_validation.temporal import Ratio, TemporalResult, score_temporal

PAGE = Path(__file__).with_name("steps.md")
SOURCE = "mlcommons/training_results_v5.0, commit 0fdc28f01325, Apache-2.0"
HEAD = f"""# What the series model finds in each system that logged single steps, three runs each: docs/make_steps.py.
# Shares are of the step; jitter_seconds is the width of residuals; stalls are longer than 1 s, holdups are
# shorter and more than 6 widths long.
# Source: {SOURCE}; Llama 3.1 405B.
"""


def system_text(runs: Sequence[StepLog], found: SeriesFit) -> str:
    meta = runs[0].meta
    held = (found.shared.left * found.level)[found.bulk.stalls]
    stalls, short = held[held > STALL], held[held <= STALL]
    values: dict[str, str | float] = {
        "name": str(meta["system"]),
        "machine": machine_of(str(meta["submitter"]), str(meta["system"])),
        "architecture": architecture_of(str(meta["accelerator"])),
        "nodes": int(meta["nodes"]),
        "step_seconds": round(found.level, 3),
        "jitter_seconds": round(found.bulk.width * found.level, 4),
        "drift": round(found.belief().noise.common.drift, 4),
        "run_sd": round(float(np.std(found.shared.levels, ddof=1)), 5),
        "hours": round(sum(x.total for x in runs) / 3600, 3),
        "stalls": len(stalls),
        "lost_seconds": round(float(stalls.sum()), 1),
        "stall_seconds": round(float(np.exp(np.log(stalls).mean())), 2) if len(stalls) else 0.0,
        "holdups": round(len(short) / sum(len(x.seconds) for x in runs), 4),
        "holdup_seconds": round(float(np.median(short)), 2) if len(short) else 0.0,
    }
    values |= {key: round(found.events[name].excess, 4) for name, key in EVENTS}
    return "\n[[system]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())


def written_priors(fits: Mapping[str, Sequence[SeriesFit]]) -> str:
    priors: dict[str, SeriesPrior] = {kind: learn(found) for kind, found in fits.items()}
    table = {kind: prior_table(p) for kind, p in priors.items()}
    return json.dumps({"source": SOURCE, **table}, separators=(",", ":")).replace('],"', '],\n"') + "\n"


# ---- the page


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def systems_table() -> str:
    head = (
        "system",
        "nodes",
        "step",
        "jitter",
        "drift",
        "runs apart",
        "held up",
        "stalls an hour",
        "time lost",
        "first validation",
    )
    rows = [
        (s.name.split("_ngc")[0], str(s.nodes), f"{s.step_seconds:.2f} s", f"{1e3 * s.jitter_seconds:.0f} ms",
         f"{100 * s.drift:+.1f}%", f"{100 * s.run_sd:.2f}%", f"{100 * s.holdups:.1f}%",
         f"{s.stalls / s.hours:.1f}", f"{s.lost_seconds / s.hours / 36:.2f}%", f"{100 * s.first_validation:+.0f}%")
        for s in known_systems()
    ]  # fmt: skip
    return table(head, rows)


def score_line(name: str, s: Mapping[str, Any]) -> list[str]:
    percent = [f"{100 * s[k]:.2f}%" for k in ("p50_error", "p95_error", "p99_error", "w1_over_mean")]
    rest = [f"{s['crps_ratio']:.2f}", f"{100 * s['coverage_95']:.1f}%", f"{s['ks']:.2f}", f"{s['ks_floor']:.2f}"]
    whole = [f"{100 * s['run_total_error']:.2f}%", f"{100 * s['run_interval_90_coverage']:.0f}%"]
    return [name, str(s["runs"]), str(s["n"]), *percent, *rest, *whole]


def scores_table(result: StepsResult, kind: str, each: bool) -> str:
    rows = [r for r in result.rows if r.kind == kind]
    groups = result.groups(kind) if each else []
    lines = [score_line(g.split("/")[1].split("_ngc")[0], summary([r for r in rows if r.group == g])) for g in groups]
    for bench in sorted({r.group.split("/")[-1] for r in rows}) if not each else []:
        lines.append(score_line(bench, summary([r for r in rows if r.group.endswith(bench)])))
    lines.append([f"**{c}**" for c in score_line("all", summary(rows))])
    if any(r.n_cut for r in rows):
        lines.append(score_line("all, nothing cut", summary(rows, cut=False)))
    lines.append(score_line("training steps resampled (iid)", summary(rows, "iid")))
    lines.append(score_line("best single family", summary(rows, "family")))
    return table(("group", *STEP_FIGURES), lines)


def pit_table(result: StepsResult) -> str:
    rows = [r for r in result.rows if r.kind == "single steps"]
    head = ["", *(f"{10 * i}-{10 * i + 10}%" for i in range(10))]
    names = (("presage", "ours"), ("iid", "iid"), ("single family", "family"))
    return table(head, [[name, *(f"{100 * p:.1f}%" for p in summary(rows, w)["pit"])] for name, w in names])


def zero_page(zero: ZeroData) -> str:
    head = ("system", "nodes", "step", "p95/p50", "predicted", "90% of such systems", "error, points")
    rows = [
        (r.group.split("/")[1].split("_ngc")[0], f"{r.nodes:.0f}", f"{r.step_seconds:.2f} s",
         f"+{100 * r.measured:.2f}%", f"+{100 * r.predicted:.2f}%", f"{100 * r.low:.1f} to {100 * r.high:.1f}%",
         f"{100 * (r.predicted - r.measured):+.2f}" + ("" if r.hit else " (miss)"))
        for r in zero.rows
    ]  # fmt: skip
    return f"{table(head, rows)}\n\n{zero_line(zero)}"


def zero_line(zero: ZeroData) -> str:
    m = zero.metrics()
    told = f"With no data, within 1.5 points: {100 * m['zero_data_within_1.5pt']:.0f}% of {len(zero.rows)} systems; "
    told += f"median error {100 * m['zero_data_median_error']:.2f} points; in the 90% range: "
    return f"{told}{100 * m['zero_data_interval_90_coverage']:.0f}%."


def temporal_page(result: TemporalResult) -> str:
    head = ("series", "n", "settled after", "slow share", "p95/p50", "predicted", "p99/p50", "predicted", "from")
    rows = []
    for r in result.rows:
        cells = [c for x in r.ratios.values() for c in (f"+{100 * x.measured:.2f}%", _predicted(x))]
        rows.append((r.series, str(r.n), str(r.warm_up), f"{r.slow_share:.2f}", *cells, r.cause))
    m = result.metrics()
    errors = [f"{q} {m[f'{q}_over_p50_error_points']:.2f} points (the first half itself: "
              f"{m[f'{q}_first_half_error_points']:.2f})" for q in ("p95", "p99")]  # fmt: skip
    return f"{table(head, rows)}\n\nMedian |error|: {', '.join(errors)}."


def _predicted(x: Ratio) -> str:
    return f"+{100 * x.predicted:.2f}% ({100 * x.low:.2f} to {100 * x.high:.2f})"


def filled(page: str, parts: Mapping[str, str]) -> str:
    for name, text in parts.items():
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=text: f"{m[1]}{t}\n{m[2]}", page, flags=re.S
        )
    return page


def learn_from(logs: Path) -> None:
    groups = list(read_logs([logs]).groups().values())
    fits = [fit(g, SeriesPrior()) for g in groups]
    single = [(g, f) for g, f in zip(groups, fits, strict=True) if g[0].single]
    SYSTEMS.write_text(HEAD + "".join(system_text(g, f) for g, f in single))
    strided = [fit([x.means(STRIDE) for x in g], SeriesPrior()) for g, _ in single]
    blocks = [f for g, f in zip(groups, fits, strict=True) if not g[0].single]
    PRIORS.write_text(written_priors({STEPS: [f for _, f in single], STRIDED: strided, BLOCKS: blocks}))


def main() -> None:
    data = Path(sys.argv[1])
    logs = data / "steps" / "mlperf_v5.0.json.gz"
    if not logs.is_file():
        print(f"no step logs at {logs}: {PAGE.name} stays as it is")
        return
    learn_from(logs)
    result = score_steps([logs], lambda _: None)
    single = tuple(x.means(STRIDE) for x in read_logs([logs]).logs if x.single)
    means = score_logs(Logs(single), STRIDED, lambda _: None)
    parts = {
        "systems": systems_table(),
        "scores": scores_table(result, "single steps", each=True),
        "pit": pit_table(result),
        "means": f"{scores_table(means, STRIDED, each=True)}\n\n{zero_line(means.zero)}",
        "blocks": scores_table(result, "block means", each=False),
        "zero": zero_page(result.zero),
        "temporal": temporal_page(score_temporal(data / "h200" / "temporal.json.gz", lambda _: None)),
    }
    PAGE.write_text(filled(PAGE.read_text(), parts))


if __name__ == "__main__":
    main()
