"""The answer of `presage study`: a job on hardware that does not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from presage.prediction.jobs.job_prediction import COMPUTE, TRANSFERS
from presage.report.answer import Answer, DataTable, Section, data_table
from presage.report.plots import LinePanel, draw_lines
from presage.studies.study_point import Study, StudyPoint
from presage.text import percent, seconds

FIRST = {
    "scale": "GPUs", "compute": "GPU", "domain": "NVLink", "power": "power cap", "noise": "plan", "slow-node": "node",
    "hot-rack": "rack",
}  # fmt: skip
ABOUT = {
    "scale": "on more GPUs",
    "compute": "on GPUs with faster tensor cores, same network and plan",
    "domain": "on the same GPUs in larger NVLink domains",
    "power": "on power-capped GPUs with a larger speed spread",
    "noise": "with one kind of parallelism at a time, under the same noise",
    "slow-node": "with one slow node, all other GPUs alike",
    "hot-rack": "with a hot rack, all other GPUs alike",
}
Column = Callable[[StudyPoint], str]
MORE: dict[str, dict[str, Column]] = {
    "scale": {
        "tokens/s/GPU": lambda p: f"{p.rate:,.0f}",
        "goodput": lambda p: percent(p.more["goodput"]),
        "useful": lambda p: f"{p.more['useful_rate']:,.0f}",
    },
    "compute": {
        "speed-up": lambda p: f"{p.more['speedup']:.2f}",
        "MFU": lambda p: percent(_mfu(p)),
        "exposed": lambda p: percent(p.part(*TRANSFERS)),
        "bubble": lambda p: percent(p.part("bubble")),
        "bound": lambda p: p.prediction.bound,
    },
    "domain": {
        "speed-up": lambda p: f"{p.more['speedup']:.2f}",
        "MFU": lambda p: percent(_mfu(p)),
        "exposed": lambda p: percent(p.part(*TRANSFERS)),
        "plan": lambda p: p.note,
    },
    "power": {
        "clock": lambda p: percent(p.more["clock"]),
        "slower": lambda p: percent(p.more["slower"]) if p.more["slower"] else "-",
        "placement": lambda p: percent(-p.more["placing"]) if "placing" in p.more else "",
    },
    "noise": {
        "GPUs": lambda p: percent(p.more["gpus"]),
        "operations": lambda p: percent(p.more["own"]),
        "network": lambda p: percent(p.more["network"]),
        "all alike": lambda p: percent(p.more["common"]),
    },
    "slow-node": {
        "p95, best stage": lambda p: percent(p.more["least"]),
        "p95, worst stage": lambda p: percent(p.more["most"]),
        "worst": lambda p: f"{p.more['stage']:.0f}" if p.more["stage"] >= 0 else "",
    },
    "hot-rack": {"p95 cost": lambda p: percent(p.more["cost"])},
}
PANEL_PARTS = {
    "compute": COMPUTE,
    "exposed communication": TRANSFERS,
    "pipeline bubble": ("bubble",),
    "host, optimizer": ("host", "optimizer"),
}


def _mfu(p: StudyPoint) -> float:
    """MFU of the mean step, noise included."""
    return p.prediction.mfu * p.prediction.seconds / p.mean


# ---- the answer


def study_answer(s: Study) -> Answer:
    """Everything `presage study` shows."""
    job = s.job
    name = job.name or job.model.name or "job"
    where = f"{job.platform.gpu.name} ({job.platform.key})"
    on = where if s.kind == "scale" else f"{job.gpus:,} x {where}"
    return Answer(
        title=name,
        subject=f"{name}, {on}: {ABOUT[s.kind]}",
        headline=lesson(s),
        sections=(Section("Steps", (study_table(s),)),),
        notes=notes(s),
        to_data=s.to_json,
    )


def lesson(s: Study) -> str:
    """The result in a sentence."""
    if len(s.points) < 2:
        return "Nothing to compare: fewer than two points."
    sentences = {
        "scale": _scale, "compute": _compute, "domain": _domain, "power": _power, "noise": _noise,
        "slow-node": _slow_node, "hot-rack": _hot_rack,
    }  # fmt: skip
    return sentences[s.kind](s.points)


def _scale(points: tuple[StudyPoint, ...]) -> str:
    a, b = points[0], points[-1]
    kept = b.more["useful_rate"] / a.more["useful_rate"]
    return (
        f"From {a.name} to {b.name} GPUs, useful throughput per GPU falls to {percent(kept, 0)}: p50 "
        f"{seconds(a.p50.value)} to {seconds(b.p50.value)}, p95/p50 {a.spread:.3f} to {b.spread:.3f}, goodput "
        f"{percent(a.more['goodput'], 0)} to {percent(b.more['goodput'], 0)}."
    )


def _compute(points: tuple[StudyPoint, ...]) -> str:
    a, b = points[0], points[-1]
    shown = f"exposed communication grows from {percent(a.part(*TRANSFERS), 0)} to {percent(b.part(*TRANSFERS), 0)}"
    return (
        f"{b.name} the compute makes the step {b.more['speedup']:.2f}x as fast: {shown} of the step, and noise costs "
        f"{percent(b.stragglers)} instead of {percent(a.stragglers)}."
    )


def _domain(points: tuple[StudyPoint, ...]) -> str:
    a, b = points[0], max(points, key=lambda p: p.more["speedup"])
    if b is a:
        return f"No larger domain is faster than {a.name}: the plan's communication already fits in it."
    less, before, after = (
        percent(1 - b.p95.value / a.p95.value),
        percent(a.part(*TRANSFERS)),
        percent(b.part(*TRANSFERS)),
    )
    return (
        f"{b.name} is {b.more['speedup']:.2f}x as fast as {a.name}, p95 {less} lower: exposed communication falls from "
        f"{before} to {after} of the step."
    )


def _power(points: tuple[StudyPoint, ...]) -> str:
    a, b = points[0], points[-1]
    alone = next((p for p in points if p.more["cap"] == b.more["cap"]), b)
    wide, clock = percent(b.mean / alone.mean - 1), percent(alone.mean / a.mean - 1)
    gain = f"; placing GPUs by speed takes {percent(b.more['placing'])} off p95" if "placing" in b.more else ""
    return (
        f"At {percent(b.more['cap'], 0)} of the power, lower clocks make the step {clock} longer, and a GPU spread of "
        f"{100 * b.more['spread']:.2g}% instead of {100 * alone.more['spread']:.2g}% another {wide}{gain}."
    )


def _noise(points: tuple[StudyPoint, ...]) -> str:
    most, least = max(points, key=lambda p: p.excess), min(points, key=lambda p: p.excess)
    return (
        f"{most.name} minds noise most: p95 {percent(most.excess)} over a step without noise; {least.name} least, "
        f"{percent(least.excess)}."
    )


def _slow_node(points: tuple[StudyPoint, ...]) -> str:
    b = points[-1]
    where = f"in stage {b.more['stage']:.0f}" if b.shape.stages > 1 else "wherever it is"
    return (
        f"A node whose GPUs take {b.more['factor']:g} times as long makes p95 {percent(b.more['most'])} longer {where}"
        + (f", {percent(b.more['least'])} where it costs least." if b.shape.stages > 1 else ".")
    )


def _hot_rack(points: tuple[StudyPoint, ...]) -> str:
    laid = [p for p in points[1:] if p.more["groups"]]
    worst, best = max(laid, key=lambda p: p.more["cost"]), min(laid, key=lambda p: p.more["cost"])
    least, most = percent(best.more["cost"]), percent(worst.more["cost"])
    return f"A hot rack costs {least} of p95 ({best.name}) to {most} ({worst.name})."


def study_table(s: Study) -> DataTable:
    """One row per point."""
    columns = MORE[s.kind]
    rows = [
        (
            p.name, seconds(p.quiet), seconds(p.p50.value), seconds(p.p95.value), f"{p.spread:.3f}",
            percent(p.stragglers), *(text(p) for text in columns.values()),
        )
        for p in s.points
    ]  # fmt: skip
    return data_table("Steps", (FIRST[s.kind], "no noise", "p50", "p95", "p95/p50", "noise costs", *columns), rows)


def notes(s: Study) -> tuple[str, ...]:
    """What to know before trusting it."""
    out = [f"skipped {x.name}: {x.reason}" for x in s.skipped]
    late = max((p.p95.error / p.p95.value for p in s.points), default=0.0)
    mean = max((p.draws.mean.error / p.mean for p in s.points), default=0.0)
    out.append(f"standard errors: p95 up to {percent(late, 2)}, mean (noise costs) up to {percent(mean, 2)}")
    large = [p.name for p in s.points if not p.prediction.memory.fits]
    if large:
        out.append(f"does not fit in memory: {', '.join(large)}")
    if s.kind == "scale":
        out.append(
            "goodput: Llama 3's failure rates per node at every scale, checkpoints at the best interval; useful: "
            "tokens/s/GPU of the mean step x goodput"
        )
    if s.kind == "power":
        out.append("placement: change in p95 of the best placement against random ones, first and last row")
    return (*out, f"noise: {s.source}")


# ---- the plot


def plot_study(s: Study, path: Path) -> None:
    """Write the plot of a study."""
    job = s.job
    title = f"{job.name or job.model.name or 'job'} {ABOUT[s.kind]}"
    panels_of = {
        "scale": _scale_panels, "power": _power_panels, "noise": _noise_panels, "slow-node": _slow_panels,
        "hot-rack": _rack_panels,
    }.get(s.kind, _part_panels)  # fmt: skip
    places, panels = panels_of(s.points)
    draw_lines(path, title, places, FIRST[s.kind], panels)


def _scale_panels(ps: tuple[StudyPoint, ...]) -> tuple[list[str], list[LinePanel]]:
    steps = {"p95": _values(ps, _p95), "p50": _values(ps, _p50), "no noise": _values(ps, lambda p: p.quiet)}
    both = {"tokens/s/GPU": _values(ps, lambda p: p.rate), "useful": _values(ps, lambda p: p.more["useful_rate"])}
    tail = {"": _values(ps, lambda p: 100 * (p.spread - 1))}
    return [p.name for p in ps], [
        LinePanel("step, s", steps),
        LinePanel("p95 over p50, %", tail, from_zero=True),
        LinePanel("throughput of a GPU, tokens/s", both, from_zero=True),
    ]


def _power_panels(ps: tuple[StudyPoint, ...]) -> tuple[list[str], list[LinePanel]]:
    """A line for each spread, over the watts."""
    spreads, caps = dict.fromkeys(p.more["spread"] for p in ps), dict.fromkeys(p.name.split(",")[0] for p in ps)
    groups = {f"spread {100 * sd:.2g}%": tuple(p for p in ps if p.more["spread"] == sd) for sd in spreads}
    middles = {f"p50, {name}": _values(x, _p50) for name, x in groups.items()}
    lates = {f"p95, {name}": _values(x, _p95) for name, x in groups.items()}
    tails = {name: _values(x, lambda p: 100 * (p.spread - 1)) for name, x in groups.items()}
    costs = {name: _values(x, lambda p: 100 * p.stragglers) for name, x in groups.items()}
    return list(caps), [
        LinePanel("step, s", lates | middles),
        LinePanel("p95 over p50, %", tails, from_zero=True),
        LinePanel("what noise adds to the mean step, %", costs, from_zero=True),
    ]


def _part_panels(ps: tuple[StudyPoint, ...]) -> tuple[list[str], list[LinePanel]]:
    steps = {
        "no noise": _values(ps, lambda p: p.quiet),
        "to p50": _values(ps, lambda p: p.p50.value - p.quiet),
        "to p95": _values(ps, lambda p: p.p95.value - p.p50.value),
    }
    shares = {
        name: _values(ps, lambda p, parts=parts: p.part(*parts) * p.prediction.seconds)  # type: ignore[misc]
        for name, parts in PANEL_PARTS.items()
    }
    return [p.name for p in ps], [
        LinePanel("step, s", steps, stacked=True),
        LinePanel("where the predicted step goes, s", shares, stacked=True),
        LinePanel("p95 over p50, %", {"": _values(ps, lambda p: 100 * (p.spread - 1))}, stacked=True),
    ]


def _noise_panels(ps: tuple[StudyPoint, ...]) -> tuple[list[str], list[LinePanel]]:
    """What noise adds to p95, all of it and each cause by itself."""
    names = {"gpus": "differences between GPUs", "own": "operations", "network": "network", "common": "common to all"}
    causes = {name: _values(ps, lambda p, k=k: 100 * p.more[k]) for k, name in names.items()}  # type: ignore[misc]
    return [p.name for p in ps], [
        LinePanel("p95 over a step without noise, %", {"": _values(ps, lambda p: 100 * p.excess)}, stacked=True),
        LinePanel("each cause alone, %", causes, from_zero=True),
        LinePanel("p95 over p50, %", {"": _values(ps, lambda p: 100 * (p.spread - 1))}, stacked=True),
    ]


def _slow_panels(ps: tuple[StudyPoint, ...]) -> tuple[list[str], list[LinePanel]]:
    costs = {"worst stage": _values(ps, lambda p: 100 * p.more["most"])}
    costs |= {"best stage": _values(ps, lambda p: 100 * p.more["least"])} if ps[0].shape.stages > 1 else {}
    return [p.name for p in ps], [LinePanel("p95, % longer", costs), LinePanel("p95, s", {"": _values(ps, _p95)})]


def _rack_panels(ps: tuple[StudyPoint, ...]) -> tuple[list[str], list[LinePanel]]:
    return [p.name for p in ps], [
        LinePanel("p95, % longer", {"": _values(ps, lambda p: 100 * p.more["cost"])}, stacked=True),
        LinePanel("step, s", {"p95": _values(ps, _p95), "p50": _values(ps, _p50)}),
    ]


def _p50(p: StudyPoint) -> float:
    return p.p50.value


def _p95(p: StudyPoint) -> float:
    return p.p95.value


def _values(points: Iterable[StudyPoint], value: Callable[[StudyPoint], float]) -> tuple[float, ...]:
    return tuple(value(p) for p in points)
