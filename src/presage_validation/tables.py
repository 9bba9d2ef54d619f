"""What `presage accuracy` prints of each kind of result: tables of figures, and lines below them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

from presage.report.terminal import plain_table
from presage.text import percent, seconds, shorten
from presage_fit.ops.sizes import sizes_of
from presage_validation.score import AccuracyResult, Row
from presage_validation.steps import summary
from presage_validation.whatif import rates

if TYPE_CHECKING:
    from presage_validation.capture import CaptureResult
    from presage_validation.composed import ComposedResult, TailRatio
    from presage_validation.faults import FaultResult
    from presage_validation.fleet import FleetResult
    from presage_validation.peak_memory import MemoryResult
    from presage_validation.sharding import ShardingScores
    from presage_validation.steps import StepsResult
    from presage_validation.stragglers import StragglersResult
    from presage_validation.temporal import Ratio, TemporalResult
    from presage_validation.whatif import PairResult, ScoredEdit

T = TypeVar("T")
Cells = Mapping[str, Callable[[T], str]]  # by the column's title: a row's cell
Shown = list[Table | str]


def tabulate(
    title: str,
    columns: Cells[T],
    rows: Iterable[T],
    style: Callable[[T], str] = lambda _: "",
    left: int = 1,
    fold: bool = True,
) -> Table:
    """A table with a row for each of `rows`."""
    table = plain_table(title, *columns, left=left, fold=fold)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()), style=style(row))
    return table


def pct(value: float, digits: int = 2, sign: str = "") -> str:
    return f"{100 * value:{sign}.{digits}f}%"


def accuracy_tables(result: AccuracyResult) -> Shown:
    """Errors overall and by group, rates, and notes."""
    rows = [(metric, "all", s) for metric, s in result.metrics().items()]
    rows += [(metric, group, s) for group in result.groups() for metric, s in result.metrics(group).items()]
    figures = {"MAPE": "mape", "geomean": "geomean", "median": "median", "p90": "p90", "max": "max", "bias": "bias"}
    columns: Cells[Any] = {"metric": lambda r: r[0], "group": lambda r: r[1], "n": lambda r: str(r[2].n)} | {
        title: lambda r, name=name: percent(getattr(r[2], name), 2) for title, name in figures.items()
    }
    table = tabulate(f"Accuracy: {result.kind}", columns, rows, lambda r: "bold" if r[1] == "all" else "", left=2)
    return [table, *(f"{name}: {pct(value, 0)}" for name, value in result.rates.items()), *(result.notes or ())]


def memory_tables(result: MemoryResult) -> Shown:
    """Errors of peaks, what fits at the margin that presage states, and each half with the margin of the other."""
    from presage.memory import SAFETY
    from presage_validation.peak_memory import confusion

    columns: Cells[Any] = {
        "runs": lambda r: r[0], "margin": lambda r: pct(r[1], 0), "fit, and ran": lambda r: str(r[2].true_fits),
        "fit, but ran out": lambda r: str(r[2].false_fits), "do not, and ran out": lambda r: str(r[2].true_oom),
        "do not, but ran": lambda r: str(r[2].false_oom),
    }  # fmt: skip
    rows = [("all", SAFETY, confusion(result.verdicts, SAFETY))]
    rows += [(f"half {i + 1}, margin of the other", m, c) for i, (m, c) in enumerate(result.halves)]
    return [*accuracy_tables(result), tabulate("Called to fit", columns, rows)]


def label_tables(result: AccuracyResult) -> Shown:
    from presage_validation.labels import PEER

    peers = ", ".join(f"{name} {value:.1%}" for name, value in PEER.items())
    return [*accuracy_tables(result), f"NeuSight's own: {peers}"]


def capture_tables(result: CaptureResult) -> Shown:
    """How much of each case's kernel time was captured op by op, and the largest piece that was not."""
    columns: Cells[Any] = {
        "case": lambda c: c.case,
        "kernel time": lambda c: seconds(c.seconds),
        "matched": lambda c: percent(c.share, 2),
        "ops": lambda c: str(c.ops),
        "matched ops": lambda c: str(c.matched_ops),
        "largest miss": lambda c: "".join(f"{p}: {shorten(str(op), 70)}" for p, op in c.only_in_trace[:1]),
    }
    return [tabulate("Captured against traced", columns, result.cases)]


def sharding_tables(result: ShardingScores) -> Shown:
    """What each predictor picks of the measured placements."""
    columns: Cells[Any] = {
        "predictor": lambda r: r[0],
        "tasks": lambda r: str(r[1].tasks),
        "best": lambda r: percent(r[1].top1, 0),
        "within 5%": lambda r: percent(r[1].within_5pct, 0),
        "within 10%": lambda r: percent(r[1].within_10pct, 0),
        "mean regret": lambda r: percent(r[1].mean_regret, 1),
        "tau": lambda r: "" if r[1].kendall_tau is None else f"{r[1].kendall_tau:.2f}",
    }
    title = "Picks among measured placements"
    return [tabulate(title, columns, result.picks().items(), lambda r: "bold" if r[0] == "presage" else "")]


def fleet_tables(result: FleetResult) -> Shown:
    """Errors of the 99th percentile and of the expected largest, median and p90 over sets, by table."""

    def covered(group: str | None, metric: str) -> float:
        return result.coverage[group][metric] if group else result.rates[f"{metric}_interval_90_coverage"]

    def size(group: str | None, metric: str) -> tuple[str, str]:
        if group is None:
            return "", ""
        gpus, n, n_of_fleet = result.sizes[group]
        return str(gpus), str(n_of_fleet if metric.endswith("fleet") else n)

    rows = [(g, metric, s) for g in (*result.sizes, None) for metric, s in result.metrics(g).items()]
    columns: Cells[Any] = {
        "fleet": lambda r: r[0] or "all",
        "GPUs": lambda r: size(r[0], r[1])[0],
        "n": lambda r: size(r[0], r[1])[1],
        "metric": lambda r: r[1],
        "median": lambda r: percent(r[2].median, 2),
        "p90": lambda r: percent(r[2].p90, 2),
        "in 90%": lambda r: percent(covered(r[0], r[1]), 0),
    } | {
        title: lambda r, b=b: percent(result.baselines[b].metrics(r[0])[r[1]].median, 2)
        for title, b in (("Normal", "normal"), ("sample", "sample"))
    }
    style = lambda r: "bold" if r[0] is None else ""  # noqa: E731
    return [tabulate("Slow end of fleets, from 50 GPUs", columns, rows, style)]


def fault_tables(result: FaultResult) -> Shown:
    """Every prediction of later days with its 90% interval, and the baselines of the share lost."""
    low_high = lambda r: "{:.3g} to {:.3g}".format(*result.intervals[r.metric, r.group])  # noqa: E731
    columns: Cells[Row] = {
        "fitted -> predicted": lambda r: r.group,
        "metric": lambda r: r.metric,
        "predicted": lambda r: f"{r.predicted:.3g}",
        "5% to 95%": low_high,
        "measured": lambda r: f"{r.measured:.3g}",
        "error": lambda r: f"{100 * r.error:+.0f}%",
    }
    others: Cells[tuple[str, Row]] = {
        "baseline": lambda r: r[0].replace("_", " "),
        "fitted -> predicted": lambda r: r[1].group,
        "share_lost": lambda r: f"{r[1].predicted:.3g}",
        "measured": lambda r: f"{r[1].measured:.3g}",
        "error": lambda r: f"{100 * r[1].error:+.0f}%",
    }
    rows = [(name, r) for name, b in result.baselines.items() for r in b.rows]
    return [tabulate("Later days of a log of faults", columns, result.rows), tabulate("Baselines", others, rows)]


# ---- speed-ups


def pair_tables(result: PairResult) -> Shown:
    """Every pair, the largest differences first; then all pairs, by bound and by edit."""
    columns: Cells[ScoredEdit] = {
        "pair": lambda p: p.measured.name,
        "bound": lambda p: p.measured.bound.removesuffix("-bound"),
        "predicted": lambda p: f"{p.speedup:.3f}",
        "5% to 95%": lambda p: f"{p.low:.2f} to {p.high:.2f}",
        "measured": lambda p: f"{p.measured.speedup:.3f}",
        "points": lambda p: f"{p.points:+.1f}",
        "noise": lambda p: "" if p.measured.noise is None else f"{p.measured.noise:.1f}",
        "GPU predicted": lambda p: f"{p.gpu_speedup:.3f}",
        "GPU measured": lambda p: f"{p.measured.gpu_speedup:.3f}",
    }
    groups: Cells[Any] = {
        "group": lambda r: r[0],
        "pairs": lambda r: f"{r[1]['pairs']:.0f}",
        "median": lambda r: f"{r[1]['median_points']:.1f}",
        "p90": lambda r: f"{r[1]['p90_points']:.1f}",
        "right sign": lambda r: pct(r[1]["right_sign"], 0) if r[1]["with_effect"] else "",
        "of": lambda r: f"{r[1]['with_effect']:.0f}",
        "in range": lambda r: pct(r[1]["interval_hit_rate"], 0),
        "runs differ": lambda r: f"{r[1]['noise_points']:.1f}" if r[1]["noise_points"] == r[1]["noise_points"] else "",
    }
    pairs = sorted(result.pairs, key=lambda p: -abs(p.points))
    parts = [(group, rates(some)) for group, some in (("all", [*result.pairs]), *result.parts().items())]
    return [
        tabulate(
            "Speed-ups, predicted and measured",
            columns,
            pairs,
            lambda p: "" if p.right_sign or not p.has_effect else "red",
            fold=False,
        ),
        "",
        tabulate(
            "Difference of the time saved, in points of the step",
            groups,
            parts,
            lambda r: "bold" if r[0] == "all" else "",
        ),
    ]


# ---- step times

STEP_FIGURES: Cells[dict[str, Any]] = {
    "runs": lambda s: str(s["runs"]),
    "n": lambda s: str(s["n"]),
    "p50": lambda s: pct(s["p50_error"]),
    "p95": lambda s: pct(s["p95_error"]),
    "p99": lambda s: pct(s["p99_error"]),
    "W1/mean": lambda s: pct(s["w1_over_mean"]),
    "CRPS ratio": lambda s: f"{s['crps_ratio']:.2f}",
    "below 95%": lambda s: pct(s["coverage_95"], 1),
    "KS": lambda s: f"{s['ks']:.2f}",
    "floor": lambda s: f"{s['ks_floor']:.2f}",
    "total": lambda s: pct(s["run_total_error"]),
    "in 90%": lambda s: pct(s["run_interval_90_coverage"], 0),
}


def named(figures: Cells[Any], title: str = "group") -> Cells[tuple[str, Any]]:
    """The same cells of (name, figures), after a column of names."""
    return {title: lambda r: r[0]} | {k: lambda r, cell=cell: cell(r[1]) for k, cell in figures.items()}


def step_tables(result: StepsResult) -> Shown:
    """One of each kind of record: every group, then all of them, beside the baselines; and the zero-data rows."""
    out: Shown = []
    for kind in result.kinds():
        rows = [r for r in result.rows if r.kind == kind]
        lines = [(_short(g), summary([r for r in rows if r.group == g])) for g in result.groups(kind)]
        lines.append(("all", summary(rows)))
        if any(r.n_cut for r in rows):
            first = f"all, with the {sum(r.n_cut for r in rows)} first steps"
            lines.append((first, summary(rows, cut=False)))
        lines.append(("training steps resampled (iid)", summary(rows, "iid")))
        lines.append(("best single family", summary(rows, "family")))
        title, style = f"Left-out runs, {kind}: median |errors|", lambda r: "bold" if r[0] == "all" else ""
        out += [tabulate(title, named(STEP_FIGURES), lines, style, fold=False), ""]
    return [*out, zero_table(result), *(f"{k}: {pct(v, 1)}" for k, v in result.zero.metrics().items())]


def zero_table(result: StepsResult) -> Table:
    columns: Cells[Any] = {
        "group": lambda r: _short(r.group),
        "GPU": lambda r: r.architecture,
        "nodes": lambda r: f"{r.nodes:.0f}",
        "step": lambda r: f"{r.step_seconds:.2f} s",
        "measured": lambda r: pct(r.measured, sign="+"),
        "predicted": lambda r: pct(r.predicted, sign="+"),
        "90% of systems": lambda r: f"{100 * r.low:.1f} to {100 * r.high:.1f}%",
        "error": lambda r: f"{100 * (r.predicted - r.measured):+.2f}{'' if r.hit else ' (miss)'}",
    }
    return tabulate("No data: p95 over p50 from GPU, nodes and step time", columns, result.zero.rows, left=2)


def composed_tables(result: ComposedResult) -> Shown:
    """Every system: its typical step, and how far above it the tail is."""
    columns: Cells[Any] = {
        "system": lambda r: _short(r.group),
        "n": lambda r: str(r.n),
        "p50": lambda r: f"{r.measured_p50:.2f} s",
        "error": lambda r: pct(r.p50_error, 1, sign="+"),
        "p95/p50": lambda r: pct(r.tails["p95"].measured, sign="+"),
        "predicted": lambda r: _ratio_text(r.tails["p95"]),
        "p99/p50": lambda r: pct(r.tails["p99"].measured, sign="+"),
        "predicted ": lambda r: _ratio_text(r.tails["p99"]),
        "in 50%": lambda r: pct(r.coverage["50"], 0),
        "90%": lambda r: pct(r.coverage["90"], 0),
        "95%": lambda r: pct(r.coverage["95"], 0),
        "W1": lambda r: pct(r.w1_over_mean),
        "KS": lambda r: f"{r.ks:.2f} ({r.ks_floor:.2f})",
    }
    out: Shown = [tabulate("Steps from configs alone", columns, result.rows, fold=False), ""]
    m = result.metrics()
    for name, value in m.items():
        cells = value if isinstance(value, dict) else {"": value}
        out.append(f"{name}: {', '.join(f'{k} {v:.4g}'.strip() for k, v in cells.items())}")
    return [*out, f"a constant instead, p95_over_p50_points: {result.constant()}" if result.constant() else ""]


def _ratio_text(r: TailRatio) -> str:
    return f"{pct(r.predicted, sign='+')} ({100 * r.low:.1f} to {100 * r.high:.1f})"


def _short(group: str) -> str:
    parts = group.split("/")
    return "/".join(parts[1:]) if len(parts) == 3 else group


def temporal_tables(result: TemporalResult) -> Shown:
    """Every series. Titles of the p99's cells differ by a space from those of the p95's."""
    ratio: dict[str, Callable[[Ratio], str]] = {
        "/p50": lambda r: pct(r.measured, sign="+"),
        "predicted": lambda r: pct(r.predicted, sign="+"),
        "90%": lambda r: f"{100 * r.low:.2f} to {100 * r.high:.2f}",
        "error": lambda r: f"{100 * r.error:+.2f}",
    }
    columns: Cells[Any] = {
        "series": lambda r: r.series,
        "cause": lambda r: r.cause,
        "n": lambda r: str(r.n),
        "warm-up": lambda r: str(r.warm_up),
        "slow share": lambda r: f"{r.slow_share:.2f}",
    } | {
        f"{q}{k}" if k == "/p50" else k if q == "p95" else f"{k} ": lambda r, q=q, cell=cell: cell(r.ratios[q])
        for q in ("p95", "p99")
        for k, cell in ratio.items()
    }
    title = "Second halves of series, from their first halves"
    return [tabulate(title, columns, result.rows, left=2, fold=False)]


# ---- step times from per-operation tables

EFFECTS = ("rank", "step", "replica", "load", "own", "transfers", "collectives", "host")
INSIDE = {None: "-", 0.0: "no", 1.0: "yes"}
STRAGGLER_FIGURES: Cells[Any] = {
    "n": lambda f: str(f.n),
    "p50": lambda f: pct(f.p50_error, sign="+"),
    "p95": lambda f: pct(f.p95_error, sign="+"),
    "p99": lambda f: pct(f.p99_error, sign="+"),
    "W1/mean": lambda f: pct(f.w1_over_mean),
    "CRPS ratio": lambda f: f"{f.crps_ratio:.2f}",
    "below 95%": lambda f: pct(f.coverage_95, 0),
    "KS": lambda f: f"{f.ks:.2f}",
    "floor": lambda f: f"{f.ks_floor:.2f}",
    "5%": lambda f: f"{f.ks_critical_5pct:.2f}",
    "total in 90%": lambda f: INSIDE[f.run_interval_90_coverage],
}


def straggler_tables(result: StragglersResult) -> Shown:
    """Every job: even steps predict odd ones, the other way round, and every operation drawn by itself; its effects."""
    rows = [
        row for j in result.jobs for row in ((j.job, j.ours), ("  odd to even steps", j.back), ("  iid pool", j.iid))
    ]
    jobs = [(j, sizes_of(j.effects)) for j in result.jobs]
    columns: Cells[Any] = (
        {"job": lambda r: r[0].job}
        | {k: lambda r, k=k: pct(r[1].by_name[k].value) for k in EFFECTS}
        | {
            "slow workers": lambda r: (
                ", ".join(f"dp {d} stage {s} x{x:.2f}" for (d, s), x in list(r[1].slow.items())[:3]) or "none"
            ),
            "p95: draws": lambda r: f"±{pct(r[0].sure.monte_carlo)}",
            "steps": lambda r: f"±{pct(r[0].sure.training_steps)}",
        }
    )
    title, style = "Steps predicted from the other half of a job's steps", lambda r: "" if r[0][0] == " " else "bold"
    return [
        tabulate(title, named(STRAGGLER_FIGURES, "job"), rows, style, fold=False),
        "",
        tabulate("Fitted effects (sd)", columns, jobs, fold=False),
    ]
