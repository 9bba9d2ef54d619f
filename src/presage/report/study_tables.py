"""Rich tables, sentences and plots of studies. Knows no physics: it prints values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from presage.prediction.jobs.job_prediction import COMPUTE, TRANSFERS
from presage.report.plain import plain_table
from presage.report.plots import Lines, draw_lines
from presage.studies.study_point import Point, Study
from presage.text import percent, seconds

__all__ = ["headline", "lesson", "plot", "remarks", "study_table"]

FIRST = {"scale": "GPUs", "compute": "GPU", "domain": "NVLink", "power": "GPUs held to"}
ABOUT = {
    "scale": "on more GPUs",
    "compute": "on GPUs with faster tensor cores, the network and the plan as they are",
    "domain": "on the same GPUs in larger NVLink domains",
    "power": "on GPUs that are given less power and differ more",
}
Told = Callable[[Point], str]
MORE: dict[str, dict[str, Told]] = {
    "scale": {
        "tokens/s/GPU": lambda p: f"{p.rate:,.0f}",
        "goodput": lambda p: percent(p.more["goodput"]),
        "useful": lambda p: f"{p.more['useful_rate']:,.0f}",
    },
    "compute": {
        "times as fast": lambda p: f"{p.more['speedup']:.2f}",
        "MFU": lambda p: percent(_mfu(p)),
        "exposed": lambda p: percent(p.part(*TRANSFERS)),
        "bubble": lambda p: percent(p.part("bubble")),
        "bound": lambda p: p.prediction.bound,
    },
    "domain": {
        "times as fast": lambda p: f"{p.more['speedup']:.2f}",
        "MFU": lambda p: percent(_mfu(p)),
        "exposed": lambda p: percent(p.part(*TRANSFERS)),
        "plan": lambda p: p.note,
    },
    "power": {
        "clock": lambda p: percent(p.more["clock"]),
        "slower": lambda p: percent(p.more["slower"]) if p.more["slower"] else "-",
        "placing": lambda p: percent(-p.more["placing"]) if "placing" in p.more else "",
    },
}
PARTS = {"compute": COMPUTE, "transfers": TRANSFERS, "bubble": ("bubble",), "host, optimizer": ("host", "optimizer")}


def _mfu(p: Point) -> float:
    """With what noise adds."""
    return p.prediction.mfu * p.prediction.seconds / p.mean


# ---- the answer


def headline(s: Study) -> str:
    """The job, and what the study teaches in a sentence."""
    job = s.job
    what = f"[bold]{escape(job.name or job.model.name or 'job')}[/bold]"
    where = f"{escape(job.platform.gpu.name)} ({escape(job.platform.key)})"
    on = where if s.kind == "scale" else f"{job.gpus:,} x {where}"
    return f"{what}, {on}: {ABOUT[s.kind]}\n{escape(lesson(s))}"


def lesson(s: Study) -> str:
    """What to learn, in a sentence."""
    if len(s.points) < 2:
        return "There is too little to compare."
    told = {"scale": _scale, "compute": _compute, "domain": _domain, "power": _power}
    return told[s.kind](s.points)


def _scale(points: tuple[Point, ...]) -> str:
    a, b = points[0], points[-1]
    kept = b.more["useful_rate"] / a.more["useful_rate"]
    return (
        f"From {a.name} to {b.name} GPUs a GPU's useful throughput goes to {percent(kept, 0)}: p50 from "
        f"{seconds(a.p50.value)} to {seconds(b.p50.value)}, p95/p50 from {a.spread:.3f} to {b.spread:.3f}, goodput "
        f"from {percent(a.more['goodput'], 0)} to {percent(b.more['goodput'], 0)}."
    )


def _compute(points: tuple[Point, ...]) -> str:
    a, b = points[0], points[-1]
    shown = f"transfers that show go from {percent(a.part(*TRANSFERS), 0)} to {percent(b.part(*TRANSFERS), 0)} of it"
    return (
        f"{b.name} the compute makes the step {b.more['speedup']:.2f} times as fast: {shown}, "
        f"and noise costs {percent(b.stragglers)} of it instead of {percent(a.stragglers)}."
    )


def _domain(points: tuple[Point, ...]) -> str:
    a, b = points[0], max(points, key=lambda p: p.more["speedup"])
    if b is a:
        return f"Nothing is quicker than {a.name}: the plan's transfers fit in it already."
    less, before, after = (
        percent(1 - b.p95.value / a.p95.value),
        percent(a.part(*TRANSFERS)),
        percent(b.part(*TRANSFERS)),
    )
    return (
        f"{b.name} is {b.more['speedup']:.2f} times as fast as {a.name}, its p95 {less} lower: transfers that show go "
        f"from {before} to {after} of the step."
    )


def _power(points: tuple[Point, ...]) -> str:
    a, b = points[0], points[-1]
    alone = next((p for p in points if p.more["cap"] == b.more["cap"]), b)
    wide, clock = percent(b.mean / alone.mean - 1), percent(alone.mean / a.mean - 1)
    gain = (
        f"; placing GPUs by their speeds would take {percent(b.more['placing'])} off p95" if "placing" in b.more else ""
    )
    return (
        f"At {percent(b.more['cap'], 0)} of the power the step is {clock} longer by the clock, and {wide} more if GPUs "
        f"then differ by {100 * b.more['spread']:.2g}% instead of {100 * alone.more['spread']:.2g}%{gain}."
    )


def study_table(s: Study) -> Table:
    """Every point."""
    columns = MORE[s.kind]
    common = ("no noise", "p50", "p95", "p95/p50", "noise costs")
    table = plain_table("Steps", FIRST[s.kind], *common, *columns, fold=False)
    for p in s.points:
        cells = [seconds(p.quiet), seconds(p.p50.value), seconds(p.p95.value), f"{p.spread:.3f}", percent(p.stragglers)]
        table.add_row(p.name, *cells, *(escape(told(p)) for told in columns.values()))
    return table


def remarks(s: Study) -> list[str]:
    """What to know before trusting it."""
    out = [f"left out: {x.name}: {x.reason}" for x in s.skipped]
    late = max((p.p95.error / p.p95.value for p in s.points), default=0.0)
    mean = max((p.draws.mean.error / p.mean for p in s.points), default=0.0)
    out.append(f"standard errors: of p95 up to {percent(late, 2)}, of the mean (noise costs) up to {percent(mean, 2)}")
    if any(not p.prediction.memory.fits for p in s.points):
        out.append("some do not fit in memory: " + ", ".join(p.name for p in s.points if not p.prediction.memory.fits))
    if s.kind == "scale":
        out.append(
            "goodput: failures at the rates of Llama 3's run, the same for each node at any scale, checkpoints at "
            "their best interval; useful: tokens/s/GPU of the mean step x goodput"
        )
    if s.kind == "power":
        out.append("placing: what the best placement takes off p95 against random ones, of the first row and the last")
    return [*out, f"noise: {s.source}"]


# ---- the plot


def plot(s: Study, path: Path) -> None:
    """Panels of the study's points in a file."""
    job = s.job
    title = f"{job.name or job.model.name or 'job'} {ABOUT[s.kind]}"
    told = {"scale": _scale_panels, "power": _power_panels}.get(s.kind, _part_panels)
    places, panels = told(s.points)
    draw_lines(path, title, places, FIRST[s.kind], panels)


def _scale_panels(ps: tuple[Point, ...]) -> tuple[list[str], list[Lines]]:
    steps = {"p95": _values(ps, _p95), "p50": _values(ps, _p50), "no noise": _values(ps, lambda p: p.quiet)}
    both = {"tokens/s/GPU": _values(ps, lambda p: p.rate), "useful": _values(ps, lambda p: p.more["useful_rate"])}
    tail = {"": _values(ps, lambda p: 100 * (p.spread - 1))}
    return [p.name for p in ps], [
        Lines("step, s", steps),
        Lines("p95 over p50, %", tail, from_zero=True),
        Lines("throughput of a GPU, tokens/s", both, from_zero=True),
    ]


def _power_panels(ps: tuple[Point, ...]) -> tuple[list[str], list[Lines]]:
    """A line for each spread, over the watts."""
    spreads, caps = dict.fromkeys(p.more["spread"] for p in ps), dict.fromkeys(p.name.split(",")[0] for p in ps)
    some = {f"spread {100 * sd:.2g}%": tuple(p for p in ps if p.more["spread"] == sd) for sd in spreads}
    middles = {f"p50, {name}": _values(x, _p50) for name, x in some.items()}
    lates = {f"p95, {name}": _values(x, _p95) for name, x in some.items()}
    tails = {name: _values(x, lambda p: 100 * (p.spread - 1)) for name, x in some.items()}
    costs = {name: _values(x, lambda p: 100 * p.stragglers) for name, x in some.items()}
    return list(caps), [
        Lines("step, s", lates | middles),
        Lines("p95 over p50, %", tails, from_zero=True),
        Lines("what noise adds to the mean step, %", costs, from_zero=True),
    ]


def _part_panels(ps: tuple[Point, ...]) -> tuple[list[str], list[Lines]]:
    steps = {
        "no noise": _values(ps, lambda p: p.quiet),
        "to p50": _values(ps, lambda p: p.p50.value - p.quiet),
        "to p95": _values(ps, lambda p: p.p95.value - p.p50.value),
    }
    shares = {
        name: _values(ps, lambda p, parts=parts: p.part(*parts) * p.prediction.seconds)  # type: ignore[misc]
        for name, parts in PARTS.items()
    }
    return [p.name for p in ps], [
        Lines("step, s", steps, stacked=True),
        Lines("where the predicted step goes, s", shares, stacked=True),
        Lines("p95 over p50, %", {"": _values(ps, lambda p: 100 * (p.spread - 1))}, stacked=True),
    ]


def _p50(p: Point) -> float:
    return p.p50.value


def _p95(p: Point) -> float:
    return p.p95.value


def _values(points: Iterable[Point], told: Callable[[Point], float]) -> tuple[float, ...]:
    return tuple(told(p) for p in points)
